"""The pickled batches of CIFAR's python distribution, read as data: no unpickler runs, nothing is called.

Python 2 wrote those files with protocol 2: a dictionary of strings, lists of numbers and strings, and one
uint8 array. That takes some twenty opcodes and three globals (numpy's `_reconstruct`, `ndarray`, `dtype`),
which are interpreted here as marks, not looked up. Any other opcode or global is refused by name.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedman.errors import UserError

RECONSTRUCT, NDARRAY, DTYPE = "numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"


class _Global(str):
    """The name of an admitted global."""


class _Array:
    """What `_reconstruct` stands for until its state is known; then `value` is the array."""

    value: np.ndarray | None = None


class _Uint8:
    """The only element type admitted."""


_MARK = object()


def read(data: bytes, where: str) -> dict[bytes, Any]:
    """The dictionary pickled in `data`; `where` names the file in errors."""
    try:
        result = _run(data)
    except _Refused as error:
        raise UserError(f"{where}: refused, the pickle holds {error}, which no CIFAR file does") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:80]
        raise UserError(f"{where}: is not a whole pickle of a CIFAR batch ({reason})") from error
    if not isinstance(result, dict):
        raise UserError(f"{where}: is not a pickled dictionary")
    return {key: item.value if isinstance(item, _Array) else item for key, item in result.items()}


class _Refused(Exception):
    """An opcode or global that is not admitted."""


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(data)
    for op, arg, _ in operations:
        match op.name:
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "SHORT_BINSTRING" | "BINSTRING":
                stack.append(arg.encode("latin-1"))
            case "BINUNICODE":
                stack.append(arg.encode())
            case "BININT1" | "BININT2" | "BININT" | "LONG1":
                stack.append(arg)
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[op.name])
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(_pop(stack, int(op.name[-1])))
            case "TUPLE":
                stack.append(_pop_mark(stack))
            case "APPEND":
                _extend(stack, _pop(stack, 1))
            case "APPENDS":
                _extend(stack, _pop_mark(stack))
            case "SETITEM":
                _update(stack, _pop(stack, 2))
            case "SETITEMS":
                _update(stack, _pop_mark(stack))
            case "GLOBAL":
                if arg not in (RECONSTRUCT, NDARRAY, DTYPE):
                    raise _Refused(f"the global {arg.replace(' ', '.')[:80]!r}")
                stack.append(_Global(arg))
            case "REDUCE":
                stack.append(_reduce(*_pop(stack, 2)))
            case "BUILD":
                _build(stack[-2], stack[-1])
                stack.pop()
            case "PROTO":
                pass
            case "STOP":
                (result,) = stack
                return result
            case name:
                raise _Refused(f"the opcode {name}")
    raise ValueError("no end")


def _pop(stack: list[Any], count: int) -> tuple[Any, ...]:
    items = tuple(stack[-count:])
    if len(items) < count or any(item is _MARK for item in items):
        raise ValueError("stack underflow")
    del stack[-count:]
    return items


def _pop_mark(stack: list[Any]) -> tuple[Any, ...]:
    start = next((i for i in range(len(stack) - 1, -1, -1) if stack[i] is _MARK), None)
    if start is None:
        raise ValueError("no mark")
    items = tuple(stack[start + 1 :])
    del stack[start:]
    return items


def _extend(stack: list[Any], items: tuple[Any, ...]) -> None:
    if type(stack[-1]) is not list:
        raise TypeError("items appended to what is no list")
    stack[-1].extend(items)


def _update(stack: list[Any], items: tuple[Any, ...]) -> None:
    if type(stack[-1]) is not dict or not all(type(key) is bytes for key in items[::2]):
        raise TypeError("items set in what is no dictionary of strings")
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _reduce(function: Any, args: Any) -> Any:
    if type(function) is _Global and function == RECONSTRUCT and args[0] == NDARRAY:
        return _Array()
    if type(function) is _Global and function == DTYPE and args[0] in (b"u1", b"|u1"):
        return _Uint8()
    raise _Refused("a call other than that for a uint8 array")


def _build(target: Any, state: Any) -> None:
    """numpy's array state: (version, shape, dtype, is_fortran, bytes)."""
    if isinstance(target, _Uint8):
        return
    if not isinstance(target, _Array):
        raise _Refused("a state for something other than an array")
    _, shape, dtype, fortran, content = state
    if not isinstance(dtype, _Uint8) or type(content) is not bytes:
        raise TypeError("an array of other things than bytes")
    target.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
