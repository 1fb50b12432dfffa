"""`flatness.json` in a run's folder: reading, extending and copying it, and the types of what is read.

    {"format": 1, "run": {"method": …}, "models": {"all": {"top": {…}, "trace": {…}, …}, "sel": {…}}, "sha256": "…"}

Each measurement says how it was made and holds all numbers that its figures need. A measurement that is repeated
replaces the earlier one; the others stay.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, cast

from annotated_types import MinLen
from typing_extensions import TypedDict

from fedman.errors import UserError
from fedman.runs import manifest
from fedman.runs.atomic import write_text, writing
from fedman.runs.checksums import digest
from fedman.runs.folder import find_runs, locked
from fedman.runs.manifest import MANIFEST
from fedman.runs.records import Axes, Settings, check, parse

NAME = "flatness.json"
FORMAT = 1
Number = float | None  # None (null in JSON): not finite


class Measurement(TypedDict):
    """What is read of every measurement; the file says more of how it was made."""

    products: NotRequired[int]  # Hessian-vector products
    seconds: NotRequired[float]
    samples: NotRequired[int]


class LossMeasurement(Measurement):
    """The loss at the model, and the norm of its gradient."""

    value: Number
    gradient_norm: NotRequired[Number]


class TopMeasurement(Measurement):
    """The largest eigenvalues in descending order, or those of both ends."""

    values: Annotated[list[Number], MinLen(1)]
    converged: int  # how many of them


class TraceMeasurement(Measurement):
    """The trace with its standard error."""

    value: Number
    error: Number
    converged: bool


class DensityMeasurement(Measurement):
    """Nodes and weights of each start, from which a density of any width can be drawn."""

    nodes: list[list[Number]]
    weights: list[list[Number]]


class LayerBlock(TypedDict):
    """One layer's diagonal block; `input_norm` is the mean ‖a‖² of the layer's input a, where it is known."""

    top: Number
    trace: TraceMeasurement
    input_norm: Number


class LayersMeasurement(Measurement):
    """The diagonal block of every layer by name."""

    blocks: dict[str, LayerBlock]


class ClientsMeasurement(Measurement):
    """λ_max of every client's loss, their mean, and λ_max of the mean loss."""

    top: float
    mean: float
    clients: list[float]


class GaussNewtonMeasurement(Measurement):
    """Top eigenvalue and trace of the Gauss-Newton matrix."""

    top: Number
    converged: bool
    trace: TraceMeasurement


class Sharpness(TypedDict):
    """How much perturbations of radius ρ raise the loss; the average has a standard error."""

    value: Number
    error: NotRequired[Number]
    rho: float


class SharpnessMeasurement(Measurement):
    """Adaptive sharpness by name: average, worst_2 and worst_inf by norm, m_2 and m_inf for groups of m samples."""

    m: int
    measures: dict[str, Sharpness]


class LandscapeMeasurement(Measurement):
    """Losses at the offsets along one direction, or along two (one row for each offset along the first)."""

    offsets: list[float]
    losses: list[Number] | list[list[Number]]


class Measurements(TypedDict, total=False):
    """What has been measured of one model."""

    loss: LossMeasurement
    top: TopMeasurement
    trace: TraceMeasurement
    gauss_newton: GaussNewtonMeasurement
    sharpness: SharpnessMeasurement
    density: DensityMeasurement
    layers: LayersMeasurement
    clients: ClientsMeasurement
    landscape: LandscapeMeasurement


class MeasuredRun(Axes):
    """What identifies the run, and the configuration that determined its result."""

    method: str
    model: str
    config: NotRequired[Settings]  # not in files of earlier versions


class FlatnessRecord(TypedDict):
    """The whole file."""

    format: int
    run: MeasuredRun
    models: dict[str, Measurements]  # by name: all, sel, cloud
    sha256: NotRequired[str]  # the hash of all the above; not in files of earlier versions


def read(path: Path) -> FlatnessRecord:
    """The measurements in a file."""
    if not path.exists() and path.name not in manifest.read(path.parent):
        raise UserError(f"{path}: No such file or directory; measure the run first: fedman flatness {path.parent}")
    value = parse(manifest.content(path), str(path), "a JSON file")
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"{path}: not measurements in format {FORMAT}")
    record = check(FlatnessRecord, value, str(path))
    if "sha256" in record and record["sha256"] != digest(record):
        raise UserError(f"{path}: damaged (its checksum differs)")
    for model, measured in record["models"].items():
        _check_sizes(measured, f"{path}: models.{model}")
    return record


