"""What is known about each data set before anything is read. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fedman.errors import UserError, did_you_mean

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total); total is 0 where it is not known."""

PADDING = -1
"""The target of a position that does not count."""

IidOrder = Literal["shuffled", "stored", "balanced"]
"""The order of samples of which iid clients are consecutive blocks: random; as stored; or the first sample of every
class, then the second of every class, and so on."""


@dataclass(frozen=True)
class Spec:
    """One data set: its facts, the model, task, clients and target that go with it, and its official files.

    `shape` is that of one sample as a model sees it. `mean` and `std` are per channel, of pixels scaled to [0, 1]; ids
    have none. `classes` of a text are its different characters. `iid` differs between data sets as in the paper's
    code. `first_labels` tell apart data sets whose files have the same names and sizes. `files` maps what
    `fedman data get` fetches to MD5 sums, `also` other official archives that are read as well; `url` is the address of
    the folder they lie in and `folder` the place below data_dir where they are put.
    """

    name: str
    title: str
    reader: str
    classes: int
    shape: tuple[int, ...]
    train: int
    test: int
    model: str
    task: str = "classification"
    partition: str = "dir0.3"
    clients: int = 100
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: bool = False
    iid: IidOrder = "shuffled"
    target: float | None = None
    first_labels: tuple[int, ...] = ()
    url: str = ""
    folder: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """What is in it, in a few words."""
        if len(self.shape) == 1:
            return f"windows of {self.shape[0]} characters, {self.classes} different ones, {self.clients} clients"
        return f"{self.classes} classes of {'x'.join(map(str, self.shape))}"


_DIGITS = Spec(
    name="digits",
    title="UCI optical digits, 8x8, part of the package",
    reader="digits",
    classes=10,
    shape=(1, 8, 8),
    train=1437,
    test=360,
    mean=(0.3054,),
    std=(0.3753,),
    model="mlp",
)
_CIFAR10 = Spec(
    name="cifar10",
    title="CIFAR-10",
    reader="cifar",
    classes=10,
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    mean=(0.491, 0.482, 0.447),
    std=(0.247, 0.243, 0.262),
    model="cifar_cnn",
    augment=True,
    iid="stored",
    url="https://www.cs.toronto.edu/~kriz/",
    files={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    also={"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
)
_CIFAR100 = replace(
    _CIFAR10,
    name="cifar100",
    title="CIFAR-100, fine labels",
    classes=100,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
    iid="balanced",
    target=50.0,
    files={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
    also={"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
)
_TINY_IMAGENET = Spec(
    name="tiny-imagenet",
    title="Tiny-ImageNet-200; its labelled validation images are the test set",
    reader="tiny_imagenet",
    classes=200,
    shape=(3, 64, 64),
    train=100_000,
    test=10_000,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    model="tiny_cnn",
    augment=True,
    target=28.0,
    url="http://cs231n.stanford.edu/",
    files={"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
)
_MNIST = Spec(
    name="mnist",
    title="MNIST",
    reader="idx",
    classes=10,
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    mean=(0.1307,),
    std=(0.3081,),
    model="small_cnn",
    first_labels=(5, 0, 4, 1, 9),
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    folder="MNIST/raw",
    files={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)
_FASHION_MNIST = replace(
    _MNIST,
    name="fashion-mnist",
    title="Fashion-MNIST",
    mean=(0.2860,),
    std=(0.3530,),
    first_labels=(9, 0, 0, 3, 0),
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    folder="FashionMNIST/raw",
    files={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)

_SHAKESPEARE = Spec(
    name="shakespeare",
    title="next character in Shakespeare's plays, by speaker, part of the package",
    reader="shakespeare",
    classes=65,
    shape=(80,),
    train=9_123,
    test=2_344,
    model="lstm",
    task="language-model",
    partition="natural",
    clients=99,
)

SPECS: dict[str, Spec] = {
    spec.name: spec for spec in (_DIGITS, _CIFAR10, _CIFAR100, _TINY_IMAGENET, _MNIST, _FASHION_MNIST, _SHAKESPEARE)
}


@dataclass(frozen=True)
class Scheme:
    """A form of users' own files, `SCHEME:PATH`. `natural`: the files say which samples belong to which client."""

    form: str
    title: str
    reader: str
    natural: bool = False


SCHEMES: dict[str, Scheme] = {
    "npz": Scheme("npz:PATH", "your own arrays: x_train, y_train, x_test, y_test, or x and y", "npz"),
    "leaf": Scheme("leaf:PATH", "LEAF's JSON: a folder with train/ and test/, or one file", "leaf", natural=True),
    "images": Scheme("images:DIR", "pictures: DIR/train/CLASS/*.png and DIR/test/CLASS/*.png", "image_folder"),
}


def own_files(name: str) -> tuple[str, Path] | None:
    """Scheme and path if `name` means a user's own files, as `npz:PATH` (or just a path that ends in .npz).

    >>> own_files("leaf:/data/femnist")
    ('leaf', PosixPath('/data/femnist'))
    """
    scheme, colon, path = name.partition(":")
    if colon and scheme in SCHEMES:
        return scheme, Path(path).expanduser()
    return ("npz", Path(name).expanduser()) if name.endswith(".npz") else None


def is_path(name: str) -> bool:
    """Whether `name` means a user's own files."""
    return own_files(name) is not None


def lookup(name: str) -> Spec:
    """The facts of a named data set; a name that is not known is an error that suggests the nearest."""
    if name in SPECS:
        return SPECS[name]
    allowed = ", ".join([*SPECS, *(scheme.form for scheme in SCHEMES.values())])
    raise UserError(f"dataset: {name!r} is not known{did_you_mean(name, SPECS) or f'; allowed are {allowed}'}")


def default_dir() -> Path:
    """Where data sets are looked for and put when no data_dir is given: $FEDMAN_DATA or ~/.cache/fedman."""
    return Path(os.environ.get("FEDMAN_DATA") or "~/.cache/fedman").expanduser()
