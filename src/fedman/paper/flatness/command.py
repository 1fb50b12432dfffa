"""`fedman flatness`: measures finished runs, writes the numbers into their folders, and draws them side by side."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from fedman.data import load
from fedman.errors import UserError
from fedman.execution.device import pick_device, pick_precision
from fedman.paper.flatness import flatness_json
from fedman.paper.flatness.finished_runs import (
    MODELS,
    FinishedRun,
    Follow,
    read_run,
    restore,
    select_samples,
    training_samples,
)
from fedman.paper.flatness.flatness_json import Measurements, Number, TraceMeasurement
from fedman.paper.flatness.measure import Measurer, Request, check
from fedman.paper.flatness.theory_demonstration import demonstrate
from fedman.runs.atomic import write_json, writing
from fedman.runs.folder import RunFolder
from fedman.runs.results import not_checked
from fedman.runs.version import version

SHARPNESS = {
    "average": "average",
    "worst_2": "worst, p=2",
    "worst_inf": "worst, p=∞",
    "m_2": "m samples, p=2",
    "m_inf": "m samples, p=∞",
}


@dataclass(frozen=True)
class Screen:
    """How the command tells a person what it does: by lines, by tables, and by the progress of long work."""

    say: Callable[[str], object]
    table: Callable[[str, list[str], list[list[str]]], object]  # title, header, rows
    progress: Callable[[], AbstractContextManager[Follow]]


def measure(
    folders: Sequence[Path],
    request: Request,
    *,
    models: Sequence[str],
    samples: int | None,
    device: str,
    data_dir: Path | None,
    out: Path | None,
    screen: Screen,
    missing: bool = False,
) -> None:
    """Measure every run. All input is checked before the first Hessian-vector product. Of several runs those that
    diverged are left out.

    With `missing`, models are left out of which everything that is asked for has been measured, however it was made.
    """
    device = pick_device(device)
    pick_precision(request.precision, device)
    folders = _without_diverged(_distinct(folders), screen)
    runs = [read_run(folder) for folder in folders]
    known = {folder: _known(folder) for folder in folders}
    if missing and request.landscape == "top":
        raise UserError(
            "missing: with directions top all runs are measured, as they share the first one's eigenvectors"
        )
    asked = set(request.measurements)
    todo = [(run, which) for run in runs for which in models]
    if missing:
        todo = [(run, which) for run, which in todo if not asked <= known[run.folder].get(which, {}).keys()]
        screen.say(f"{len(runs) * len(models) - len(todo)} of {len(runs) * len(models)} models are measured already")
    with screen.progress() as follow:
        sources = dict.fromkeys(run.config.source for run, _ in todo)
        data = {(name, place): load(name, data_dir or place, follow) for name, place in sources}
        prepared = []
        for run, which in todo:
            selection = select_samples(run, data[run.config.source], samples)
            model = restore(run, which, data[run.config.source])
            check(request, model, selection)
            prepared.append((run, which, model, selection))
        sizes = {sum(p.numel() for p in model.parameters()) for _, _, model, _ in prepared}
        if request.landscape == "top" and len(sizes) > 1:
            raise UserError("directions: top needs runs of one model, so that all can move along the same eigenvectors")
        if old := not_checked(folder for folder in folders if not RunFolder(folder).is_checked):
            screen.say(old.strip())
        directions = None
        for run, which, model, selection in prepared:
            samples_on_device = training_samples(model, data[run.config.source], selection, device, request.dtype)
            told = _named(follow, f"{run.config.method if len(runs) == 1 else run.folder.name} {which}")
            measurer = Measurer(
                model, run.config.make_task(), samples_on_device, selection.clients, request, told, directions
            )
            _record(measurer, run, which)
            directions = measurer.directions
            del measurer, samples_on_device  # before the next is on the device
    show(folders, models, screen)
    if _matplotlib():
        plot(folders, models, out, screen)
    else:
        names = " ".join(map(str, folders))
        screen.say(f"no pictures: matplotlib is not installed; draw them anywhere with fedman flatness --plot {names}")


def _without_diverged(folders: list[Path], screen: Screen) -> list[Path]:
    """Of several runs those that did not diverge, unless all did."""
    lost = [folder for folder in folders if RunFolder(folder).diverged.exists()]
    if not 0 < len(lost) < len(folders):
        return folders
    screen.say(f"not measured, as they diverged: {' '.join(map(str, lost))}")
    return [folder for folder in folders if folder not in lost]


def _known(folder: Path) -> dict[str, Measurements]:
    """What has been measured of a run's models; more can be written to its folder."""
    place = folder / flatness_json.NAME
    found = flatness_json.read(place)["models"] if place.exists() else {}
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: cannot write here")
    return found


def _record(measurer: Measurer, run: FinishedRun, which: str) -> None:
    """Make the measurements of a model, and write each as soon as it is there."""
    try:
        for measurement in measurer.run():
            flatness_json.add(run.folder, run.about, which, *measurement)
    except torch.OutOfMemoryError:
        batch = measurer.options["batch_size"]
        message = f"batch-size: {batch} samples at once do not fit the device's memory"
        raise UserError(f"{message}; take less, or --drop-graphs") from None


