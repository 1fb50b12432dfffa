"""Checkpoints: a run's state between two rounds, as safetensors and a JSON with both hashes. Never executed.

What is kept of clients in this process lies in a file of its own (`fedman.runs.row_file`), to which only the rows that
have changed are written; the tensors say where in it they are. The JSON is written last; the two newest checkpoints
are kept, and where one is damaged, the other is used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NotRequired

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typing_extensions import TypedDict

from fedman.errors import UserError
from fedman.runs import row_file
from fedman.runs.atomic import refuse_link, write_json, write_whole, writing
from fedman.runs.checksums import digest, file_sha256
from fedman.runs.inputs import Inputs, refuse_other_inputs
from fedman.runs.records import (
    Computed,
    Count,
    Seconds,
    Settings,
    check,
    content,
    decisive,
    differing,
    is_extended,
    parse,
)
from fedman.runs.version import version
from fedman.training.state import Notes, RunState, joined

FORMAT = 3
KEEP = 2
NAME = re.compile(r"round-\d{6,}\.json")
OURS = re.compile(r"(round-\d{6,})\.(json|safetensors)|\.(round-\d{6,})\.(json|safetensors)\.\d+")  # final, staged


class AnotherFormat(UserError):
    """Written by an earlier or a later version."""


class Description(TypedDict):
    """The JSON beside the tensors."""

    format: int
    version: str
    round: Count
    seen: list[int]  # the clients that have taken part
    notes: Notes
    seconds: Seconds
    data: str  # the hash of the tensors' file
    config: Settings
    records: NotRequired[str]  # the checksum of the round's record, and so of all before it; earlier versions: none
    computed: NotRequired[list[Computed]]  # in how many ways the rounds were, the latest last; earlier versions: none
    inputs: NotRequired[Inputs]
    sha256: str  # the hash of all the above


APART = 10
"""Checkpoints are this many times as far apart as the last ones took to write: gigabytes of rows take seconds."""


class Timer:
    """When runs that are stacked write their checkpoints: after the same rounds, at least `seconds` apart and
    `APART` times as long as they took; after every round if `seconds` is 0. Where a process is killed while it writes
    them, all can go on from the round before, stacked as they were, to the same bits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self.pause = seconds
        self.started = self.asked = time.perf_counter()
        self.round, self.due = 0, False  # the last round asked for, and the answer

    def is_due(self, t: int) -> bool:
        """Whether checkpoints are written after round t, which the first run that asks decides."""
        if t != self.round:
            self.asked = time.perf_counter()
            self.round, self.due = t, self.asked - self.started >= self.pause
        return self.due

    def restart(self) -> None:
        """A checkpoint has been written. Of several runs each says so; the last one counts."""
        self.started = time.perf_counter()
        self.pause = max(self.seconds, APART * (self.started - self.asked)) if self.seconds else 0.0


