"""The pickled batches of CIFAR's python distribution, read without unpickling: no object is built, nothing is called.

Python 2 wrote those files with protocol 2: a dictionary of strings, lists of numbers and strings, and one uint8 array.
Its values follow each other in the file, each after its key, so that pixels and labels can be read off the plain
sequence of strings, numbers and names of globals. Opcodes and globals that no such file holds are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from fedman.errors import UserError, one_line

Atom = bytes | int | str | None  # a str is the name of a global

ARRAY: list[Atom] = ["numpy.core.multiarray _reconstruct", "numpy ndarray", 0, b"b", 1]
DTYPE = "numpy dtype"
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
STRUCTURE = (
    *("PROTO", "STOP", "MARK", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "BUILD"),
)


def read(data: bytes | bytearray, where: str, limit: int) -> list[Atom]:
    """The strings, numbers and names of a pickle in their order; `where` names the file in errors.

    More than `limit` opcodes, whose reading would take long, are refused.
    """
    try:
        return list(_atoms(data, where, limit))
    except ValueError as error:
        raise UserError(f"{where}: is not a whole pickle of a CIFAR batch ({one_line(error, 80)})") from error


def _atoms(data: bytes | bytearray, where: str, limit: int) -> Iterator[Atom]:
    memo: dict[int, Atom] = {}
    atom: list[Atom] = []  # what the last opcode stands for: one atom, or none
    operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(data)
    for count, (op, arg, _) in enumerate(operations):
        if count >= limit:
            raise UserError(f"{where}: refused, the pickle holds more than {limit} opcodes, which no CIFAR file does")
        match op.name:
            case "BINPUT" | "LONG_BINPUT":
                memo.update((arg, a) for a in atom)
                continue
            case "SHORT_BINSTRING" | "BINSTRING":
                atom = [arg.encode("latin-1")]
            case "BININT1" | "BININT2" | "BININT" | "LONG1":
                atom = [arg]
            case "BINGET" | "LONG_BINGET" if arg in memo:
                atom = [memo[arg]]
            case "GLOBAL" if arg in (*ARRAY[:2], DTYPE):
                atom = [arg]
            case name if name in CONSTANTS:
                atom = [CONSTANTS[name]]
            case name if name in STRUCTURE:
                atom = []
            case name:
                what = f"the global {arg.replace(' ', '.')[:80]!r}" if name == "GLOBAL" else f"the opcode {name}"
                raise UserError(f"{where}: refused, the pickle holds {what}, which no CIFAR file does")
        yield from atom


def numbers(atoms: list[Atom], key: bytes) -> list[int]:
    """The whole numbers after `key`."""
    return list(takewhile(lambda atom: type(atom) is int, _after(key, atoms)))  # type: ignore[arg-type]


def array(atoms: list[Atom], key: bytes, shape: tuple[int, int]) -> np.ndarray | None:
    """The uint8 array of this shape after `key`: shape, element type, details of the type, is_fortran, bytes."""
    start = [*ARRAY, *shape, DTYPE]
    found = _after(key, atoms)[: len(start) + 16]
    if found[: len(start) + 1] not in ([*start, b"u1"], [*start, b"|u1"]):
        return None
    for fortran, content in pairwise(found):
        if isinstance(fortran, bool) and isinstance(content, bytes) and len(content) == shape[0] * shape[1]:
            return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
    return None


def _after(key: bytes, atoms: list[Atom]) -> list[Atom]:
    return atoms[atoms.index(key) + 1 :] if key in atoms else []
