"""`fedman flatness`: finished runs measured one after the other, written into their folders, drawn side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fedman.cli.progress import print_table, work_progress
from fedman.data import Dataset
from fedman.errors import UserError
from fedman.execution.device import pick_device, pick_precision
from fedman.paper.flatness import figures, record
from fedman.paper.flatness.demonstration import demonstrate
from fedman.paper.flatness.measure import Follow, Request, Subject, check
from fedman.paper.flatness.runs import MODELS, read_data, read_run, restore, select_samples, training_samples
from fedman.runs.atomic import write_json
from fedman.runs.version import version

Say = Callable[[str], object]


def measure(
    folders: Sequence[Path],
    request: Request,
    *,
    models: Sequence[str],
    samples: int | None,
    device: str,
    data_dir: Path | None,
    out: Path | None,
    say: Say,
) -> None:
    """Measure every run; what can be refused is refused before the first product."""
    device = pick_device(device)
    pick_precision(request.precision, device)
    runs = [read_run(folder) for folder in _distinct(folders)]
    for run in runs:
        if (run.folder / record.NAME).exists():
            record.read(run.folder)
        if not os.access(run.folder, os.W_OK):
            raise UserError(f"{run.folder}: cannot write here")
    with work_progress() as follow:
        data: dict[Any, Dataset] = {}
        prepared = []
        for run in runs:
            source = run.config.source
            data[source] = data.get(source) or read_data(run, data_dir, follow)
            for which in models:
                model = restore(run, which, data[source])
                selection = select_samples(run, data[source], samples)
                check(request, model, selection)
                prepared.append((run, which, model, selection))
        sizes = {sum(p.numel() for p in model.parameters()) for _, _, model, _ in prepared}
        if request.landscape == "top" and len(sizes) > 1:
            raise UserError("directions: top needs runs of one model, so that all can move along the same eigenvectors")
        directions = None
        for run, which, model, selection in prepared:
            seen = training_samples(data[run.config.source], selection, device, request.dtype)
            name = run.method if len(runs) == 1 else run.folder.name
            subject = Subject(model, seen, request, _named(follow, f"{name} {which}"), directions)
            try:
                for measurement, result in subject.run():
                    record.add(run.folder, run.about, which, measurement, result)
            except torch.OutOfMemoryError:
                batch = subject.options["batch_size"]
                message = (
                    f"batch-size: {batch} samples at once do not fit the device's memory; take less, or --drop-graphs"
                )
                raise UserError(message) from None
            directions = subject.directions
            del subject, seen  # before the next is on the device
    folders = [run.folder for run in runs]
    show(folders, models)
    if find_spec("matplotlib") is None:
        words = " ".join(map(str, folders))
        say(f"no pictures: matplotlib is not installed; draw them anywhere with fedman flatness --plot {words}")
    else:
        plot(folders, models, out, say)


def plot(folders: Sequence[Path], models: Sequence[str], out: Path | None, say: Say) -> None:
    """Draw what has been measured."""
    if find_spec("matplotlib") is None:
        raise UserError("plot: matplotlib is not installed; pip install matplotlib")
    folders = _distinct(folders)
    place = out or (folders[0] if len(folders) == 1 else Path(os.path.commonpath([f.absolute() for f in folders])))
    paths = figures.draw(figures.gather(folders, models), place)
    for path in paths:
        say(f"written to {path}")
    if not paths:
        say("no pictures: --top with 2 or more, --density, --layers, --clients and --landscape give some")


def theory(out: Path | None, seed: int, say: Say) -> None:
    """Check the theory on a small federation; print both sides of every bound, write and draw the figures."""
    out = out or Path("runs") / "theory"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: not a folder")
    with work_progress() as follow:
        found = demonstrate(seed, follow)
    print_table("the theory at the last round of two small federations on digits, float64", *found.table())
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "theory.json", asdict(found) | {"seed": seed, "version": version()})
    except OSError as error:
        raise UserError(f"{out}: cannot write here: {error.strerror or error}") from None
    say(f"written to {out / 'theory.json'}")
    if find_spec("matplotlib") is None:
        say("no picture: matplotlib is not installed")
        return
    from fedman.flatness.plot import paths, save

    for path in save(paths(found.paths), out / "theory"):
        say(f"written to {path}")


def show(folders: Sequence[Path], models: Sequence[str]) -> None:
    """The main figures as tables."""
    measured = figures.gather(folders, models)
    lines = []
    for name, m in measured.items():
        top, trace = m.get("top"), m.get("trace")
        lines.append(
            [
                name,
                f"{m['loss']['value']:.4f}",
                f"{top['values'][0]:.4g}{_rough(top['converged'] == len(top['values']))}" if top else "",
                _trace(trace) if trace else "",
                str(sum(e.get("products", 0) for e in m.values())),
                f"{sum(e['seconds'] for e in m.values()):.1f}",
            ]
        )
    header = ["", "training loss", "λ_max", "trace ± s.e.", "products", "s"]
    print_table("flatness of the training loss (cross-entropy alone)", header, lines)
    blocks = [
        [
            name,
            layer,
            f"{b['top']:.4g}",
            _trace(b["trace"]),
            "" if b["input_norm"] is None else f"{b['input_norm']:.4g}",
        ]
        for name, m in measured.items()
        for layer, b in m.get("layers", {"blocks": {}})["blocks"].items()
    ]
    if blocks:
        print_table("layer by layer", ["", "layer", "λ_max", "trace ± s.e.", "mean ‖a‖² of the input"], blocks)
    bounds = [
        [name, str(len(m["clients"]["clients"])), f"{m['clients']['top']:.4g}", f"{m['clients']['mean']:.4g}"]
        for name, m in measured.items()
        if "clients" in m
    ]
    if bounds:
        print_table("λ_max of the clients' losses", ["", "clients", "of their mean ≤", "their mean"], bounds)


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


def _trace(found: dict[str, Any]) -> str:
    return f"{found['value']:.4g} ± {found['error']:.2g}{_rough(found['converged'])}"


def _rough(converged: bool) -> str:
    return "" if converged else " (not converged)"


def _named(follow: Follow, name: str) -> Follow:
    return lambda what, done, total: follow(f"{name}: {what}", done, total)
