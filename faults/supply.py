"""Supply chain: pinned and audited dependencies, no way to run what a file holds, no network but in `data get`."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from faults.runs import SMALL, finish, start, tail
from faults.tally import ROOT, Tally

EXPLAINED: dict[str, str] = {}  # advisories that do not concern this package: id -> why

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"os.system", "os.popen", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"}
NETWORK = {"urllib", "http", "socket", "requests", "httpx", "ftplib", "aiohttp"}
NETWORKED = (
    "data/download.py",
    "flower/",
    "runs/ray_cluster.py",
)  # what may use the network: downloads, federations, clusters


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Each in turn; the audit only in full, since it asks a server."""
    for name, problem in pins():
        tally.check("dependencies pinned in constraints.txt, as installed", problem and f"{name}: {problem}")
    for path in sorted((ROOT / "src").rglob("*.py")):
        inside = str(path.relative_to(ROOT / "src" / "fedman"))
        found = [f"{inside}:{line}: {what}" for line, what in forbidden(path.read_text(), inside.startswith(NETWORKED))]
        tally.check("source files without pickle, eval, unsafe loads, network", "; ".join(found) or None)
    network(tally, scratch)
    if not small:
        audit(tally)


def pins() -> Iterator[tuple[str, str | None]]:
    """Every package that the project or an extra of it needs, directly or not, and what is wrong with its pin."""
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    seen: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name in seen or not any(not requirement.marker or requirement.marker.evaluate({"extra": e}) for e in extras):
            continue
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform or extra
        seen.add(name)
        for inner in metadata.requires(name) or ():
            marker = Requirement(inner).marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras}):
                wanted.append(inner)
        exact = any(s.operator == "==" for s in requirement.specifier)  # torch pins its CUDA libraries itself
        public = installed.partition("+")[0]
        if name not in pinned:
            yield name, None if exact else "is not pinned"
        else:
            yield name, None if pinned[name] == public else f"{installed} is installed, {pinned[name]} is pinned"


def forbidden(source: str, network_allowed: bool = False) -> Iterator[tuple[int, str]]:
    """Lines that load code from data, run a string or reach for the network."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for top in {name.split(".")[0] for name in names}:
                if top in MODULES or (top in NETWORK and not network_allowed):
                    yield node.lineno, f"import {top}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in BUILTINS | CALLS:
                yield node.lineno, f"{called}()"
            if called == "torch.load" and given.get("weights_only") != "True":
                yield node.lineno, "torch.load without weights_only=True"
            if given.get("allow_pickle", "False") != "False" or given.get("shell", "False") != "False":
                yield node.lineno, f"{called} with {given}"


def network(tally: Tally, scratch: Path) -> None:
    """No command but `data get` opens a connection; that one does, so the trap is set right."""
    what, log = "commands without network access", scratch / "network.log"
    small = [*SMALL, "rounds=1", "--device", "cpu"]
    commands: list[tuple[list[str], int]] = [
        (["list"], 0),
        (["--help"], 0),
        (["data", "show", "--preset", "digits"], 0),
        (["run", *small, "--out", str(scratch / "run")], 0),
        (["sweep", *small, "zeta=0,0.1", "--out", str(scratch / "sweep")], 0),
        (["run", "dataset=cifar100", f"data_dir={scratch}"], 2),
        (["run", "dataset=mnist"], 2),
    ]
    for words, expected in commands:
        code = finish(start(words, log, trap))
        held = code == expected and "network: " not in log.read_text()
        tally.check(what, None if held else f"{' '.join(words)}: exit {code}: {tail(log)}")
    finish(start(["data", "get", "cifar100", "--data-dir", str(scratch / "got")], log, trap))
    tally.check("`data get` is caught by the same trap", None if "network: " in log.read_text() else tail(log))


def trap() -> None:
    """Refuse and print every look-up of a name and every connection."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect"):
            print(f"network: {event} {arguments[-1]!r}", flush=True)
            raise ConnectionRefusedError("no network in this test")

    sys.addaudithook(hook)


def audit(tally: Tally) -> None:
    """pip-audit on the pins; where it or its database cannot be had, that is said."""
    what = "pip-audit: pins without a known vulnerability"
    tool = shutil.which("pip-audit", path=f"{ROOT}/.venv/audit/bin") or shutil.which("pip-audit")
    if tool is None:
        tally.note(what, "not tried: pip-audit is not installed")
        return
    words = [tool, "-r", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip", "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    match = re.search(r"^\{.*\}$", done.stdout, re.MULTILINE)
    packages = json.loads(match[0])["dependencies"] if match else [{"skip_reason": done.stderr.strip()[-100:]}]
    audited = [p for p in packages if "vulns" in p]
    if not audited:
        tally.note(what, f"not tried, no database within reach: {packages[0]['skip_reason']}")
    for package in audited:
        known = [v["id"] for v in package["vulns"] if v["id"] not in EXPLAINED]
        tally.check(what, f"{package['name']} {package['version']}: {', '.join(known)}" if known else None)
