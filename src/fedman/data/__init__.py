"""Data sets as arrays, their partition over clients, their download.

    from fedman import data
    digits = data.load("digits")
    mine = data.from_arrays(x_train, y_train, x_test, y_test)

Importing this package costs nothing (`fedman --help` lists the data sets); numpy comes with the first load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedman.data.catalog import SCHEMES, SPECS, Progress, Scheme, Spec, default_dir, is_path, lookup
from fedman.data.rules import natural_clients

if TYPE_CHECKING:
    from fedman.data.client_indices import fingerprint
    from fedman.data.clients import from_clients
    from fedman.data.convert import as_dataset, from_huggingface
    from fedman.data.dataset import Dataset, from_arrays, load

_LAZY = {
    "Dataset": "dataset",
    "as_dataset": "convert",
    "fingerprint": "client_indices",
    "from_arrays": "dataset",
    "from_clients": "clients",
    "from_huggingface": "convert",
    "load": "dataset",
}

__all__ = [
    "SCHEMES",
    "SPECS",
    "Dataset",
    "Progress",
    "Scheme",
    "Spec",
    "as_dataset",
    "default_dir",
    "fingerprint",
    "from_arrays",
    "from_clients",
    "from_huggingface",
    "is_path",
    "load",
    "lookup",
    "natural_clients",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"fedman.data.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
