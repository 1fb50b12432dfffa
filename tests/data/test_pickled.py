"""Reading pickles without unpickling them; hostile ones are in test_cifar.py."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from fedman.data import pickled
from fedman.data.cifar import OPCODES
from fedman.errors import UserError
from tests.data import data_archives as make


@pytest.mark.parametrize("fortran", [False, True])
def test_pickles_are_read_as_the_unpickler_would(fortran: bool) -> None:
    x, y = make.images(300, 1), np.arange(300) % 100
    raw = make.cifar_python(x, y, coarse=True, fortran=fortran)
    expected = pickle.loads(raw, encoding="bytes")
    atoms = pickled.read(raw, "train", OPCODES * 300)
    np.testing.assert_array_equal(pickled.array(atoms, b"data", (300, 3072)), expected[b"data"])
    assert pickled.numbers(atoms, b"fine_labels") == expected[b"fine_labels"]
    assert pickled.numbers(atoms, b"coarse_labels") == expected[b"coarse_labels"]


@pytest.mark.parametrize("opcode", [b"]", b"b", b"(", b"K\x01", b"U\0", b"N"])
def test_nobody_waits_for_a_pickle_of_many_opcodes(opcode: bytes) -> None:
    started = time.process_time()
    with pytest.raises(UserError, match="train: refused, the pickle holds more than 4000 opcodes"):
        pickled.read(b"\x80\x02" + opcode * 2_000_000 + b".", "train", 4000)
    assert time.process_time() - started < 1
