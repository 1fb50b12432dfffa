"""Small faults put into a module's syntax tree, one at a time: the raw material of mutation testing.

A mutant differs from the source in one operator, comparison, constant, condition, keyword, return value or statement.
Left alone: docstrings, annotations, imports, decorators, `strict=`, and the words of error messages and of help.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
UNTOUCHED = {"annotation", "returns", "decorator_list", "bases"}  # fields of a node


@dataclass(frozen=True)
class Mutant:
    """One fault: where, what, and the module with it."""

    line: int
    what: str
    code: CodeType


def mutants(path: Path, only: tuple[str, ...] = ()) -> Iterator[Mutant]:
    """All mutants of a file, or of the functions in it that are named (`Class.function`)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = set(only) - {name for node in ast.walk(tree) for name in _names(node)}
    if missing:
        raise LookupError(f"{path}: has no {', '.join(sorted(missing))}")
    for parent, field, index in places(tree, only):
        node = getattr(parent, field) if index is None else getattr(parent, field)[index]
        for new in replacements(node):
            _put(parent, field, index, ast.fix_missing_locations(ast.copy_location(new, node)))
            yield Mutant(node.lineno, f"{_short(node)} -> {_short(new)}", compile(tree, str(path), "exec"))
            _put(parent, field, index, node)


def _names(node: ast.AST) -> Iterator[str]:
    """A function's name, and those of a class's functions."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.ClassDef):
        yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))


Place = tuple[ast.AST, str, int | None]


def places(tree: ast.Module, only: tuple[str, ...]) -> Iterator[Place]:
    """Where a node hangs that may be replaced: its parent, the parent's field, the place in it."""

    def walk(node: ast.AST, inside: bool, name: str) -> Iterator[Place]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
            inside = inside or name in only
        for field, value in ast.iter_fields(node):
            if field in UNTOUCHED:
                continue
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not _left_alone(child, field, node):
                    if inside and hasattr(child, "lineno"):
                        yield node, field, index
                    yield from walk(child, inside, name)

    return walk(tree, not only, "")


def replacements(node: ast.AST) -> Iterator[Any]:
    """What may stand in a node's place. A condition that has a mutant of its own is not turned round as well."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in OPERATORS:
            yield ast.AugAssign(target, OPERATORS[type(op)](), value)
            yield ast.Pass()
        case ast.Compare(left, [op], right):
            yield ast.Compare(left, [COMPARISONS[type(op)]()], right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(str(value)):
            yield ast.Constant(value + "x")
        case ast.IfExp(test, body, orelse) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield ast.IfExp(test, orelse, body)
        case ast.If(test, body, orelse) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Call(function, arguments, keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg not in (None, "strict") and not isinstance(keyword.value, ast.Constant):
                    yield ast.Call(function, arguments, keywords[:i] + keywords[i + 1 :])


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _short(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]
    return text if len(text) < 100 else text[:99] + "…"


def _left_alone(node: ast.AST, field: str, parent: ast.AST) -> bool:
    match parent:
        case ast.Call(ast.Name("hyperparameter"), [_, words, *_]):
            return node is words
    match node:
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.keyword(arg="strict"):
            return True
        case ast.If(ast.Name("TYPE_CHECKING")) | ast.Assign([ast.Name()], ast.Subscript(ast.Name())):  # names of types
            return True
        case ast.Expr(ast.Constant()):  # a docstring
            return field == "body"
    return False
