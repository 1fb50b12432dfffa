"""The import graph of the package by rooms: `python -m tests.import_layers` prints it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "fedman"
LAYERS = (
    ("errors",),
    ("parts",),
    ("optimizers", "trackers"),
    ("algorithms", "aggregation", "models"),
    ("kernels",),
    ("penalties", "data"),
    ("tasks",),
    ("execution",),
    ("flatness", "training"),
    ("backends",),
    ("config",),
    ("runs",),
    ("paper",),
    ("flower",),
    ("api", "cli"),
    ("__init__", "__main__"),
)
"""Rooms and modules of the package's root, from the bottom: each imports only from those before it, or from itself."""


def modules() -> dict[str, Path]:
    """All modules by dotted name; a package's own file has the package's name. Templates of users' apps are none."""
    found = {}
    for path in sorted(p for p in PACKAGE.rglob("*.py") if p.parent.name != "project"):
        parts = ("fedman", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The package's modules that a file imports anywhere in it, for typing too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in inside if name in known} or {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name in known}


def graph() -> dict[str, set[str]]:
    """Who imports whom."""
    known = modules()
    return {name: imports(path, known) - {name} for name, path in known.items()}


def room(module: str) -> str:
    """The room of a module, or its own name at the root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def level(module: str) -> int:
    """The layer of a module, counted from the bottom."""
    return next(i for i, rooms in enumerate(LAYERS) if room(module) in rooms)


def back_edges(edges: dict[str, set[str]]) -> list[str]:
    """Imports that do not go down, but for those inside a room."""
    return [
        f"{name} -> {other}"
        for name, others in edges.items()
        for other in sorted(others)
        if room(name) != room(other) and level(other) >= level(name)
    ]


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """Edges that close a circle of modules."""
    state: dict[str, int] = {}
    found: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        for other in sorted(edges[name]):
            if state.get(other) == 1:
                found.append(f"{name} -> {other}")
            elif other not in state:
                visit(other)
        state[name] = 2

    for name in edges:
        if name not in state:
            visit(name)
    return found


def main() -> None:
    edges = graph()
    for i, rooms in enumerate(LAYERS):
        for each in rooms:
            below = {o for name, others in edges.items() if room(name) == each for o in others if room(o) != each}
            print(f"{i:2}  {each:11} {', '.join(dict.fromkeys(map(room, sorted(below, key=level))))}")
    print(f"back edges: {', '.join(back_edges(edges)) or 'none'}; cycles: {', '.join(cycles(edges)) or 'none'}")


if __name__ == "__main__":
    main()