def save(
    folder: Path,
    state: RunState,
    settings: Settings,
    seconds: float,
    records: str,
    computed: list[Computed],
    inputs: Inputs,
) -> None:
    """Write the state after a finished round, whose record has the checksum `records`."""
    refuse_link(folder)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    seen = [k for k, yes in enumerate(state.seen) if yes]
    found = _vectors(state) | state.clients.tensors(seen)
    tensors = {name: v.detach().cpu().contiguous() for name, v in found.items()}
    data = folder / f"round-{state.round:06d}.safetensors"
    write_whole(data, lambda path: save_file(tensors, path))
    about: Description = {
        "format": FORMAT,
        "version": version(),
        "round": state.round,
        "seen": seen,
        "notes": state.clients.notes(),
        "seconds": seconds,
        "data": file_sha256(data),
        "config": decisive(settings),
        "records": records,
        "computed": computed,
        "inputs": inputs,
        "sha256": "",
    }
    write_json(data.with_suffix(".json"), {**about, "sha256": digest(about)})
    prune(folder, KEEP)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest checkpoints, also what a killed process left half-done; files of others stay."""
    if folder.is_symlink() or not folder.exists():
        return
    kept = {path.stem for path in _newest_first(folder)[:keep]}
    with writing(folder), suppress(FileNotFoundError):  # another process may delete them as well
        for path in folder.iterdir():
            if (OURS.fullmatch(path.name) and path.stem not in kept) or (path.name == row_file.NAME and not kept):
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def common_round(folders: Sequence[Path]) -> int | None:
    """The last round after which all of these runs have a checkpoint; None if there is none."""
    each = [{_round(path) for path in _newest_first(folder)} for folder in folders]
    return max(set.intersection(*each), default=None)


def refuse_other(folder: Path, settings: Settings) -> None:
    """Refuse to go on from the newest sound checkpoint with another configuration, as `restore` does."""
    for path in _newest_first(folder):
        if sound := _read(path):
            return _refuse_changed(path, sound[0], settings)


def _refuse_changed(path: Path, about: Description, settings: Settings) -> None:
    before, now = about["config"], decisive(settings)
    if (changed := differing(before, now)) and not is_extended(before, now):
        raise UserError(f"{path}: from another configuration; {', '.join(changed)} differ")


def restore(
    folder: Path,
    state: RunState,
    settings: Settings,
    warn: Callable[[str], object],
    until: int | None = None,
    inputs: Mapping[str, str] = {},
) -> Description | None:
    """Lay the newest sound checkpoint, if there is one, over a fresh `state`: of those up to round `until`, where it is
    given. Newer ones are deleted: the records are about to be those of this one. Only `rounds` may be more than it was.
    """
    found = _newest_first(folder)
    for i, path in enumerate(found):
        if until is not None and _round(path) > until:
            continue
        sound = _read(path)
        if sound is None:
            warn(f"{path}: damaged; trying the one before it")
            continue
        about, tensors = sound
        _refuse_changed(path, about, settings)
        refuse_other_inputs(path, about.get("inputs", {}), inputs)
        if not {*about["seen"]} <= {*range(len(state.seen))}:
            raise UserError(f"{path}: from another configuration; it names clients beyond the {len(state.seen)}")
        for name, v in _vectors(state).items():
            if name not in tensors or (tensors[name].shape, tensors[name].dtype) != (v.shape, v.dtype):
                raise UserError(f"{path}: from another model; {name} is not of shape {list(v.shape)} and {v.dtype}")
        if about["notes"].get("row") != (row := state.clients.notes().get("row")):
            raise UserError(f"{path}: from another model; what it holds of a client is not {row}")
        try:
            state.clients.restore(about["seen"], tensors, about["notes"])
        except row_file.Damaged as error:
            warn(f"{error}; trying the checkpoint before {path}")
            continue
        if about["version"] != version():
            warn(f"{path}: written by fedman {about['version']}, this is {version()}; the result may differ")
        _lay_over(state, about, tensors)
        with writing(folder):
            for newer in found[:i]:
                newer.unlink(missing_ok=True)
        return about
    if found:
        raise UserError(f"{folder}: every checkpoint is damaged; start again in a new folder")
    return None


def _newest_first(folder: Path) -> list[Path]:
    """The descriptions of checkpoints."""
    return sorted((path for path in folder.glob("round-*.json") if NAME.fullmatch(path.name)), key=_round, reverse=True)


def _round(path: Path) -> int:
    """The round after which a checkpoint was written, by its name."""
    return int(path.stem.removeprefix("round-"))


def _vectors(state: RunState) -> dict[str, torch.Tensor]:
    """What is stored of a state beside what is kept of clients."""
    vectors = {**{f"server.{name}": v for name, v in state.server.items()}, "sel": joined(state.sel).clone()}
    return vectors if state.total is None else {**vectors, "total": state.total}


def _read(path: Path) -> tuple[Description, dict[str, torch.Tensor]] | None:
    """A checkpoint; None if it is damaged. One of another format is refused."""
    try:
        values = parse(content(path), str(path))
        known = values.get("format") if isinstance(values, dict) else None
        if isinstance(known, int) and known != FORMAT:
            how = "finish the run with the version that wrote it, or start again in a new folder"
            raise AnotherFormat(f"{path}: checkpoint format {known}, this version reads {FORMAT}; {how}")
        about, data = check(Description, values, str(path)), path.with_suffix(".safetensors")
        sound = (about["sha256"], about["data"]) == (digest(about), file_sha256(data))
        return (about, load_file(data)) if sound else None
    except AnotherFormat:
        raise
    except (UserError, OSError, SafetensorError):
        return None


def _lay_over(state: RunState, about: Description, tensors: dict[str, torch.Tensor]) -> None:
    """Vectors are copied to memory of their own: where they lie in the file they are not aligned as torch aligns them,
    and a matrix product's last bit can depend on that."""
    device, seen = state.sel["w"].device, about["seen"]
    state.round = about["round"]
    state.server = {name: tensors[f"server.{name}"].to(device, copy=True) for name in state.server}
    sel = tensors["sel"].to(device, copy=True).split([len(v) for v in state.sel.values()])
    state.sel = dict(zip(state.sel, sel, strict=True))
    if state.total is not None:
        state.total = tensors["total"].to(device, copy=True)
    for k in seen:
        state.seen[k] = True
