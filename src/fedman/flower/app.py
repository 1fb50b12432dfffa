"""The ServerApp of a deployment: starts the run described by `flwr run -c '...'`."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from fedman.config import resolve
from fedman.errors import Diverged, Interrupted, TooFew, UserError
from fedman.flower.server import FAILED, serve
from fedman.flower.server_options import OPTIONS_FILE, split_options
from fedman.paper.presets import find_preset
from fedman.runs.atomic import write_json
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import overrides, read_toml
from fedman.runs.records import Headline, RoundRecord, figures
from fedman.runs.signals import stop_on_signal

EXIT_CODES: dict[type[Exception], int] = {UserError: 2, Diverged: 3, TooFew: 4}
GRACE = 30.0  # seconds from a signal to the end of the process; there is a checkpoint after every round
PROJECT = Path(__file__).parent / "project"


class Failed(Exception):
    """Why a run ended early, with its exit code; Flower shows the message as the run's details."""


def main(grid: Grid, context: Context) -> None:
    """Read the run's configuration and run it. Why it ended early is also written to OUT/failed.json; bad input writes
    nothing, as OUT may hold another run."""
    given = context.run_config
    out = Path(str(given["out"])).expanduser()
    try:
        values, options = split_options(_values(str(given["settings"]), out, bool(given["resume"])))
        config = resolve(values, find_preset(str(given["preset"])) if given["preset"] else None)
        stop = threading.Event()
        threading.Thread(target=_end_hard, args=[stop], daemon=True).start()
        with stop_on_signal(stop) as caught:
            serve(
                grid, config, options, out=out, resume=bool(given["resume"]), stopping=(stop, caught),
                progress=_print_round, warn=print,
            )  # fmt: skip
    except (UserError, Diverged, TooFew, Interrupted) as error:
        code, reason = EXIT_CODES.get(type(error), 0), str(error)
        if isinstance(error, Interrupted):
            code, reason = 128 + error.signum, f"interrupted; {out} holds the rounds so far; continue with resume=true"
        if code != EXIT_CODES[UserError] and out.is_dir():
            write_json(out / FAILED, {"exit": code, "reason": reason})
        raise Failed(f"exit {code}: {reason}") from None


def _end_hard(stop: threading.Event) -> None:
    """End the process some time after a signal, if it has not ended by itself.

    A call to a SuperLink that is gone is repeated for ever by Flower, and the process would keep the run's folder.
    """
    stop.wait()
    time.sleep(GRACE)
    os._exit(1)


def _values(settings: str, out: Path, resume: bool) -> dict[str, object]:
    """The KEY=VALUE words in `settings`; when a run is resumed without any, the values in its folder."""
    try:
        given = overrides(shlex.split(settings))
    except ValueError as error:
        raise UserError(f"settings: {settings!r} is not a list of words ({error})") from None
    if given or not resume:
        return {**given}
    folder = RunFolder(out)
    folder.refuse_unused()
    return {**folder.read_config(), **read_toml(out / OPTIONS_FILE)}


def _print_round(record: RoundRecord) -> None:
    name, values = next(iter(figures(record).items()), ("", {}))
    scores = "".join(f", {model} {Headline(name).shown(value)}" for model, value in values.items())
    refused = f"; refused: {', '.join(record['refused'])}" if record.get("refused") else ""
    print(f"round {record['round']}: loss {record['loss']:.3f}{scores}{refused}", flush=True)


def new_project(folder: Path) -> None:
    """Write the Flower app that `flwr run` starts into a new folder."""
    try:
        shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror or error}") from None