def find(place: Path, pattern: str = NAME) -> list[Path]:
    """The files in a folder whose names fit the pattern, and those that a run's manifest lists, there or not."""
    listed = (run.path / NAME for run in find_runs(place, MANIFEST) if NAME in manifest.read(run.path))
    return sorted({*place.rglob(pattern), *listed})


def entries(measured: Measurements) -> dict[str, Measurement]:
    """All measurements of a model by name, seen as what they have in common."""
    return cast(dict[str, Measurement], measured)


def add(folder: Path, run: MeasuredRun, model: str, name: str, measured: Mapping[str, object]) -> None:
    """Put a measurement of one of the run's models into the file in its folder. Several processes may measure it."""
    path = folder / NAME
    with locked(folder):
        record: FlatnessRecord = read(path) if path.exists() else {"format": FORMAT, "run": run, "models": {}}
        entries(record["models"].setdefault(model, {}))[name] = _rounded(measured, 10)
        record["sha256"] = digest(record)
        text = json.dumps(record, indent=1, ensure_ascii=False)
        text = re.sub(r"\[[^\[\]{}]*\]", lambda row: re.sub(r"\s+", " ", row[0]), text)  # a row of numbers is one line
        manifest.forget(folder, NAME)
        write_text(path, text + "\n")
        manifest.add(folder, NAME, (text + "\n").encode())


def read_named(folders: Sequence[Path], models: Sequence[str]) -> dict[str, Measurements]:
    """The measurements of these models of these runs, under names that tell them apart."""
    records = {folder: read(folder / NAME) for folder in folders}
    methods = Counter(record["run"]["method"] for record in records.values())
    found = {}
    for folder, record in records.items():
        method = record["run"]["method"]
        name = method if methods[method] == 1 else f"{method} {folder}"
        for model in models:
            if model in record["models"]:
                found[f"{name}, {model}" if len(models) > 1 else name] = record["models"][model]
    if not found:
        raise UserError(f"model: no measurement of {', '.join(models)} in {', '.join(map(str, folders))}")
    return found


def copy_compact(sources: Sequence[Path], out: Path) -> str:
    """Copy the `flatness.json` of all runs below `sources` to `out`, numbers to five digits, and say how many.

    A copy has the name of the run's folder; one that holds another run's measurements is not overwritten.
    """
    found = sorted({path for source in sources for path in find(source)})
    if not found:
        raise UserError(f"{', '.join(map(str, sources))}: no {NAME} here; measure the runs with fedman flatness")
    copies: dict[Path, FlatnessRecord] = {}
    for path in found:
        record, copy = read(path), out / f"{path.parent.name}.{NAME}"
        before = copies.get(copy) or (read(copy) if copy.exists() else record)
        if before["run"] != record["run"]:
            raise UserError(f"{copy}: would be of two runs, the other in {path.parent}; copy one to another folder")
        record["models"] = _rounded(record["models"], 5)
        record["sha256"] = digest(record)
        copies[copy] = record
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for copy, record in copies.items():
        write_text(copy, json.dumps(record, ensure_ascii=False) + "\n")
    return f"flatness of {len(copies)} runs in {out}"


def _check_sizes(measured: Measurements, where: str) -> None:
    if "density" in measured:
        nodes, weights = ([len(row) for row in measured["density"][key]] for key in ("nodes", "weights"))
        if nodes != weights or 0 in nodes:
            raise UserError(f"{where}.density must hold a weight for each node of each start")
    if "landscape" in measured:
        points, losses = len(measured["landscape"]["offsets"]), measured["landscape"]["losses"]
        rows = [losses, *(row for row in losses if isinstance(row, list))]
        if points < 2 or any(len(row) != points for row in rows):
            raise UserError(f"{where}.landscape must hold a loss for each of two offsets or more, or for each pair")


def _rounded(value: Any, digits: int) -> Any:
    """Plain values, with numbers to so many significant digits; those that are not finite become None."""
    if hasattr(value, "tolist"):  # a tensor
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _rounded(v, digits) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
