"""The folder of a run: which files there are, how they are written, and how they are read back."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError

from fedman.errors import UserError, one_line
from fedman.runs import manifest, records
from fedman.runs.atomic import json_text, left_behind, toml_text, write_text, write_whole, writing
from fedman.runs.checksums import Chain, file_sha256, is_summed, sha256
from fedman.runs.key_text import parse_toml
from fedman.runs.manifest import MANIFEST
from fedman.runs.records import Divergence, Ending, RoundRecord, Settings, Summary

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, ROUNDS, SUMMARY, DIVERGED = "config.toml", "rounds.jsonl", "summary.json", "diverged.json"
LOCK = ".lock"
BAD_TENSORS = (SafetensorError, ValueError, LookupError, TypeError, RuntimeError)


class RunFolder:
    """The folder of one run. Reading needs no `with`; inside `with`, this process alone may write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / CONFIG
        self.rounds = self.path / ROUNDS
        self.summary = self.path / SUMMARY
        self.diverged = self.path / DIVERGED
        self.model = self.path / "model.safetensors"
        self.manifest = self.path / MANIFEST
        self.checkpoint = self.path / "checkpoint"
        self._chain = Chain()
        self._lines: IO[bytes] | None = None
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with writing(self.path / LOCK):
            self._lock = _open(str(self.path / LOCK), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(f"{self.path}: another run is writing to this folder") from None
        try:
            for file in (self.config, self.rounds, self.summary, self.diverged, self.model, self.manifest):
                for staged in left_behind(file):
                    with writing(staged):
                        staged.unlink()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            with suppress(OSError):  # closing tries again to write a line that a full disk refused
                self._lines.close()
        if self._lock is not None:
            os.close(self._lock)

    @property
    def is_checked(self) -> bool:
        """Whether there is a manifest; folders of earlier versions have none."""
        return self.manifest.exists()

    def refuse_used(self) -> None:
        """Refuse to start a run where one is."""
        if self.config.exists():
            how = "add --resume (in Python resume=True) to go on with it, or choose another --out"
            raise UserError(f"{self.path}: holds a run already; {how}")

    def refuse_unused(self) -> None:
        """Refuse to resume a run where none is."""
        if not self.config.exists():
            how = "leave out --resume (in Python resume=True) to start one here"
            raise UserError(f"{self.path}: holds no run that could be resumed (no {CONFIG}); {how}")

    def refuse_unfit(self, resume: bool) -> None:
        """Refuse a folder that holds a run, or, to resume one, a folder that holds none."""
        self.refuse_unused() if resume else self.refuse_used()

    def start(self, rounds: int, settings: Settings, last: str | None = None) -> list[RoundRecord]:
        """Begin to write after round `rounds`: return the records so far, and drop those after it and any ending.

        `last` is the checksum of the record of round `rounds`, if it is known: records of another run are refused.
        """
        kept, text, chain = self._kept(rounds), toml_text(settings), Chain()
        lines = b"".join(map(chain.line, kept))
        if last is not None and chain.last != last:
            how = "put this run's own file back, or start again in a new folder"
            raise UserError(f"{self.rounds}: not the records that the checkpoint of round {rounds} belongs to; {how}")
        listed = {CONFIG: sha256(text.encode())}
        if manifest.read(self.path) not in ({}, listed):
            manifest.write(self.path, {})  # what is about to change; a process killed here leaves nothing listed wrong
        self._chain = chain
        write_text(self.rounds, lines.decode())
        write_text(self.config, text)
        with writing(self.summary):
            self.summary.unlink(missing_ok=True)
        manifest.write(self.path, listed)
        return kept

    def append(self, record: RoundRecord) -> None:
        """Add the record of a round."""
        with writing(self.rounds):
            if self._lines is None:
                self._lines = open(self.rounds, "ab", opener=_open)  # noqa: SIM115 (held until __exit__)
            self._lines.write(self._chain.line(record))
            self._lines.flush()

    def sync(self) -> str:
        """Bring the records to the disk, before a checkpoint that relies on them; the checksum of the last."""
        if self._lines is not None:
            with writing(self.rounds):
                os.fsync(self._lines.fileno())
        return self._chain.last

    def _kept(self, rounds: int) -> list[RoundRecord]:
        """The records up to round `rounds`."""
        kept: list[RoundRecord] = []
        try:
            kept.extend(self._records(rounds))
        except UserError as error:
            raise UserError(f"{error}; the checkpoint's round {rounds} needs it; start again in a new folder") from None
        if [record["round"] for record in kept] != list(range(1, rounds + 1)):
            raise UserError(f"{self.rounds}: ends before the checkpoint's round {rounds}; start again in a new folder")
        return kept

    def read_rounds(self) -> list[RoundRecord]:
        """The records. In a run that is not finished, a line damaged by a crash ends them."""
        found: list[RoundRecord] = []
        try:
            found.extend(self._records())  # those before a damaged one are in it
        except UserError:
            if self.summary.exists() or self.diverged.exists():
                raise
        return found

    def _records(self, count: int | None = None) -> Iterator[RoundRecord]:
        lines = self._content(self.rounds).splitlines() if self._has(self.rounds) else []
        chain = Chain() if is_summed(lines) else None
        for number, line in enumerate(lines[:count], 1):
            where = f"{self.rounds}: line {number}"
            text = chain.content(line, where) if chain else line
            yield records.check(RoundRecord, records.parse(text, where), where)

    def write_ending(self, ending: Ending) -> None:
        """Write the summary, or why there will be none. The manifest comes first: the ending says that all is there."""
        path = self.diverged if "diverged" in ending else self.summary
        written = [file for file in (self.rounds, self.model) if file.exists()]
        listed = manifest.read(self.path) | {file.name: file_sha256(file) for file in written}
        manifest.write(self.path, listed | {path.name: sha256(json_text(ending).encode())})
        write_text(path, json_text(ending))

    def ending(self) -> Ending | None:
        """The summary of a finished run, or its note of divergence; None while there is work left."""
        if self._has(self.summary):
            return self._read(Summary, self.summary)
        return self._read(Divergence, self.diverged) if self._has(self.diverged) else None

    def finished(self, settings: Settings, *, go_on: bool = False) -> Ending | None:
        """`ending`, or None if `rounds` was raised since; refused if it is that of another configuration.

        To `go_on` with a run that a callback or a tracker stopped, it counts as not finished.
        """
        ending = self.ending() if self.summary.exists() or self.diverged.exists() else None
        if ending is None:
            return None
        before, now = records.decisive(ending["config"]), records.decisive(settings)
        if "diverged" not in ending and records.is_extended(before, now):
            self._require_checkpoint(f"finished after {before['rounds']} rounds", now)
            return None
        if changed := records.differing(before, now):
            raise UserError(f"{self.path}: holds a run of another configuration; {', '.join(changed)} differ")
        if go_on and "diverged" not in ending and "stopped" in ending:
            self._require_checkpoint(f"stopped after round {ending['round']}", now)
            return None
        if self.checkpoint.exists() and "diverged" not in ending:
            from fedman.runs.checkpoint import prune

            prune(self.checkpoint, int(bool(ending["config"].get("keep_state"))))  # a process was killed before it did
        return ending

    def _require_checkpoint(self, done: str, settings: Settings) -> None:
        """Refuse to go on with a run that has ended if its last checkpoint is gone."""
        if not any(self.checkpoint.glob("round-*.json")):
            how = f"choose another --out for {settings['rounds']} rounds"
            raise UserError(f"{self.path}: {done}, and its last checkpoint was not kept (keep_state); {how}")

    def read_config(self) -> dict[str, Any]:
        """The keys in `config.toml`."""
        return parse_toml(self._content(self.config), self.config)

    def write_models(self, models: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the models of a finished run: parameters by name, by name of the model."""
        from safetensors.torch import save_file

        tensors = {f"{name}.{key}": v for name, model in models.items() for key, v in model.items()}
        write_whole(self.model, lambda path: save_file(tensors, path))

    def read_models(self) -> dict[str, dict[str, Tensor]]:
        """The models of a finished run."""
        from safetensors.torch import load

        if not self._has(self.model):
            raise UserError(f"{self.model}: no such file; the models of the run are needed")
        models: dict[str, dict[str, Tensor]] = {}
        try:
            for key, v in load(self._content(self.model)).items():
                name, _, parameter = key.partition(".")
                models.setdefault(name, {})[parameter] = v
        except BAD_TENSORS as error:
            raise UserError(f"{self.model}: cannot be read ({one_line(error)})") from None
        return models

    def check(self) -> list[str]:
        """Read all files of the run; the names of those that the manifest lists. The first damaged one is an error."""
        self.read_config()
        self.ending()
        self.read_rounds()
        listed = manifest.read(self.path)
        for name in listed:
            manifest.content(self.path / name)
        return list(listed)

    def _has(self, path: Path) -> bool:
        """Whether a file is there, or should be: the manifest lists it and nobody is about to write it."""
        return path.exists() or (path.name in manifest.read(self.path) and not self._is_written())

    def _is_written(self) -> bool:
        """Whether a process writes to this folder."""
        try:
            lock = _open(str(self.path / LOCK), os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def _content(self, path: Path) -> bytes:
        return manifest.content(path)

    def _read(self, kind: type[records.Record], path: Path) -> records.Record:
        return records.check(kind, records.parse(self._content(path), str(path)), str(path))


def find_runs(root: Path, *names: str) -> list[RunFolder]:
    """The folders in `root`, itself included, that hold a file of one of these names, in the order of their own."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror or error}")

    walk = os.walk(root, onerror=refuse) if root.is_dir() else ()
    folders = sorted(Path(folder) for folder, within, files in walk if {*names} & {*within, *files})
    return [RunFolder(f) for f in folders if f == root or not f.name.startswith(".")]  # hidden: half copied


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here, with a file of this folder that it reads and writes anew."""
    with writing(folder / LOCK):
        lock = _open(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _open(name: str, flags: int) -> int:
    """Open a file that only runs write; a symbolic link in its place is an error."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