def plot(folders: Sequence[Path], models: Sequence[str], out: Path | None, screen: Screen) -> None:
    """Draw what has been measured."""
    if not _matplotlib():
        raise UserError("plot: matplotlib is not installed; pip install matplotlib")
    from fedman.paper.flatness import figures

    folders = _distinct(folders)
    place = out or (folders[0] if len(folders) == 1 else Path(os.path.commonpath([f.absolute() for f in folders])))
    paths = figures.draw(flatness_json.read_named(folders, models), place)
    for path in paths:
        screen.say(f"written to {path}")
    if not paths:
        screen.say("no pictures: --top with 2 or more, --density, --layers, --clients and --landscape give some")


def theory(out: Path | None, seed: int, screen: Screen) -> None:
    """Check the theory on a small federation; print both sides of every bound, write and draw the numbers."""
    out = out or Path("runs") / "theory"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: not a folder")
    with screen.progress() as follow:
        found = demonstrate(seed, follow)
    screen.table("the theory at the last round of two small federations on digits, float64", *found.table())
    screen.table("the paper's statements", *found.theorems())
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    header, rows = found.theorems()
    record = asdict(found) | {"theorems": {"header": header, "rows": rows}, "seed": seed, "version": version()}
    write_json(out / "theory.json", record)
    screen.say(f"written to {out / 'theory.json'}")
    if not _matplotlib():
        screen.say("no picture: matplotlib is not installed")
        return
    from fedman.flatness import plot
    from fedman.paper.flatness import figures

    for path in plot.save(figures.layer_paths(found.paths), out / "theory"):
        screen.say(f"written to {path}")


def show(folders: Sequence[Path], models: Sequence[str], screen: Screen) -> None:
    """The main numbers as tables."""
    main, newton, sharp, blocks, bounds = [list[list[str]]() for _ in range(5)]
    for name, m in flatness_json.read_named(folders, models).items():
        main.append([name, *_main_numbers(m)])
        if found := m.get("gauss_newton"):
            newton.append([name, _number(found["top"]) + _rough(found["converged"]), _trace(found["trace"])])
        if sharpness := m.get("sharpness"):
            rises = [_number(sharpness["measures"][key]["value"]) for key in SHARPNESS]
            sharp.append([name, *rises, str(sharpness["m"])])
        for layer, b in m["layers"]["blocks"].items() if "layers" in m else ():
            norm = "" if b["input_norm"] is None else _number(b["input_norm"])
            blocks.append([name, layer, _number(b["top"]), _trace(b["trace"]), norm])
        if bound := m.get("clients"):
            bounds.append([name, str(len(bound["clients"])), f"{bound['top']:.4g}", f"{bound['mean']:.4g}"])
    trace = "trace ± s.e."
    for title, header, rows in (
        ("flatness of the training loss (without a penalty)", ["training loss", "λ_max", trace, "products", "s"], main),
        ("Gauss-Newton matrix", ["λ_max", trace], newton),
        ("adaptive sharpness: rise of the loss", [*SHARPNESS.values(), "m"], sharp),
        ("layer by layer", ["layer", "λ_max", trace, "mean ‖a‖² of the input"], blocks),
        ("λ_max of the clients' losses", ["clients", "of their mean ≤", "their mean"], bounds),
    ):
        if rows:
            screen.table(title, ["", *header], rows)


def chosen_models(text: str) -> list[str]:
    """`all,sel` as names."""
    names = text.split(",")
    for name in names:
        if name not in MODELS:
            raise UserError(f"model: {name!r} is not one of {', '.join(MODELS)}")
    return list(dict.fromkeys(names))


def _distinct(folders: Sequence[Path]) -> list[Path]:
    if not folders:
        raise UserError("RUN: name the folder of at least one finished run")
    return list(dict.fromkeys(folders))


def _main_numbers(m: Measurements) -> list[str]:
    top, trace, entries = m.get("top"), m.get("trace"), flatness_json.entries(m)
    return [
        _number(m["loss"]["value"], ".4f"),
        _number(top["values"][0]) + _rough(top["converged"] == len(top["values"])) if top else "",
        _trace(trace) if trace else "",
        str(sum(entry.get("products", 0) for entry in entries.values())),
        f"{sum(entry.get('seconds', 0) for entry in entries.values()):.1f}",
    ]


def _trace(found: TraceMeasurement) -> str:
    return f"{_number(found['value'])} ± {_number(found['error'], '.2g')}{_rough(found['converged'])}"


def _number(value: Number, form: str = ".4g") -> str:
    """A number as text; one that is not finite is nan."""
    return format(math.nan if value is None else value, form)


def _rough(converged: bool) -> str:
    return "" if converged else " (not converged)"


def _named(follow: Follow, name: str) -> Follow:
    return lambda what, done, total: follow(f"{name}: {what}", done, total)


def _matplotlib() -> bool:
    return find_spec("matplotlib") is not None
