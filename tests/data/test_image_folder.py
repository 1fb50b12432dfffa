"""A folder of pictures: classes, sizes, damaged files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedman import data
from fedman.data import image_folder
from fedman.errors import UserError

RNG = np.random.default_rng(0)


def save(path: Path, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> np.ndarray:
    """A picture of noise, which is returned as bytes [H, W, C]."""
    channels = {"L": (), "RGB": (3,), "RGBA": (4,), "P": ()}[mode]
    pixels = RNG.integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels, mode if mode != "P" else "L").convert(mode).save(path)
    return pixels


def folder(root: Path, test: str = "test", **kind: object) -> dict[str, np.ndarray]:
    names = ("train/cat/b.png", "train/cat/a.bmp", "train/dog/a.PNG", f"{test}/dog/a.png", f"{test}/cat/z.webp")
    (root / "train/cat").mkdir(parents=True)
    (root / "train/cat/Thumbs.db").touch()
    (root / "train/notes.txt").touch()
    (root / "train/cat/._b.png").touch()
    return {name: save(root / name, **kind) for name in names}


@pytest.mark.parametrize("test", ["test", "val"])
def test_pictures(tmp_path: Path, test: str) -> None:
    pixels = folder(tmp_path, test)
    found = data.load(f"images:{tmp_path}")
    assert (found.shape, found.classes, found.name) == ((3, 5, 6), 2, f"images:{tmp_path}")
    assert (found.y_train.tolist(), found.y_test.tolist()) == ([0, 0, 1], [0, 1])
    np.testing.assert_array_equal(found.x_train[0], pixels["train/cat/a.bmp"])
    np.testing.assert_array_equal(found.x_train[2], pixels["train/dog/a.PNG"])
    np.testing.assert_array_equal(found.x_test[1], pixels[f"{test}/dog/a.png"])
    np.testing.assert_allclose(found.mean, (found.x_train / 255).mean((0, 1, 2)))
    assert data.natural_clients(f"images:{tmp_path}") is None


def test_grey_stays_grey_unless_one_has_colour(tmp_path: Path) -> None:
    pixels = folder(tmp_path, mode="L")
    found = data.load(f"images:{tmp_path}")
    np.testing.assert_array_equal(found.x_train[1, :, :, 0].astype(int) - pixels["train/cat/b.png"], 0)
    save(tmp_path / "train/cat/c.png", mode="RGBA")
    mixed = data.load(f"images:{tmp_path}")
    assert mixed.shape == (3, 5, 6)
    np.testing.assert_array_equal(mixed.x_train[1, :, :, 2], found.x_train[1, :, :, 0])


def test_classes_that_are_numbers_have_the_order_of_numbers(tmp_path: Path) -> None:
    for half in ("train", "test"):
        for number in range(11):
            save(tmp_path / half / str(number) / "a.png", (1, 1), "L")
    save(tmp_path / "train/10/b.png", (1, 1), "L")
    assert data.load(f"images:{tmp_path}").y_train.tolist() == [*range(11), 10]


def deep(root: Path) -> None:
    """A folder with a grey picture of 16 bits."""
    folder(root, mode="L")
    Image.fromarray(np.full((5, 6), 3000, np.uint16)).save(root / "train/cat/deep.png")


def damage(name: str, content: bytes | None = None) -> Callable[[Path], object]:
    """A good folder with a file that is cut off, or is something else."""

    def build(root: Path) -> None:
        folder(root)
        whole = (root / name).read_bytes() if content is None else content
        (root / name).write_bytes(whole[: len(whole) - 40] if content is None else whole)

    return build


def then(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: (folder(root), change(root))


BAD = {
    "no such folder": (lambda root: None, "has no folders train/ and test/ (or val/)"),
    "no test set": (lambda root: save(root / "train/a/a.png"), "has no folders train/ and test/"),
    "no classes": (lambda root: [(root / h).mkdir() for h in ("train", "test")], "train: has no sub-folders"),
    "an empty class": (then(lambda root: (root / "train/eel").mkdir()), "eel: holds no pictures (.png"),
    "one class": (lambda root: [save(root / h / "a/a.png") for h in ("train", "test")], "at least two classes"),
    "a class for testing only": (then(lambda root: save(root / "test/eel/a.png")), "eel: is a class that"),
    "another size": (then(lambda root: save(root / "test/dog/b.png", (7, 5))), "b.png: is 7x5, but"),
    "text": (damage("train/dog/a.PNG", b"hello"), "a.PNG: is not a whole picture"),
    "an empty file": (damage("train/dog/a.PNG", b""), "a.PNG: is not a whole picture"),
    "a cut-off PNG": (damage("test/dog/a.png"), "a.png: is not a whole picture"),
    "a cut-off BMP": (damage("train/cat/a.bmp"), "a.bmp: is not a whole picture"),
    "a cut-off WebP": (damage("test/cat/z.webp"), "z.webp: is not a whole picture"),
    "another format": (damage("train/dog/a.PNG", b"GIF89a" + bytes(60)), "a.PNG: is not a whole picture"),
    "a folder as picture": (then(lambda root: (root / "train/cat/x.png").mkdir()), "x.png: is not a regular file"),
    "16 bits": (deep, "deep.png: has more than 8 bits a value (mode I"),
    "a pipe": (then(lambda root: os.mkfifo(root / "train/cat/x.png")), "x.png: is not a regular file"),
    "a link to nowhere": (then(lambda root: (root / "train/cat/x.png").symlink_to("nowhere")), "x.png: cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(tmp_path: Path, case: str) -> None:
    build, says = BAD[case]
    build(tmp_path)
    with pytest.raises(UserError) as error:
        data.load(f"images:{tmp_path}")
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", ["MAX_PICTURE", "MAX_BYTES"])
def test_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    folder(tmp_path)
    monkeypatch.setattr(image_folder, limit, 40)
    with pytest.raises(UserError, match="at most 40 are allowed"):
        data.load(f"images:{tmp_path}")
