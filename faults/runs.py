"""Runs of the real command in processes of their own, and what they leave behind as hashes.

The processes are forked from a server that has the package loaded already: a real process with a real command line,
without the seconds that Python and torch take to start.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from fedman.runs.folder import RunFolder

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "faults.runs",
        "fedman.cli.commands",
        "fedman.runs.sweep",
        "fedman.runs.experiment",
        "fedman.cli.progress",
        "fedman.paper.report.page",
        "fedman.paper.flatness.command",
    ]
)
PATIENCE = 600.0  # seconds: a process that takes longer hangs

SMALL = ("--preset", "digits", "model=mlp", "clients=8", "participation=0.4", "epochs=1", "batch_size=20")
"""A run of a few milliseconds a round."""


def start(words: list[str], log: Path, before: Callable[..., object] | None = None, *given: Any) -> ForkServerProcess:
    """`fedman WORDS` in a process; what it prints goes to `log`. `before(*given)` is called in it first."""
    process = SERVER.Process(target=_main, args=(words, str(log), before, given), daemon=True)
    process.start()
    return process


def _main(words: list[str], log: str, before: Callable[..., object] | None, given: tuple[Any, ...]) -> None:
    os.environ["FEDMAN_DATA"] = str(Path(log).parent / "no-data")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    if before is not None:
        before(*given)
    from fedman.cli.commands import main

    main(words)


def finish(process: ForkServerProcess) -> int:
    """The exit code, of a process that must end by itself."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"process {process.pid} did not end")
    return process.exitcode


def complete(words: list[str], log: Path) -> str | None:
    """Run to the end; None, or what went wrong."""
    code = finish(start(words, log))
    return None if code == 0 else f"exit {code}: {tail(log)}"


def resumed(words: list[str], out: Path) -> list[str]:
    """The command that goes on with a run, or starts it if it was killed before it had begun."""
    return [*words, "--resume"] if (out / "config.toml").exists() else words


def end(process: ForkServerProcess, how: signal.Signals) -> int:
    """Send a signal; the exit code."""
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, how)
    return finish(process)


def wait_until(process: ForkServerProcess, ready: Callable[[], bool]) -> bool:
    """Wait for a moment in a process's life; False if it ended first."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if not process.is_alive() or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}  # Python's audit events


def on_operations(out: str, call: Callable[[str, str], object]) -> None:
    """In this process, before every operation on a file under `out`: call(operation, path); for good."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in OPERATIONS and str(arguments[0]).startswith(out):
            call(event, str(arguments[0]))

    sys.addaudithook(hook)


def rounds_done(out: Path) -> int:
    """Whole lines in a run's records."""
    try:
        return (out / "rounds.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def tail(log: Path) -> str:
    """The last line that a process printed."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "nothing printed")


def fingerprint(out: Path) -> dict[str, str]:
    """The sha256 of a finished run's weights, records and summary; what time it took is left out."""
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in RunFolder(out).read_rounds()]
    summary = json.loads((out / "summary.json").read_bytes())
    summary.pop("seconds")
    summary["config"].pop("checkpoint_seconds")
    return {
        "weights": sha256((out / "model.safetensors").read_bytes()),
        "records": sha256(json.dumps(records).encode()),
        "summary": sha256(json.dumps(summary, sort_keys=True).encode()),
    }


def different(out: Path, whole: dict[str, str]) -> str | None:
    """None if a run's fingerprint is this one, else what differs."""
    own = fingerprint(out)
    changed = [name for name in whole if own[name] != whole[name]]
    return f"{out.name}: {', '.join(changed)} differ from the uninterrupted run" if changed else None


def sha256(content: bytes) -> str:
    """Of a file's contents, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def refusal(code: int, log: Path, says: str) -> str | None:
    """None if a process ended with 2 and one line of error, which holds `says`; warnings may stand before it."""
    text = log.read_text(errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("fedman: error: ")]
    if code != 2 or len(errors) != 1 or "Traceback" in text or text.splitlines()[-1] != errors[0]:
        return f"exit {code}: {text[-300:]}"
    return None if says in errors[0] else f"does not say {says!r}: {errors[0]}"
