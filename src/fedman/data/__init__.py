"""Data sets as arrays, their partition over clients, their download.

    from fedman import data
    digits = data.load("digits")
    mine = data.from_arrays(x_train, y_train, x_test, y_test)

Importing this package costs nothing (`fedman --help` lists the data sets); numpy comes with the first load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedman.data.catalog import SPECS, Progress, Spec, default_dir, is_npz, lookup

if TYPE_CHECKING:
    from fedman.data.dataset import Dataset, from_arrays, load

__all__ = ["SPECS", "Dataset", "Progress", "Spec", "default_dir", "from_arrays", "is_npz", "load", "lookup"]


def __getattr__(name: str) -> Any:
    if name in ("Dataset", "from_arrays", "load"):
        from fedman.data import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
