"""The ServerApp of a deployment: what `flwr run -c '...'` says becomes a run."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from fedman.cli.progress import described
from fedman.config import overrides, read_toml, resolve
from fedman.errors import Diverged, Interrupted, TooFew, UserError
from fedman.flower.server import serve
from fedman.flower.service import FILE, split
from fedman.runs.atomic import write_json
from fedman.runs.folder import RunFolder
from fedman.runs.records import RoundRecord

CODES: dict[type[Exception], int] = {UserError: 2, Diverged: 3, TooFew: 4}
PROJECT = Path(__file__).parent / "project"


class Failed(Exception):
    """Why a run ended early, with its exit code: Flower shows the message as the run's details."""


def main(grid: Grid, context: Context) -> None:
    """Read the run's configuration and play it. A failure is also written to OUT/failed.json."""
    given = context.run_config
    out = Path(str(given["out"])).expanduser()
    failed = out / "failed.json"
    failed.unlink(missing_ok=True)
    try:
        values, service = split(_values(str(given["settings"]), out, bool(given["resume"])))
        config = resolve(values, str(given["preset"]) or None)
        if not given["resume"]:
            RunFolder(out).refuse_used()
        serve(grid, config, service, out=out, resume=bool(given["resume"]), progress=_say, warn=print)
    except (UserError, Diverged, TooFew, Interrupted) as error:
        code, reason = CODES.get(type(error), 0), str(error)
        if isinstance(error, Interrupted):
            code, reason = 128 + error.signum, f"interrupted; {out} holds what is done; go on with resume=true"
        if out.is_dir():
            write_json(failed, {"exit": code, "reason": reason})
        raise Failed(f"exit {code}: {reason}") from None


def _values(settings: str, out: Path, resume: bool) -> dict[str, object]:
    """The KEY=VALUE words; those of a run to go on with, where none are given."""
    try:
        given = overrides(shlex.split(settings))
    except ValueError as error:
        raise UserError(f"settings: {settings!r} is not a list of words ({error})") from None
    return {**given} if given or not resume else {**RunFolder(out).read_config(), **read_toml(out / FILE)}


def _say(record: RoundRecord) -> None:
    print(f"round {record['round']}: {described(record)}", flush=True)


def new_project(folder: Path) -> None:
    """Write the Flower app that `flwr run` starts into a folder of its own."""
    try:
        folder.mkdir(parents=True)
        for path in sorted(PROJECT.iterdir()):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror or error}") from None
