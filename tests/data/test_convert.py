"""Data in the forms people have it: arrays, torch Datasets, DataLoaders, Hugging Face datasets."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils import data as torch_data

from fedman import data
from fedman.errors import UserError

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8) % 4


class Pairs(torch_data.Dataset):
    """A torch Dataset over any list of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.samples[i], Exception):
            raise self.samples[i]
        return self.samples[i]


class Stream(torch_data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


class Fails:
    def __array__(self, *arguments: object, **more: object) -> np.ndarray:
        raise KeyError


class ClassLabel:
    pass


class Picture:
    pass


Picture.__name__ = "Image"


class Value:
    pass


class Table:
    """What a Hugging Face dataset can do: typed columns, rows by number, columns by name."""

    types: ClassVar = {"label": ClassLabel, "fine": ClassLabel, "coarse": ClassLabel, "image": Picture, "mask": Picture}

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: self.types.get(name, Value)() for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: rows[key] for name, rows in self.columns.items()}

    def select_columns(self, names: list[str]) -> Table:
        return Table(**{name: self.columns[name] for name in names})


def tensors(x: np.ndarray = X, y: np.ndarray = Y) -> torch_data.TensorDataset:
    return torch_data.TensorDataset(torch.tensor(x), torch.tensor(y))


def pairs(x: Any = X, y: Any = Y) -> Pairs:
    return Pairs(list(zip(x, y, strict=True)))


def table() -> Table:
    return Table(vector=X.tolist(), label=Y.tolist())


