"""Files and clients: damaged and hostile data is refused by name, within bounded memory, and never runs.

The tables of bad files are those of tests/data; here all of them are tried at once and counted.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import fedman
from faults.tally import Tally
from fedman.errors import UserError
from tests.data import test_cifar as cifar
from tests.data import test_idx as idx
from tests.data import test_npz as npz
from tests.data import test_tiny_imagenet as tiny_imagenet
from tests.data.data_bad_files import Bomb, Case, Sandbox, put, shrink

FLIPS = 200  # bits, in the test that this calls


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Data files, then clients that are odd but allowed, then arrays that are not."""
    every = 12 if small else 1
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        patch.setenv("FEDMAN_DATA", str(scratch / "default"))
        (scratch / "default").mkdir()
        for what, dataset, case in list(cases())[::every]:
            tally.check(what, problem_of(scratch, patch, dataset, case))
        for kind in () if small else ("binary", "python"):
            cifar.test_flipped_bits_never_escape(Path(tempfile.mkdtemp(dir=scratch)), kind)
            tally.count("CIFAR archives with a flipped bit: read right or refused", FLIPS, FLIPS)
    clients(tally)


def cases() -> Iterator[tuple[str, str, Case]]:
    """(what, data set, case): all tables."""
    yield from (("CIFAR archives and records", "cifar100", case) for case in cifar.FILES.values())
    for says, content in cifar.PICKLES.values():
        yield "CIFAR pickles", "cifar100", python_batch(says, content)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for value in (Bomb(), {"data": [Bomb()]}):
            yield "live pickle bombs: the canary never runs", "cifar100", python_batch("refused", value, protocol)
    yield from (("Tiny-ImageNet zips and folders", "tiny-imagenet", case) for case in tiny_imagenet.TINY.values())
    yield from (("IDX files", "mnist", case) for case in idx.IDX.values())
    for says, build in npz.CASES.values():
        yield "npz files", f"npz:{{root}}/{npz.FILE}", Case(npz.FILE, says, build)


def python_batch(says: str, content: object, protocol: int | None = None) -> Case:
    """CIFAR's python distribution with other bytes, or another object, in its training file."""

    def build(root: Path) -> None:
        raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol)
        cifar.folder(put("train", raw), kind="python")(root)

    return Case("cifar-100-python/train", says, build)


def problem_of(scratch: Path, patch: pytest.MonkeyPatch, dataset: str, case: Case) -> str | None:
    """None if the file is refused in one line that names it, in little memory, with nothing written or run."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    patch.setenv("CANARY", str(folder / "canary"))
    try:
        place = Sandbox(folder, scratch / "default")
        place.refuses(dataset.format(root=place.root), case)
    except (Exception, pytest.fail.Exception) as error:
        return f"{case.file}, {case.says}: {type(error).__name__}: {error}"
    return "the canary was run" if (folder / "canary").exists() else None


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def arrays(n: int = 60) -> Arrays:
    """Rows that can be learnt, in three classes."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    x = rng.normal(size=(n, 6)).astype(np.float32) + y[:, None]
    return x, y, x[:30], y[:30]


def clients(tally: Tally) -> None:
    """Clients with constant, one-class or single samples train to finite models; non-finite arrays are refused."""
    constant = (np.ones((60, 6), np.float32), *arrays()[1:])
    black = (np.zeros((60, 8, 8, 1), np.uint8), arrays()[1], np.zeros((30, 8, 8, 1), np.uint8), arrays()[3])
    one_class = (arrays()[0], np.where(np.arange(60) < 59, 0, 1), *arrays()[2:])
    huge = (arrays()[0] * np.float32(1e15), *arrays()[1:])
    fine: dict[str, tuple[Arrays, dict[str, object]]] = {
        "constant features": (constant, {}),
        "black images": (black, {}),
        "one class but for one sample": (one_class, {"partition": "iid"}),
        "a class for each client": (arrays(), {"partition": "path1", "clients": 3}),
        "a client for each sample": (arrays(), {"partition": "iid", "clients": 60}),
        "clients of very different sizes": (arrays(), {"partition": "iid", "unbalanced": 5.0, "clients": 20}),
        "features of 1e15": (huge, {"lr": 1e-30}),
        "a batch larger than the data": (arrays(), {"batch_size": 10_000}),
        "one client": (arrays(), {"clients": 1, "participation": 1.0}),
    }
    for name, (data, keys) in fine.items():
        for algorithm in ("fedavg", "feddc", "fedspeed"):
            tally.check("odd clients: finite results", trained(name, data, algorithm, keys))
    for name, change in SPOILT.items():
        tally.check("arrays that are not samples and labels: one line", array_refused(name, change(list(arrays()))))
    for keys in ({"clients": 61}, {"clients": 100, "unbalanced": 1.0}, {"partition": "path4"}):
        tally.check("clients that would be empty: one line", array_refused(str(keys), list(arrays()), **keys))


def trained(name: str, data: Arrays, algorithm: str, keys: dict[str, object]) -> str | None:
    keys = {"clients": 4, "participation": 0.6, "rounds": 3, "batch_size": 10, "zeta": 0.1, **keys}
    try:
        result = fedman.run(dataset=data, algorithm=algorithm, device="cpu", **keys)
    except Exception as error:
        return f"{name}, {algorithm}: {type(error).__name__}: {error}"
    sound = all(bool(v.isfinite().all()) for model in result.models.values() for v in model.values())
    lost = [k for record in result.rounds for k in record["quarantined"]]
    return None if sound and not lost else f"{name}, {algorithm}: not finite; quarantined {lost}"


def _set(place: int, value: object, where: object = ...) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """Write `value` into one of the four arrays."""

    def change(data: list[np.ndarray]) -> list[np.ndarray]:
        data[place] = data[place].astype(np.float64 if isinstance(value, float) else np.int64)
        data[place][where] = value
        return data

    return change


SPOILT: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "a NaN among the samples": _set(0, float("nan"), (7, 2)),
    "an infinity among the samples": _set(0, float("inf"), (7, 2)),
    "NaN everywhere": _set(0, float("nan")),
    "a NaN in the test set": _set(2, float("nan"), (3, 3)),
    "a number beyond float32": _set(0, 1e300, (0, 0)),
    "a negative label": _set(1, -1, 5),
    "a label of a million": _set(1, 10**6, 5),
    "a label of a million in the test set": _set(3, 10**6, 5),
    "labels with a point": _set(1, 0.5, 5),
    "one class": lambda data: [data[0], data[1] * 0, data[2], data[3] * 0],
    "no samples": lambda data: [data[0][:0], data[1][:0], *data[2:]],
    "no test samples": lambda data: [*data[:2], data[2][:0], data[3][:0]],
    "labels missing": lambda data: [data[0], data[1][:-1], *data[2:]],
    "text": lambda data: [data[0].astype(str), *data[1:]],
    "objects": lambda data: [np.array([{}] * len(data[0]), dtype=object), *data[1:]],
    "one axis": lambda data: [data[0][:, 0], *data[1:]],
    "other features in the test set": lambda data: [*data[:2], data[2][:, :3], data[3]],
}


def array_refused(name: str, data: list[np.ndarray], **keys: object) -> str | None:
    try:
        fedman.run(dataset=tuple(data), device="cpu", **{"clients": 4, "rounds": 1, "partition": "iid", **keys})
    except UserError as error:
        return None if "\n" not in str(error) and len(str(error)) < 400 else f"{name}: {error}"
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return f"{name}: was accepted"
