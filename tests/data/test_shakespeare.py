"""The embedded text: windows that can be read back, speakers as clients."""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources

import numpy as np
import pytest

from fedman import data
from fedman.data import partition
from fedman.data.shakespeare import windows
from fedman.errors import UserError
from fedman.tasks import LanguageModel


def text() -> str:
    return gzip.decompress(resources.files("fedman.data").joinpath("shakespeare.txt.gz").read_bytes()).decode()


def test_shakespeare() -> None:
    plays, spec = data.load("shakespeare"), data.SPECS["shakespeare"]
    assert hashlib.md5(text().encode()).hexdigest() == "6fb458f1232090904fb40fe944165e91"
    assert plays.x_train.shape == plays.y_train.shape == (spec.train, *spec.shape)
    assert plays.x_test.shape == plays.y_test.shape == (spec.test, *spec.shape)
    assert (plays.classes, spec.classes, data.natural_clients("shakespeare")) == (65, len(set(text())), 99)
    assert plays.x_train.dtype == plays.y_train.dtype == np.int64
    assert len(plays.parts) == len(plays.test_parts) == len(plays.client_names) == 99
    assert sum(map(len, plays.parts)) == spec.train
    assert sum(map(len, plays.test_parts)) == spec.test
    LanguageModel().check(plays, (1, 80, 65))


def test_windows_give_back_what_a_speaker_says() -> None:
    """Read off the text by lines, not by blocks; the last fifth is tested on, every character of it once."""
    plays = data.load("shakespeare")
    said: dict[str, list[str]] = {}
    speaker, start = "", True
    for line in text().splitlines():
        if not line:
            start = True
        elif start and line.endswith(":"):
            speaker, start = line[:-1], False
        else:
            said.setdefault(speaker, []).append(line)
    assert len(said) == 299
    letters = np.array(sorted(set(text())))
    for k, name in enumerate(plays.client_names):
        whole = "\n".join(said[name])
        cut = len(whole) - len(whole) // 5
        y = plays.y_test[plays.test_parts[k]]
        assert "".join(letters[y[y >= 0]]) == whole[cut:]
        assert (y[:-1] >= 0).all()
        x = plays.x_test[plays.test_parts[k]].ravel()
        assert "".join(letters[x])[: len(whole) - cut] == whole[cut - 1 : -1]
        x, y = plays.x_train[plays.parts[k]], plays.y_train[plays.parts[k]]
        assert "".join(letters[x.ravel()]) == whole[: x.size]
        np.testing.assert_array_equal(x.ravel()[1:], y.ravel()[:-1])
        assert (y >= 0).all()
        assert cut - 80 <= x.size < cut
    assert set(plays.client_names) == {name for name, lines in said.items() if len("\n".join(lines)) >= 2000}


def test_a_text_of_whole_windows_has_no_padding() -> None:
    x, y = windows(np.arange(1, 8), 3)
    assert (x.tolist(), y.tolist()) == ([[1, 2, 3], [4, 5, 6]], [[2, 3, 4], [5, 6, 7]])


def test_partitions_of_text() -> None:
    plays = data.load("shakespeare")
    natural = partition.clients_of(plays, "natural", 99)
    assert all(np.array_equal(a, b) for a, b in zip(natural, plays.parts, strict=True))
    assert {len(part) for part in partition.clients_of(plays, "iid", 50)} == {plays.x_train.shape[0] // 50}
    for rule in ("dir0.3", "path2"):
        with pytest.raises(UserError, match=rf"{rule} needs class labels, but targets are int64 of shape \(9123, 80\)"):
            partition.clients_of(plays, rule, 10)