FORMS = {
    "arrays": (X, Y, X, Y),
    "a list of arrays": [X, Y, X, Y],
    "lists": (X.tolist(), Y.tolist(), X.tolist(), Y.tolist()),
    "tensors": (torch.tensor(X), torch.tensor(Y), torch.tensor(X), torch.tensor(Y)),
    "pairs of arrays": ((X, Y), (X, Y)),
    "tensor datasets": (tensors(), tensors()),
    "datasets of pairs": (pairs(), pairs()),
    "tensors and numbers": (Pairs([(torch.tensor(x), int(y)) for x, y in zip(X, Y, strict=True)]), tensors()),
    "a subset": (torch_data.Subset(tensors(), list(range(8))), pairs()),
    "shuffling loaders": (torch_data.DataLoader(tensors(), 3, shuffle=True), torch_data.DataLoader(pairs())),
    "train and test by name": {"train": pairs(), "test": (X, Y)},
    "a validation set": {"train": pairs(), "validation": tensors(), "unsupervised": 3},
    "tables": {"train": table(), "test": table()},
    "a pair of tables": (table(), table()),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_data_in_every_form(form: str) -> None:
    found = data.as_dataset(FORMS[form])
    for x, y in ((found.x_train, found.y_train), (found.x_test, found.y_test)):
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
    assert (found.x_train.dtype, found.y_train.dtype, found.classes) == (np.float32, np.int64, 4)
    assert found.name == "custom"


def test_a_dataset_stays_what_it_is() -> None:
    own = data.from_arrays(X, Y, X, Y, "mine")
    assert data.as_dataset(own) is own


@pytest.mark.parametrize(
    ("mode", "shape"), [("L", (1, 5, 6)), ("RGB", (3, 5, 6)), ("P", (3, 5, 6)), ("1", (1, 5, 6)), ("RGBA", (4, 5, 6))]
)
def test_pictures(mode: str, shape: tuple[int, ...]) -> None:
    """Of torchvision's and Hugging Face's datasets."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 6), dtype=np.uint8)).convert(mode)
    table = Table(image=[picture, picture], label=[0, 1])
    for found in (data.as_dataset((table, table)), data.as_dataset((Pairs([(picture, 0), (picture, 1)]), table))):
        assert found.shape == shape
        assert found.x_train.dtype == np.uint8


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_pictures_of_more_than_8_bits_are_refused(mode: str) -> None:
    """Pillow makes white of all values above 255."""
    kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
    picture = Image.fromarray(np.full((5, 6), 3000, kind))
    assert picture.mode == mode
    with pytest.raises(UserError, match=f"sample 0 is a picture of mode {mode}, with more than 8 bits"):
        data.as_dataset((Pairs([(picture, 0)]), pairs()))


class Negated(torch_data.TensorDataset):
    """As those that transform their samples."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return -x, y


def test_a_dataset_that_transforms_its_tensors() -> None:
    changed = Negated(torch.tensor(X), torch.tensor(Y))
    np.testing.assert_array_equal(data.as_dataset((changed, tensors())).x_train, -X)


def test_ids_stay_whole() -> None:
    rows = Table(input_ids=[[1, 2], [3, 4]], labels=[[2, 3], [4, -1]], attention_mask=[[1, 1], [1, 0]])
    found = data.from_huggingface({"train": rows, "test": rows})
    assert (found.x_train.dtype, found.y_train.tolist(), found.classes) == (np.int64, [[2, 3], [4, -1]], 5)


def test_columns_by_name() -> None:
    rows = Table(a=X.tolist(), b=(X + 1).tolist(), fine=Y.tolist(), coarse=(Y // 2).tolist())
    found = data.from_huggingface((rows, rows), inputs="b", target="coarse", name="mine")
    np.testing.assert_array_equal(found.x_train, X + 1)
    np.testing.assert_array_equal(found.y_train, Y // 2)
    assert found.name == "mine"


def writers(*names: Any) -> Table:
    return Table(x=X[: len(names)].tolist(), label=Y[: len(names)].tolist(), writer=list(names))


def test_a_column_of_clients() -> None:
    train = writers("bob", "ann", "bob", "bob")
    found = data.from_huggingface((train, writers("ann", "ann", "bob")), client="writer")
    assert found.client_names == ["bob", "ann"]
    assert [part.tolist() for part in found.parts] == [[0, 2, 3], [1]]
    assert [part.tolist() for part in found.test_parts] == [[2], [0, 1]]
    others = data.from_huggingface((train, writers("eve", "eve")), client="writer")
    assert (others.test_parts, others.client_names) == (None, ["bob", "ann"])
    assert data.from_huggingface((train, table()), client="writer").test_parts is None
    numbers = writers(np.int64(7), np.int64(3))
    assert data.from_huggingface((numbers, numbers), client="writer").client_names == ["7", "3"]


BAD = {
    "nothing": (None, "custom: is NoneType; wanted is a Dataset; arrays (x_train"),
    "a word": ("digits", "is str; wanted is"),
    "one dataset": (pairs(), "is Pairs; wanted is"),
    "three arrays": ((X, Y, X), "is tuple of 3; wanted is"),
    "no training set": ({"test": pairs()}, "has test; wanted are train and test"),
    "nothing by name": ({}, "has nothing; wanted are train and test"),
    "an array alone": ((X, X), "training set is ndarray; wanted is a pair (x, y), a torch Dataset"),
    "a number": ((3, 4), "training set is int; wanted is"),
    "a stream": ((Stream(), pairs()), "training set: Stream has no length"),
    "a loader of a stream": ((pairs(), torch_data.DataLoader(Stream())), "test set: Stream has no length"),
    "no samples": ((Pairs([]), pairs()), "training set has no samples"),
    "samples without targets": ((Pairs(list(X)), pairs()), "sample 0 is ndarray; wanted is a pair (x, y)"),
    "samples of three": ((Pairs([(1, 2, 3)]), pairs()), "sample 0 is tuple of 3; wanted is a pair"),
    "samples by name": ((Pairs([{"x": 1, "y": 2}]), pairs()), "sample 0 is dict; wanted is a pair"),
    "a sample that fails": ((Pairs([(X[0], 1), KeyError("no")]), pairs()), "sample 1 cannot be read (KeyError: 'no')"),
    "an error of several lines": ((Pairs([OSError("a\nb")]), pairs()), "sample 0 cannot be read (OSError: a b)"),
    "text": ((Pairs([("hello", 1)]), pairs()), "sample 0 holds str; wanted are numbers (text must be"),
    "no target": ((Pairs([(X[0], None)]), pairs()), "sample 0 holds NoneType; wanted are numbers"),
    "another shape": ((Pairs([(X[0], 1), (X[0, :2], 1)]), pairs()), "the input of sample 1 is float32 (2,), that of"),
    "another kind of target": ((Pairs([(X[0], 1), (X[0], 0.5)]), pairs()), "the target of sample 1 is float64 ()"),
    "arrays that fail": ((Fails(), Y, X, Y), "x_train is not an array of numbers: KeyError"),
    "a tensor elsewhere": ((torch.ones(8, 3, device="meta"), Y, X, Y), "x_train is not an array of numbers"),
    "two shapes": ((pairs(), pairs(X[:, :2])), "must hold samples of one kind"),
    "not finite": ((pairs(np.full_like(X, np.inf)), pairs()), "x_train has a value that is not finite"),
    "two columns of labels": ((Table(x=[[1]], fine=[0], coarse=[0]), table()), "say which by target= of from_hugg"),
    "two pictures": ((Table(image=[0], mask=[0], label=[0]), table()), "image, mask, label; say which by inputs="),
    "no label": ((Table(a=[0], b=[1]), table()), "has columns a, b; say which by inputs= and target="),
    "a text column": ((Table(text=["a", "b"], label=[0, 1]), table()), "sample 0 holds str"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read(case: str) -> None:
    value, says = BAD[case]
    with pytest.raises(UserError, match=r"^custom: ") as error:
        data.as_dataset(value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


BAD_COLUMNS = {
    "another library's": ((pairs(), pairs()), {}, "Pairs is not a Hugging Face dataset"),
    "no such inputs": ((table(), table()), {"inputs": "vectr"}, "no column 'vectr' for inputs; did you mean vector"),
    "no such target": ((table(), table()), {"target": "y"}, "no column 'y' for target"),
    "no such client": ((writers("a"), writers("a")), {"client": "writr"}, "no column 'writr' for client; did you"),
    "a client that is none": ((writers("a", None), writers("a")), {"client": "writer"}, "writer of sample 1 is NoneT"),
    "a client without test samples": (
        (writers("a", "b"), writers("a")),
        {"client": "writer"},
        "client b has training samples but no test samples",
    ),
    "a client without training samples": (
        (writers("a", "b"), writers("a", "b", "c")),
        {"client": "writer"},
        "client c has test samples but no training samples",
    ),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_bad_columns(case: str) -> None:
    value, arguments, says = BAD_COLUMNS[case]
    with pytest.raises(UserError, match=r"^custom: ") as error:
        data.from_huggingface(value, **arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
