"""Many clients, of which a few take part in a round, with memory for a few rows: the others lie on the run's disk."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

from faults.disk import limit_files, sound_or_refused
from faults.runs import (
    complete,
    different,
    end,
    fingerprint,
    finish,
    refusal,
    resumed,
    rounds_done,
    start,
    wait_until,
)
from faults.tally import Tally
from fedman.training import client_rows

WORDS = [
    *("run", "--preset", "digits", "model=mlp", "clients=1000", "cohort=fixed", "participation=0.01", "partition=iid"),
    *("epochs=1", "algorithm=feddc", "rounds=12", "--device", "cpu"),
]
ROW = 3 * 4 * 6570  # bytes that are kept of a client
IN_MEMORY = 25  # rows


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Rows in memory and on disk give the same result; kill, a full disk and damage as for any other run."""
    whole, rng = scratch / "whole", random.Random(0)
    problem = complete([*WORDS, "--out", str(whole)], scratch / "log")
    if problem:
        raise RuntimeError(problem)
    want = fingerprint(whole)
    spilled(tally, scratch, want, small)
    killed(tally, scratch, want, 2 if small else 30, rng)
    no_space(tally, scratch, want, [30] if small else range(1, 130, 6))
    damaged(tally, scratch, want, 1 if small else 40, rng)
    too_large(tally, scratch)


def little_memory() -> None:
    """In this process there is memory for a few rows."""
    client_rows.memory = lambda device: (int(IN_MEMORY * ROW / client_rows.SHARE),) * 2  # type: ignore[assignment]


def spilled(tally: Tally, scratch: Path, whole: dict[str, str], small: bool) -> None:
    """Without a checkpoint before the end, and with one after every round."""
    for seconds in (1000,) if small else (1000, 0):
        out, log = scratch / f"spilled{seconds}", scratch / "spilled.log"
        words = [*WORDS, f"checkpoint_seconds={seconds}", "--out", str(out)]
        code = finish(start(words, log, little_memory))
        problem = different(out, whole) if code == 0 else f"exit {code}: {log.read_text()[-300:]}"
        tally.check("rows on the disk: the same sha256 as with all of them in memory", problem)


def killed(tally: Tally, scratch: Path, whole: dict[str, str], kills: int, rng: random.Random) -> None:
    """Over and over, with checkpoints now and then, so that rows of no checkpoint are on the disk too."""
    out, log, done = scratch / "killed", scratch / "killed.log", 0
    for _ in range(kills):
        words = [*WORDS, f"checkpoint_seconds={rng.choice([0, 0.05])}", "--out", str(out)]
        process = start(resumed(words, out), log, little_memory)
        moment = rounds_done(out) + rng.randint(0, 2)
        wait_until(process, lambda moment=moment: rounds_done(out) >= moment)  # type: ignore[misc]
        time.sleep(rng.uniform(0, 0.05))
        done += end(process, signal.SIGKILL) == -signal.SIGKILL
    problem = complete(resumed([*WORDS, "--out", str(out)], out), log) or different(out, whole)
    what = "kill -9 at random moments, rows on the disk: the same sha256 of all"
    tally.count(what, 0 if problem else done, done, [problem] if problem else [])


def no_space(tally: Tally, scratch: Path, whole: dict[str, str], rows: list[int] | range) -> None:
    """The file may not grow beyond so many rows."""
    for count in rows:
        out, log = scratch / f"full{count}", scratch / f"full{count}.log"
        words = [*WORDS, "checkpoint_seconds=0.05", "--out", str(out)]
        code = finish(start(words, log, _little_of_both, int((count + 0.5) * ROW), str(log)))
        while not Path(f"{log}.whole").exists():
            time.sleep(0.01)
        problem = refusal(code, log, "clients.rows: cannot be written: ") if code else None
        problem = problem or (complete(resumed(words, out), log) if code else None) or different(out, whole)
        tally.check("no space for rows: one line, then resumed to the same", problem)
        shutil.rmtree(out)


def _little_of_both(size: int, log: str) -> None:
    little_memory()
    limit_files(size, log)


def damaged(tally: Tally, scratch: Path, whole: dict[str, str], tries: int, rng: random.Random) -> None:
    """Bits flipped and ends cut off: sound or refused on resume, and refused when a row is read."""
    stopped, log = scratch / "stopped", scratch / "stopped.log"
    process = start([*WORDS, "checkpoint_seconds=0", "--out", str(stopped)], log)
    wait_until(process, lambda: rounds_done(stopped) >= 6)
    end(process, signal.SIGKILL)
    for i in range(tries):
        copy = scratch / f"damaged{i}"
        shutil.copytree(stopped, copy)
        path = copy / "checkpoint" / "clients.rows"
        content = bytearray(path.read_bytes())
        place = rng.randrange(len(content))
        if i % 3:
            content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content if i % 3 else content[:place])
        tally.check("rows: damaged on the disk", sound_or_refused(copy, log, WORDS, whole))
        shutil.rmtree(copy)
    out = scratch / "in-use"
    code = finish(start([*WORDS, "checkpoint_seconds=1000", "--out", str(out)], log, forget_hashes))
    tally.check("rows: damaged while the run uses them", refusal(code, log, "damaged where the row of client"))


def forget_hashes() -> None:
    """Every row that comes to the disk differs from its hash, as if one bit of it had changed."""
    from fedman.runs import row_file

    little_memory()
    write = row_file._write

    def one_bit(file: int, content: memoryview, offset: int) -> None:
        changed = bytearray(content)
        changed[0] ^= 1
        write(file, memoryview(changed), offset)

    row_file._write = one_bit


def too_large(tally: Tally, scratch: Path) -> None:
    """A run for whose clients there is no room is refused before its first round, in one line."""
    words, log = [word for word in WORDS if not word.startswith("rounds=")], scratch / "large.log"
    code = finish(start([*words, "rounds=1000000", "--out", str(scratch / "large")], log, nothing_left))
    says = "the state of about 1,000 clients that take part, 78.8 KB each, needs 78.8 MB and 78.8 KB are free"
    tally.check("no room for the clients' rows: refused at the start", refusal(code, log, says))


def nothing_left() -> None:
    """Neither memory nor disk."""
    client_rows.memory = lambda device: (ROW, ROW)  # type: ignore[assignment]
    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10 * ROW, 9 * ROW, ROW)  # type: ignore[assignment]
