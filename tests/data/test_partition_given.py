"""Clients that are given: by the data, a file, a user's function, or a list."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedman import data
from fedman.data import partition
from fedman.errors import UserError

Y = np.arange(12) % 3
X = np.ones((12, 2))
WANTED = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]  # sample 11 is nobody's
OWNERS = [2, 0, 1, 1, 2, 0, 0, 0, 1, 2, 2, 2]

MODULE = """
import numpy as np
table = {}
def halves(labels, clients, seed):
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)
def owners(labels, clients, seed):
    return labels % clients
def broken(labels, clients, seed):
    return table["no such key"]
def writes(labels, clients, seed):
    labels[0] = 7
    return [labels]
def empty(labels, clients, seed):
    return [[0], []]
def nothing(labels, clients, seed):
    pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's module."""
    (tmp_path / "given_parts.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("given_parts", None)


def own(**more: object) -> data.Dataset:
    return data.from_arrays(X, Y, X, Y, **more)


def lists(parts: list[np.ndarray]) -> list[list[int]]:
    assert all(part.dtype == np.int64 for part in parts)
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("clients", [None, 3])
def test_the_same_clients_from_everywhere(place: Path, clients: int | None) -> None:
    turned = [part[::-1] for part in WANTED]
    (place / "lists.json").write_text(json.dumps(turned))
    by_hand = lambda labels, clients, seed: turned  # noqa: E731
    for given in (WANTED, turned, tuple(map(np.array, turned)), "file:lists.json", f"file:{place}/lists.json"):
        assert lists(partition.clients_of(own(), given, clients)) == WANTED
        assert partition.given_clients(given, own()) == 3
    assert lists(partition.clients_of(own(parts=turned), "natural", clients)) == WANTED
    assert lists(partition.clients_of(own(), by_hand, 3)) == WANTED


def test_a_client_number_for_each_sample(place: Path) -> None:
    np.save(place / "owners.npy", np.array(OWNERS, np.uint8))
    np.savez(place / "owners.npz", clients=OWNERS, other=[1])
    (place / "owners.json").write_text(json.dumps(OWNERS))
    for given in (OWNERS, np.array(OWNERS), "file:owners.npy", "file:owners.npz", "file:owners.json"):
        assert lists(partition.clients_of(own(), given, 3)) == [[1, 5, 6, 7], [2, 3, 8], [0, 4, 9, 10, 11]]
        assert partition.given_clients(given, own()) == 3


def test_torch_tensors_are_lists_too() -> None:
    torch = pytest.importorskip("torch")
    assert lists(partition.clients_of(own(), [torch.tensor(part) for part in WANTED])) == WANTED
    assert len(partition.clients_of(own(), torch.tensor(OWNERS))) == 3


def test_a_function_of_the_user(place: Path) -> None:
    parts = partition.clients_of(own(), "given_parts:halves", 4, seed=5)
    expected = np.array_split(np.random.default_rng(5).permutation(12), 4)
    assert lists(parts) == [sorted(part.tolist()) for part in expected]
    assert lists(partition.clients_of(own(), "given_parts:owners", 3)) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert partition.given_clients("given_parts:halves", own()) is None
    assert partition.given_clients("dir0.3", own()) is None


def test_number_of_natural_clients() -> None:
    assert partition.given_clients("natural", "shakespeare") == 99
    assert partition.given_clients("natural", own(parts=WANTED)) == 3
    assert partition.given_clients("natural", own()) is None


def test_a_partition_has_a_fingerprint() -> None:
    """It names the clients' samples in the clients' order, whatever the order of the samples and the dtype."""
    known = data.fingerprint([np.array([0, 2]), np.array([1])])
    assert known == data.fingerprint([np.array([2, 0], np.int32), np.array([1], np.uint8)])
    assert len(known) == 12
    others = [[[0], [2, 1]], [[1], [0, 2]], [[0, 1, 2]], [[0, 2]], [[0, 2], [3]]]
    assert known not in {data.fingerprint([np.array(part) for part in parts]) for parts in others}
    assert partition.parse(f"custom-{known}").kind == "custom"


def test_targets_that_are_numbers() -> None:
    numbers = data.from_arrays(X, Y / 2, X, Y / 2)
    parts = partition.clients_of(numbers, "iid", 3)
    assert partition.heterogeneity(numbers.y_train, parts, 0) == {"clients": 3, "smallest": 4, "largest": 4}
    with pytest.raises(UserError, match="no classes to count"):
        partition.table(numbers.y_train, parts, 0)


def test_ids_are_counted_by_position() -> None:
    ids = np.array([[0, 1, 1], [2, -1, -1]])
    assert partition.table(ids, [np.array([0]), np.array([1])], 3).tolist() == [[1, 2, 0], [0, 0, 1]]


def write(name: str, content: object) -> str:
    path = Path(name)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".npz":
        np.savez(path, **content)
    else:
        np.save(path, content, allow_pickle=True)
    return f"file:{name}"


def npy_header(shape: str) -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


BAD = {
    "natural of data without clients": (lambda: "natural", "custom has no clients of its own"),
    "sizes of given clients": (lambda: WANTED, "unbalanced: 0.5 is not possible with partition", {"sigma": 0.5}),
    "sizes of a function": (lambda: "given_parts:halves", "unbalanced: 0.5", {"sigma": 0.5}),
    "another number of clients": (lambda: WANTED, "partition: has 3 parts for 5 clients", {"clients": 5}),
    "a rule without a number": (lambda: "dir0.3", "clients: partition dir0.3 needs their number", {"clients": None}),
    "a function without a number": (lambda: "given_parts:halves", "clients: partition given_parts", {"clients": None}),
    "an empty client": (lambda: [[0], [], [1]], "client 1: has no samples"),
    "overlapping clients": (lambda: [[0], [1, 2], [2]], "clients 1 and 2 both have sample 2"),
    "beyond the samples": (lambda: [[0], [1, 12], [2]], "client 1: has sample 12"),
    "an empty list": (lambda: [], "has no parts", {"clients": None}),
    "a list of mixed things": (lambda: [0, [1], [2]], "not an array of numbers"),
    "a number": (lambda: 3, "is int; wanted is a list of index arrays"),
    "no such module": (lambda: "my_part:halves", "No module named 'my_part'"),
    "no such function": (lambda: "given_parts:halvs", "given_parts has no halvs; did you mean halves"),
    "a module that fails": (lambda: "broken_module:f", "nowhere_to_be_found"),
    "not a function": (lambda: "given_parts:table", "is dict, not a function of labels, clients and seed"),
    "a function that fails": (lambda: "given_parts:broken", "given_parts:broken: the function raised KeyError"),
    "a function that writes": (lambda: "given_parts:writes", "raised ValueError: assignment destination is read-only"),
    "a function's empty client": (lambda: "given_parts:empty", "client 1: has no samples", {"clients": 2}),
    "a function that returns nothing": (lambda: "given_parts:nothing", "is NoneType; wanted is a list"),
    "a function of other arguments": (lambda: lambda labels: [labels], "raised TypeError"),
    "only its fingerprint": (lambda: "custom-0123456789ab", "was given in Python"),
    "no such file": (lambda: "file:nowhere.json", "nowhere.json"),
    "a folder": (lambda: Path("a.npy").mkdir() or "file:a.npy", "a.npy"),
    "another ending": (lambda: write("a.csv", b"0,1"), "must end in .npy, .npz, .json"),
    "a damaged JSON file": (lambda: write("a.json", b"[0, 1"), "a.json is not a whole .json file"),
    "a nested JSON file": (lambda: write("a.json", b"[" * 100_000), "a.json is not a whole .json file"),
    "not UTF-8": (lambda: write("a.json", b"[\xff\xfe\xff]"), "a.json is not a whole .json file"),
    "a JSON table": (lambda: write("a.json", {"a": [0]}), "is dict; wanted is a list"),
    "a JSON number": (lambda: write("a.json", 5), "is int; wanted is a list"),
    "JSON words": (lambda: write("a.json", ["a", "b", "c"]), "indices are whole numbers"),
    "numbers with a point": (lambda: write("a.npy", np.zeros(12)), "is float64 of shape (12,); wanted"),
    "objects": (lambda: write("a.npy", np.array([{}] * 12, object)), "a.npy is not a whole .npy file"),
    "too few numbers": (lambda: write("a.npy", np.arange(3)), "has 3 client numbers for 12 training samples"),
    "a negative number": (lambda: write("a.npy", np.arange(12) - 1), "has client number -1"),
    "a large number": (lambda: write("a.npy", np.arange(12) + 10**12), "has client number 10000"),
    "a client left out": (lambda: write("a.npy", np.arange(12) // 6 * 2), "client 1: has no samples"),
    "a cut off .npy": (lambda: write("a.npy", npy_header("(12,)")), "a.npy is not a whole .npy file"),
    "a shape beyond memory": (lambda: write("a.npy", npy_header("(10**15,)")), "a.npy is not a whole .npy file"),
    "an .npz as .npy": (lambda: write("a.npy", b"PK\x03\x04"), "a.npy is not a whole .npy file"),
    "another array's name": (lambda: write("a.npz", {"owners": OWNERS}), "wanted are clients"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_partitions(place: Path, case: str) -> None:
    make, says, *more = BAD[case]
    with pytest.raises(UserError) as error:
        partition.clients_of(own(), make(), **{"clients": 3, **(more[0] if more else {})})
    assert says in str(error.value)
    assert str(error.value).startswith(("partition", "clients", "unbalanced", "nowhere.json", "a.n"))
    assert "\n" not in str(error.value)
