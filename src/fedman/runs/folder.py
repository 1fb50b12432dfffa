"""The folder of a run: which files there are, how they are written, and how they are read back."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from safetensors import SafetensorError

from fedman.errors import UserError
from fedman.runs import records
from fedman.runs.atomic import write_json, write_text, write_whole, writing
from fedman.runs.records import Divergence, Ending, RoundRecord, Settings, Summary

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, ROUNDS, SUMMARY, DIVERGED = "config.toml", "rounds.jsonl", "summary.json", "diverged.json"
LOCK = ".lock"


class RunFolder:
    """The folder of one run. Reading needs no `with`; inside `with`, this process alone may write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / CONFIG
        self.rounds = self.path / ROUNDS
        self.summary = self.path / SUMMARY
        self.diverged = self.path / DIVERGED
        self.model = self.path / "model.safetensors"
        self.checkpoint = self.path / "checkpoint"
        self._lines: IO[bytes] | None = None
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{self.path}: another run is writing to this folder") from None
        for file in (self.config, self.rounds, self.summary, self.diverged, self.model):
            for staged in self.path.glob(f".{file.name}.*"):  # left by a process that was killed
                with writing(staged):
                    staged.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._lines, self._lock):
            if file is not None:
                with suppress(OSError):  # closing tries again to write a line that a full disk refused
                    file.close()

    def append(self, record: RoundRecord) -> None:
        """Add the record of a round."""
        with writing(self.rounds):
            if self._lines is None:
                self._lines = open(self.rounds, "ab")  # noqa: SIM115 (held until __exit__)
            self._lines.write(_line(record))
            self._lines.flush()

    def sync(self) -> None:
        """Bring the records to the disk, before a checkpoint that relies on them."""
        if self._lines is not None:
            with writing(self.rounds):
                os.fsync(self._lines.fileno())

    def truncate(self, rounds: int) -> list[RoundRecord]:
        """Drop the records after round `rounds` and return the rest."""
        kept = self.read_rounds(rounds)
        if [record["round"] for record in kept] != list(range(1, rounds + 1)):
            raise UserError(f"{self.rounds}: ends before the checkpoint's round {rounds}; start again in a new folder")
        write_text(self.rounds, b"".join(map(_line, kept)).decode())
        return kept

    def read_rounds(self, count: int | None = None) -> list[RoundRecord]:
        """The first `count` records, or all. In a run that is not finished, a line damaged by a crash ends them."""
        found: list[RoundRecord] = []
        lines = records.content(self.rounds).splitlines() if self.rounds.exists() else []
        for number, line in enumerate(lines[:count], 1):
            where = f"{self.rounds}: line {number}"
            try:
                found.append(records.check(RoundRecord, records.parse(line, where), where))
            except UserError:
                if self.summary.exists():
                    raise
                break
        return found

    def write_ending(self, ending: Ending) -> None:
        """Write the summary, or why there will be none. A finished run needs its checkpoints no longer."""
        if "diverged" in ending:
            write_json(self.diverged, ending)
        else:
            write_json(self.summary, ending)
            shutil.rmtree(self.checkpoint, ignore_errors=True)

    def read_summary(self) -> Summary:
        """The summary of a finished run."""
        return records.read(Summary, self.summary)

    def ending(self) -> Ending | None:
        """The summary of a finished run, or its note of divergence; None while there is work left."""
        if self.summary.exists():
            return self.read_summary()
        return records.read(Divergence, self.diverged) if self.diverged.exists() else None

    def finished(self, settings: Settings) -> Ending | None:
        """`ending`; refused if it is that of another configuration."""
        ending = self.ending()
        if ending is None:
            return None
        if changed := records.differing(records.decisive(ending["config"]), records.decisive(settings)):
            raise UserError(f"{self.path}: holds a run of another configuration; {', '.join(changed)} differ")
        if "diverged" not in ending:
            shutil.rmtree(self.checkpoint, ignore_errors=True)  # left by a process killed after its summary
        return ending

    def write_models(self, models: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the models of a finished run: parameters by name, by name of the model."""
        from safetensors.torch import save_file

        tensors = {f"{name}.{key}": v for name, model in models.items() for key, v in model.items()}
        write_whole(self.model, lambda path: save_file(tensors, path))

    def read_models(self) -> dict[str, dict[str, Tensor]]:
        """The models of a finished run."""
        from safetensors.torch import load_file

        if not self.model.exists():
            raise UserError(f"{self.model}: no such file; the models of the run are needed")
        models: dict[str, dict[str, Tensor]] = {}
        try:
            for key, v in load_file(self.model).items():
                name, _, parameter = key.partition(".")
                models.setdefault(name, {})[parameter] = v
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.model}: cannot be read ({' '.join(str(error).split())})") from None
        return models


def find_runs(root: Path, *names: str) -> list[RunFolder]:
    """The folders in `root`, itself included, that hold a file of one of these names, in the order of their own."""
    folders = {path.parent for name in names for path in root.rglob(name)}
    return [RunFolder(f) for f in sorted(folders) if f == root or not f.name.startswith(".")]  # hidden: half copied


def _line(record: RoundRecord) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
