"""LEAF's JSON: clients with their samples, text as ids; files that are not what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedman import data
from fedman.data import leaf, partition
from fedman.errors import UserError
from fedman.tasks import LanguageModel

ANN = {"x": [[0.0, 0.5], [1.0, 0.25], [0.5, 0.5]], "y": [0, 1, 2]}
BOB = {"x": [[0.75, 0.5]], "y": [2]}
TEXT = {"x": ["to b", "o be", " be "], "y": ["e", " ", "o"]}


def content(**users: dict[str, list]) -> dict[str, Any]:
    sizes = [len(samples["y"]) for samples in users.values()]
    return {"users": list(users), "num_samples": sizes, "user_data": users, "hierarchies": []}


def write(path: Path, **users: dict[str, list]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content(**users)))
    return path


def test_a_folder_with_own_test_sets(tmp_path: Path) -> None:
    write(tmp_path / "train/a.json", ann=ANN)
    write(tmp_path / "train/b.json", bob=BOB)
    write(tmp_path / "test/all.json", bob=BOB, ann=BOB)
    found = data.load(f"leaf:{tmp_path}")
    assert found.name == f"leaf:{tmp_path}"
    np.testing.assert_array_equal(found.x_train, np.array(ANN["x"] + BOB["x"], np.float32))
    assert found.y_train.tolist() == [0, 1, 2, 2]
    assert (found.classes, found.shape, found.ids) == (3, (2,), None)
    assert found.client_names == ["ann", "bob"]
    assert [part.tolist() for part in found.parts] == [[0, 1, 2], [3]]
    assert [part.tolist() for part in found.test_parts] == [[1], [0]], "in the order of the training clients"
    assert partition.given_clients("natural", f"leaf:{tmp_path}") == 2


def test_test_users_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "train/a.json", ann=ANN)
    write(tmp_path / "test/a.json", eve=BOB)
    found = data.load(f"leaf:{tmp_path}")
    assert (found.client_names, found.test_parts) == (["ann"], None)
    assert found.y_test.tolist() == [2]


def test_one_file_is_split(tmp_path: Path) -> None:
    many = {"x": [[float(i), 1.0] for i in range(11)], "y": [i % 3 for i in range(11)]}
    found = data.load(f"leaf:{write(tmp_path / 'all.json', ann=many, eve=ANN)}")
    assert found.x_train[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]
    assert found.x_test[:, 0].tolist() == [9, 10, 0.5]
    assert [part.tolist() for part in found.test_parts] == [[0, 1], [2]]


def test_it_is_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"leaf:{write(tmp_path / 'all.json', ann=ANN, eve=ANN)}"
    real, reads = leaf._file, []
    monkeypatch.setattr(leaf, "_file", lambda path: reads.append(path) or real(path))
    assert data.natural_clients(source) == 2
    assert len(data.load(source).parts) == 2
    assert len(reads) == 1
    write(tmp_path / "all.json", ann=ANN)
    assert data.natural_clients(source) == 1


def test_text_becomes_ids_and_the_next_character_counts_at_the_last_position(tmp_path: Path) -> None:
    write(tmp_path / "train/a.json", ann=TEXT, bob={"x": ["zßü "], "y": ["😀"]})
    write(tmp_path / "test/a.json", ann=TEXT, bob=TEXT)
    found = data.load(f"leaf:{tmp_path}")
    letters = sorted(set("to be zßü😀"))
    assert found.classes == len(letters)
    assert found.ids is True
    assert ["".join(letters[i] for i in row) for row in found.x_train] == [*TEXT["x"], "zßü "]
    assert (found.y_train[:, :-1] == -1).all()
    assert [letters[i] for i in found.y_train[:, -1]] == [*TEXT["y"], "😀"]
    LanguageModel().check(found, (1, 4, len(letters)))


def test_text_with_a_target_for_each_position(tmp_path: Path) -> None:
    both = {"x": ["abc", "bca"], "y": ["bca", "cab"]}
    found = data.load(f"leaf:{write(tmp_path / 'a.json', ann=both)}")
    assert (found.x_train.tolist(), found.y_train.tolist()) == ([[0, 1, 2]], [[1, 2, 0]])


def test_text_with_labels(tmp_path: Path) -> None:
    found = data.load(f"leaf:{write(tmp_path / 'a.json', ann={'x': ['ab', 'ba'], 'y': [0, 1]})}")
    assert (found.x_train.tolist(), found.y_train.tolist(), found.classes) == ([[0, 1]], [0], 2)


def test_whole_numbers_among_others_are_numbers(tmp_path: Path) -> None:
    found = data.load(
        f"leaf:{write(tmp_path / 'a.json', ann={'x': [[1], [0]], 'y': [0, 1]}, bob={'x': [[0.5]] * 2, 'y': [1, 1]})}"
    )
    assert found.x_train.tolist() == [[1.0], [0.5]]
    assert found.x_train.dtype == np.float32


# --- bad files --------------------------------------------------------------------------------------------


def changed(**changes: Any) -> Callable[[Path], object]:
    """One file, wrong in some keys (None: left out)."""
    whole = content(ann=ANN, bob=ANN) | changes
    return lambda root: (root / "a.json").write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))


def user(x: Any, y: Any, **more: Any) -> Callable[[Path], object]:
    size = len(y) if isinstance(y, list) else 3
    return changed(users=["ann", "bob"], num_samples=[3, size], user_data={"ann": ANN, "bob": {"x": x, "y": y}}, **more)


def raw(text: bytes) -> Callable[[Path], object]:
    return lambda root: (root / "a.json").write_bytes(text)


def folder(train: dict, test: dict | None) -> Callable[[Path], object]:
    def build(root: Path) -> None:
        write(root / "a.json/train/a.json", **train)
        if test is not None:
            write(root / "a.json/test/a.json", **test)

    return build


def twice(root: Path) -> None:
    folder({"ann": ANN}, {"ann": ANN})(root)
    write(root / "a.json/train/b.json", ann=ANN)


ROWS, LABELS = ANN["x"], ANN["y"]
BAD = {
    "no such file": (lambda root: None, "a.json: is missing"),
    "an empty folder": (lambda root: (root / "a.json").mkdir(), "no train/*.json or no test/*.json"),
    "no test set": (folder({"ann": ANN}, None), "no train/*.json or no test/*.json"),
    "a folder as file": (lambda root: (root / "a.json/train/a.json").mkdir(parents=True), "no test/*.json"),
    "cut off": (raw(b'{"users": ["a'), "is not a whole JSON file"),
    "nested": (raw(b'{"users":' + b"[" * 100_000), "is not a whole JSON file"),
    "not UTF-8": (raw(b'{"users": ["\xff\xfe"]}'), "is not a whole JSON file"),
    "a list": (raw(b"[]"), "has no users"),
    "no users": (changed(users=None), "has no users; a file of LEAF has users, num_samples, user_data"),
    "no sizes": (changed(num_samples=None), "has no num_samples"),
    "no data": (changed(user_data=None), "has no user_data"),
    "data as a list": (changed(user_data=[ANN, ANN]), "has no user_data"),
    "nobody": (changed(users=[], num_samples=[]), "has no users"),
    "a size less": (changed(num_samples=[3]), "has 2 users but 1 num_samples"),
    "a user twice": (changed(users=["ann", "ann"]), "user ann is there twice"),
    "a user without data": (changed(users=["ann", "eve"]), "user eve has no user_data"),
    "a user who is not listed": (changed(users=["ann"], num_samples=[3]), "user_data has 'bob', who is not among"),
    "a user's name of two lines": (changed(users=["ann", "b\nob"]), "users[1] is no name"),
    "a user's name that is none": (changed(users=["ann", 3]), "users[1] is no name"),
    "sizes that lie": (changed(num_samples=[3, 4]), "user bob: has 3 x and 3 y, but num_samples says 4"),
    "a size that is none": (changed(num_samples=[3, "3"]), "but num_samples says '3'"),
    "a target less": (user(ROWS, LABELS[:2]), "user bob: has 3 x and 2 y"),
    "no x": (changed(user_data={"ann": ANN, "bob": {"y": LABELS}}), "user bob: has no lists x and y"),
    "samples as a word": (user("abc", LABELS), "user bob: has no lists x and y"),
    "nothing": (user([], []), "user bob: has no samples"),
    "ragged samples": (user([[0.0, 1.0], [1.0], [0.0, 1.0]], LABELS), "user bob: x is not an array"),
    "samples of another length": (user([[1.0]] * 3, LABELS), "user bob: x and that of the first user must"),
    "targets of another kind": (user(ROWS, [[0, 1]] * 3), "user bob: y and that of the first user must"),
    "not finite": (user([[0.0, float("nan")]] * 3, LABELS), "user bob: x has a value that is not finite"),
    "a huge number": (user([[0.0, 10**400]] * 3, LABELS), "user bob: x"),
    "negative labels": (user(ROWS, [-1, 0, 1]), "user bob: y has labels -1 to 1"),
    "text among numbers": (user(["ab", "ba", "ab"], LABELS), "user bob has text where the first user has numbers"),
    "words as labels": (user(ROWS, ["cat", "dog", "cat"]), "user bob: y is text but x is not"),
    "file names": (user(["a.jpg", "bb.jpg", "c.jpg"], LABELS), "x of sample 1 is 6 characters; all must be text of"),
    "text and numbers": (user(["ab", [1, 2], "ab"], LABELS), "x of sample 1 is list"),
    "empty text": (user(["", "", ""], LABELS), "x of sample 0 is 0 characters"),
    "targets of another length": (user(["abc"] * 3, ["ab"] * 3), "y has 2 characters for the 3 of x"),
    "a single sample": (user(ROWS[:1], LABELS[:1]), "user bob has 1 sample; a file without a test set needs 2"),
    "a user in two files": (twice, "user ann is also in another file"),
    "some with test samples": (
        folder({"ann": ANN, "bob": ANN}, {"ann": ANN}),
        "client bob has training samples but no",
    ),
    "one class": (changed(user_data={u: {"x": ROWS, "y": [0, 0, 0]} for u in ("ann", "bob")}), "at least two classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_leaf(tmp_path: Path, case: str) -> None:
    build, says = BAD[case]
    build(tmp_path)
    with pytest.raises(UserError, match=r"a\.json") as error:
        data.load(f"leaf:{tmp_path / 'a.json'}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", ["MAX_FILE", "MAX_BYTES"])
def test_a_file_beyond_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(leaf, limit, 40)
    with pytest.raises(UserError, match=r"a\.json: .* allowed"):
        data.load(f"leaf:{write(tmp_path / 'a.json', ann=ANN, eve=ANN)}")
