"""The ServerApp of a deployment: starts the run described by `flwr run -c '...'`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from fedman.config import overrides, read_toml, resolve
from fedman.errors import Diverged, Interrupted, TooFew, UserError
from fedman.flower.server import serve
from fedman.flower.server_options import OPTIONS_FILE, split_options
from fedman.paper.presets import find_preset
from fedman.runs.atomic import write_json
from fedman.runs.folder import RunFolder
from fedman.runs.records import RoundRecord

EXIT_CODES: dict[type[Exception], int] = {UserError: 2, Diverged: 3, TooFew: 4}
PROJECT = Path(__file__).parent / "project"


class Failed(Exception):
    """Why a run ended early, with its exit code; Flower shows the message as the run's details."""


def main(grid: Grid, context: Context) -> None:
    """Read the run's configuration and run it. A failure is also written to OUT/failed.json."""
    given = context.run_config
    out = Path(str(given["out"])).expanduser()
    failed = out / "failed.json"
    failed.unlink(missing_ok=True)
    try:
        values, options = split_options(_values(str(given["settings"]), out, bool(given["resume"])))
        config = resolve(values, find_preset(str(given["preset"])) if given["preset"] else None)
        serve(grid, config, options, out=out, resume=bool(given["resume"]), progress=_print_round, warn=print)
    except (UserError, Diverged, TooFew, Interrupted) as error:
        code, reason = EXIT_CODES.get(type(error), 0), str(error)
        if isinstance(error, Interrupted):
            code, reason = 128 + error.signum, f"interrupted; {out} holds the rounds so far; continue with resume=true"
        if out.is_dir():
            write_json(failed, {"exit": code, "reason": reason})
        raise Failed(f"exit {code}: {reason}") from None


def _values(settings: str, out: Path, resume: bool) -> dict[str, object]:
    """The KEY=VALUE words in `settings`; when a run is resumed without any, the values in its folder."""
    try:
        given = overrides(shlex.split(settings))
    except ValueError as error:
        raise UserError(f"settings: {settings!r} is not a list of words ({error})") from None
    return {**given} if given or not resume else {**RunFolder(out).read_config(), **read_toml(out / OPTIONS_FILE)}


def _print_round(record: RoundRecord) -> None:
    accuracy = "".join(f", {model} {percent:.2f} %" for model, percent in record["accuracy"].items())
    refused = f"; refused: {', '.join(record['refused'])}" if record.get("refused") else ""
    print(f"round {record['round']}: loss {record['loss']:.3f}{accuracy}{refused}", flush=True)


def new_project(folder: Path) -> None:
    """Write the Flower app that `flwr run` starts into a new folder."""
    try:
        shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror or error}") from None
