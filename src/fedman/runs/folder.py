"""What a run leaves behind: one JSON line a round, a summary, the models. Written beside their place and renamed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from fedman.errors import UserError

LOCAL = ("data_dir", "checkpoint_seconds", "tensorboard")
"""Keys that do not decide a run's result."""


@cache
def version() -> str:
    """The package's version and a hash of its source, so that a result names the code that made it."""
    source = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        source.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    try:
        release = metadata.version("fedman")
    except metadata.PackageNotFoundError:  # run from a source tree
        release = "0+source"
    return f"{release}{'.' if '+' in release else '+'}{source.hexdigest()[:12]}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, a folder that is gone or read-only: one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while serializing: I/O error: ").partition(" (os error")[0]
        raise UserError(f"{path}: cannot be written: {reason}") from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under another name, then put it in place: a reader sees all of it or nothing."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            write(staged)
            with open(staged, "rb") as file:
                os.fsync(file.fileno())
            os.replace(staged, path)
        finally:
            with suppress(OSError):
                staged.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """`write_whole` for a text."""
    write_whole(path, lambda staged: staged.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    """`write_whole` for JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


class RunFolder:
    """The folder of one run. Only one process at a time may hold it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.rounds = self.path / "rounds.jsonl"
        self.summary = self.path / "summary.json"
        self.diverged = self.path / "diverged.json"
        self.model = self.path / "model.safetensors"
        self.checkpoint = self.path / "checkpoint"
        self._lines: IO[bytes] | None = None
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        except OSError as error:
            raise UserError(f"{self.path}: cannot write here: {error.strerror or error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{self.path}: another run is writing to this folder") from None
        for file in (self.config, self.rounds, self.summary, self.diverged, self.model):
            for staged in self.path.glob(f".{file.name}.*"):  # by a process that was killed
                with writing(staged):
                    staged.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._lines, self._lock):
            if file is not None:
                with suppress(OSError):  # a line that a full disk refused is tried again here
                    file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """One more line in `rounds.jsonl`."""
        with writing(self.rounds):
            if self._lines is None:
                self._lines = open(self.rounds, "ab")  # noqa: SIM115 (held until __exit__)
            self._lines.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._lines.flush()

    def sync(self) -> None:
        """Bring the lines to the disk, before a checkpoint that relies on them."""
        if self._lines is not None:
            with writing(self.rounds):
                os.fsync(self._lines.fileno())

    def cut(self, rounds: int) -> list[dict[str, Any]]:
        """Drop the records after round `rounds` and return the rest."""
        records = read_rounds(self.rounds)[:rounds] if rounds else []
        if [r.get("round") for r in records] != list(range(1, rounds + 1)):
            raise UserError(f"{self.rounds}: ends before the checkpoint's round {rounds}; start again in a new folder")
        lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        write_text(self.rounds, lines)
        return records


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The whole records of a `rounds.jsonl`; a line cut off by a crash ends it."""
    records: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def refuse_used(folder: Path) -> None:
    """A run that starts anew must not overwrite another."""
    if (folder / "config.toml").exists():
        how = "add --resume (in Python resume=True) to go on with it, or choose another --out"
        raise UserError(f"{folder}: holds a run already; {how}")


def finished(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of a finished run, or its note of divergence; None if there is work left."""
    for name in ("summary.json", "diverged.json"):
        path = folder / name
        if path.exists():
            try:
                summary = json.loads(path.read_bytes())
                before = dict(summary["config"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}: not a summary of this program") from None
            changed = sorted(k for k in {*before, *config} if before.get(k) != config.get(k) and k not in LOCAL)
            if changed:
                raise UserError(f"{folder}: holds a run of another configuration; {', '.join(changed)} differ")
            if "diverged" not in summary:
                shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # there if killed in its last moment
            return summary
    return None


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat keys as TOML."""

    def value(v: Any) -> str:
        if isinstance(v, bool):
            return str(v).lower()
        if isinstance(v, float):
            return "inf" if math.isinf(v) else repr(v)
        return json.dumps(v, ensure_ascii=False)

    return "".join(f"{k} = {value(v)}\n" for k, v in values.items())
