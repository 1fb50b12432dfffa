"""Checkpoints: a run's state between two rounds, as safetensors and a JSON with both hashes. Never executed.

Clients that have not taken part yet still are where they started, so only the rows of those seen are stored. The
JSON is written after the tensors; the two newest checkpoints are kept, and a damaged one gives way to the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typing_extensions import TypedDict

from fedman.errors import UserError
from fedman.runs.atomic import write_json, write_whole, writing
from fedman.runs.records import Count, Seconds, Settings, decisive, differing, read
from fedman.runs.version import version
from fedman.training.state import Notes, RunState

FORMAT = 2
KEEP = 2


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
    sha256: str  # the hash of all the above


def save(folder: Path, state: RunState, settings: Settings, seconds: float) -> None:
    """Write the state after a finished round."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
    seen = [k for k, yes in enumerate(state.seen) if yes]
    tensors = {name: v.detach().cpu().contiguous() for name, v in _tensors(state, seen).items()}
    data = folder / f"round-{state.round:06d}.safetensors"
    write_whole(data, lambda path: save_file(tensors, path))
    about: Description = {
        "format": FORMAT,
        "version": version(),
        "round": state.round,
        "seen": seen,
        "notes": state.clients.notes(),
        "seconds": seconds,
        "data": sha256(data),
        "config": decisive(settings),
        "sha256": "",
    }
    write_json(data.with_suffix(".json"), {**about, "sha256": _digest(about)})
    kept = {path.stem for path in sorted(folder.glob("round-*.json"))[-KEEP:]}
    with writing(folder):
        for old in folder.glob("*round-*"):  # also what a killed process left half-done
            if old.stem not in kept:
                old.unlink(missing_ok=True)


def load(folder: Path, state: RunState, settings: Settings, warn: Callable[[str], object]) -> float:
    """Lay the newest sound checkpoint, if there is one, over a fresh `state`; returns the seconds spent so far."""
    found = sorted(folder.glob("round-*.json"), reverse=True)
    for path in found:
        try:
            about, tensors = _read(path)
        except (UserError, OSError, SafetensorError):
            warn(f"{path}: damaged; trying the one before it")
            continue
        if about["format"] != FORMAT:
            raise UserError(f"{path}: checkpoint format {about['format']}, this version reads {FORMAT}")
        if changed := differing(about["config"], decisive(settings)):
            raise UserError(f"{path}: from another configuration; {', '.join(changed)} differ")
        for name, v in _tensors(state, about["seen"]).items():
            if name not in tensors or tensors[name].shape != v.shape:
                raise UserError(f"{path}: from another model; {name} is not of shape {list(v.shape)}")
        if about["version"] != version():
            warn(f"{path}: written by fedman {about['version']}, this is {version()}; the result may differ")
        _lay_over(state, about, tensors)
        return about["seconds"]
    if found:
        raise UserError(f"{folder}: every checkpoint is damaged; start again in a new folder")
    return 0.0


def _tensors(state: RunState, seen: list[int]) -> dict[str, torch.Tensor]:
    """What is stored of a state: the rows of clients that have not taken part are known without."""
    tensors = {f"server.{name}": v for name, v in state.server.items()}
    if state.total is not None:
        tensors["total"] = state.total
    return tensors | state.clients.tensors(seen) | {"sel": state.sel.clone()}


def _read(path: Path) -> tuple[Description, dict[str, torch.Tensor]]:
    about, data = read(Description, path), path.with_suffix(".safetensors")
    if about["format"] == FORMAT and (about["sha256"], about["data"]) != (_digest(about), sha256(data)):
        raise UserError(f"{path}: hash differs")
    return about, load_file(data)


def _lay_over(state: RunState, about: Description, tensors: dict[str, torch.Tensor]) -> None:
    device, seen = state.sel.device, about["seen"]
    state.round = about["round"]
    state.server = {name: tensors[f"server.{name}"].to(device) for name in state.server}
    state.sel = tensors["sel"].to(device)
    if state.total is not None:
        state.total = tensors["total"].to(device)
    state.clients.restore(seen, tensors, about["notes"])
    for k in seen:
        state.seen[k] = True


def _digest(about: Description) -> str:
    rest = {key: value for key, value in about.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The hash of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
