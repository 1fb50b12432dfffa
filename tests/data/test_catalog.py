"""What is known about data sets before anything is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedman import data
from fedman.data import catalog
from fedman.errors import UserError


def test_names_need_neither_numpy_nor_anything_heavy() -> None:
    code = (
        "import sys, fedman.data; names = list(fedman.data.SPECS); "
        "assert not {'numpy', 'torch', 'PIL', 'matplotlib', 'pydantic'} & set(sys.modules), sys.modules; "
        "fedman.data.load('digits'); from fedman.data import partition, download, cifar, tiny_imagenet, idx; "
        "assert not {'torch', 'PIL', 'matplotlib', 'pydantic', 'typer'} & set(sys.modules); print(*names)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["digits", "cifar10", "cifar100", "tiny-imagenet", "mnist", "fashion-mnist", "shakespeare"]


def test_what_is_public_is_listed_and_there() -> None:
    assert set(data.__all__) <= set(dir(data))
    assert all(getattr(data, name) is not None for name in data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'from_nowhere'"):
        data.from_nowhere  # noqa: B018


def test_users_own_files_have_a_scheme() -> None:
    for name in ("npz:a", "npz:~/a.npz", "a/b.npz", "leaf:a", "images:a b", "images:C:/x"):
        assert data.is_path(name)
    for name in ("digits", "images", "leaf", "npz", "csv:a", "", ":a"):
        assert not data.is_path(name)
    with pytest.raises(UserError, match="npz:PATH, leaf:PATH, images:DIR"):
        data.load("csv:a")


def test_facts_of_the_paper() -> None:
    spec = catalog.SPECS["cifar100"]
    assert (spec.classes, spec.shape, spec.train, spec.test) == (100, (3, 32, 32), 50_000, 10_000)
    assert spec.mean == (0.5071, 0.4867, 0.4408)
    assert spec.std == (0.2675, 0.2565, 0.2761)
    assert {name: s.target for name, s in catalog.SPECS.items() if s.target} == {
        "cifar100": 50.0,
        "tiny-imagenet": 28.0,
    }
    assert {name for name, s in catalog.SPECS.items() if s.augment} == {
        "cifar10",
        "cifar100",
        "tiny-imagenet",
    }


def test_unknown_name_suggests_the_nearest_or_names_all() -> None:
    with pytest.raises(UserError, match=r"^dataset: 'cifar-100' is not known; did you mean cifar100\?$"):
        data.load("cifar-100")
    with pytest.raises(UserError, match=r"^dataset: 'svhn' is not known; allowed are .*tiny-imagenet.*npz:"):
        data.load("svhn")


def test_default_dir(monkeypatch: pytest.MonkeyPatch, own_data_dir: Path) -> None:
    assert data.default_dir() == own_data_dir
    monkeypatch.delenv("FEDMAN_DATA")
    assert data.default_dir() == Path("~/.cache/fedman").expanduser()
