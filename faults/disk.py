"""Disk: full, read-only, gone, damaged or shared. One line that names the file, and nothing sound is lost."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults.runs import (
    SMALL,
    complete,
    different,
    fingerprint,
    finish,
    on_operations,
    refusal,
    resumed,
    rounds_done,
    start,
    tail,
    wait_until,
)
from faults.tally import Tally

WORDS = ["run", *SMALL, "algorithm=feddc", "zeta=0.15", "rounds=8", "checkpoint_seconds=0", "--device", "cpu"]


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Everything a disk can do to a run."""
    problem = complete([*WORDS, "--out", str(scratch / "whole")], scratch / "log")
    if problem:
        raise RuntimeError(problem)
    whole = fingerprint(scratch / "whole")
    no_space(tally, scratch, whole, small)
    if not small:
        small_disk(tally, scratch, whole)
    read_only(tally, scratch)
    deleted(tally, scratch)
    checkpoints(tally, scratch, whole, small)
    two_at_once(tally, scratch, whole)
    in_order(tally, scratch)


def no_space(tally: Tally, scratch: Path, whole: dict[str, str], small: bool) -> None:
    """A write that the kernel refuses half-way, at many sizes; with room again the run goes on to the same result."""
    sizes = [300, 20_000] if small else [0, 100, 300, 700, 1000, 2000, 3000, 5000, *range(10_000, 200_000, 10_000)]
    for size in sizes:
        out, log = scratch / f"full{size}", scratch / f"full{size}.log"
        code = finish(start([*WORDS, "--out", str(out)], log, limit_files, size, str(log)))
        while not Path(f"{log}.whole").exists():
            time.sleep(0.01)
        if code == 0:
            continue  # it all fitted
        problem = refusal(code, log, "cannot be written: ") or complete(resumed([*WORDS, "--out", str(out)], out), log)
        tally.check(
            "no space in the middle of a write: one line, then resumed to the same", problem or different(out, whole)
        )


def limit_files(size: int, log: str) -> None:
    """No file of this process may grow beyond `size`, but for its log: another process writes that."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)
        with open(log, "wb", buffering=0) as file:
            while chunk := os.read(reader, 4096):
                file.write(chunk)
        Path(f"{log}.whole").touch()
        os._exit(0)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


SCRIPT = """
mount -t tmpfs -o size=$1 none "$2" && folder=$2 && python=$3 && shift 3 || exit 77
fedman() { "$python" -c 'from fedman.cli.commands import main; main()' "$@"; }
fedman "$@"; code=$?
mount -o remount,size=100m "$folder" || exit 77
resume=; [ -e "$folder/run/config.toml" ] && resume=--resume
fedman "$@" $resume && cp -r "$folder/run" "$folder.copy" && exit $code
"""


def small_disk(tally: Tally, scratch: Path, whole: dict[str, str]) -> None:
    """A file system of a few hundred KB; made larger afterwards."""
    what = "a file system that is full (tmpfs): one line, then resumed to the same"
    own = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], capture_output=True).returncode:
        tally.note(what, "not tried: no right to mount here")
        return
    for size in ("60k", "200k", "400k"):
        out, log = scratch / f"disk{size}", scratch / f"disk{size}.log"
        out.mkdir()
        words = [*WORDS, "--out", str(out / "run")]
        with open(log, "w") as file:
            code = subprocess.run(
                [*own, "sh", "-c", SCRIPT, "sh", size, out, sys.executable, *words],
                stdout=file, stderr=file,
            ).returncode  # fmt: skip
        lines = [line for line in log.read_text().splitlines() if "error: " in line]
        problem = None if code == 2 and len(lines) == 1 else f"{size}: exit {code}: {log.read_text()[-300:]}"
        if not problem and not any(words in lines[0] for words in ("No space left on device", "free on this disk")):
            problem = f"{size}: {lines[0]}"
        tally.check(what, problem or different(Path(f"{out}.copy"), whole))


def read_only(tally: Tally, scratch: Path) -> None:
    """A folder without the right to write, at the start of a run and when it goes on."""
    what, denied = "a read-only folder: one line, nothing changed", "Permission denied"
    closed, log = scratch / "closed", scratch / "closed.log"
    closed.mkdir()
    closed.chmod(0o555)
    code = finish(start([*WORDS, "--out", str(closed / "run")], log, heed_permissions))
    tally.check(what, refusal(code, log, f"cannot be written: {denied}") or changed({}, closed))
    stopped = a_stopped_run(scratch, "locked")
    before = contents(stopped)
    stopped.chmod(0o555)
    for lock, says in ((0o444, f"cannot be written: {denied}"), (0o644, f"cannot be written: {denied}")):
        (stopped / ".lock").chmod(lock)
        code = finish(start([*WORDS, "--out", str(stopped), "--resume"], log, heed_permissions))
        tally.check(what, refusal(code, log, says) or changed(before, stopped))


def heed_permissions() -> None:
    """Root may write everywhere, unless it gives up that capability (CAP_DAC_OVERRIDE, number 1)."""
    libc = ctypes.CDLL(None)
    header, capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, capabilities)
    capabilities[0] &= ~(1 << 1)
    libc.capset(header, capabilities)


def deleted(tally: Tally, scratch: Path) -> None:
    """The folder goes away while the run writes to it: the run ends with one line and does not bring it back."""
    out, log = scratch / "deleted", scratch / "deleted.log"
    process = start([*words_with("rounds=200"), "--out", str(out)], log)
    wait_until(process, lambda: rounds_done(out) >= 2)
    os.rename(out, scratch / "elsewhere")
    shutil.rmtree(scratch / "elsewhere", ignore_errors=True)
    problem = refusal(finish(process), log, "cannot be written: ")  # or File exists, in the middle of a mkdir
    tally.check("the folder deleted under the run: one line", problem or ("made anew" if out.exists() else None))


def a_stopped_run(scratch: Path, name: str) -> Path:
    """A folder whose run was killed as it began to write its fifth checkpoint."""
    out, log = scratch / name, scratch / f"{name}.log"
    code = finish(start([*WORDS, "--out", str(out)], log, die_before, "round-000005", str(out)))
    if code != -signal.SIGKILL:
        raise RuntimeError(f"exit {code}: {tail(log)}")
    return out


def die_before(name: str, out: str) -> None:
    """Kill this process in its first operation on a file of this name."""

    def operation(event: str, path: str) -> None:
        if name in path:
            os.kill(os.getpid(), signal.SIGKILL)

    on_operations(out, operation)


def checkpoints(tally: Tally, scratch: Path, whole: dict[str, str], small: bool) -> None:
    """Damaged, foreign and early checkpoints: the one before is used, or all is refused by name and left as it is."""
    rng = random.Random(0)
    stopped = a_stopped_run(scratch, "stopped")
    description, tensors = (sorted(stopped.glob(f"checkpoint/*.{end}"))[-1] for end in ("json", "safetensors"))
    rows = stopped / "checkpoint" / "clients.rows"
    few = 2 if small else 30

    def flip(path: Path) -> Callable[[Path], None]:
        place, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        return spoilt(path, lambda content: content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])

    def cut(path: Path) -> Callable[[Path], None]:
        place = rng.randrange(path.stat().st_size)
        return spoilt(path, lambda content: content[:place])

    def spoilt(path: Path, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        inside = path.relative_to(stopped)
        return lambda run: (run / inside).write_bytes(change((run / inside).read_bytes())) and None

    def field(**values: object) -> Callable[[bytes], bytes]:
        return lambda content: json.dumps({**json.loads(content), **values}).encode()

    tries = [("checkpoint: bits flipped", flip(path)) for path in (description, tensors, rows) for _ in range(few)]
    tries += [("checkpoint: truncated", cut(path)) for path in (description, tensors, rows) for _ in range(few // 2)]
    tries += [("checkpoint: of another format", spoilt(description, field(format=f))) for f in (1, 2, 4, "3", None, [])]
    tries += [("checkpoint: edited by hand", spoilt(description, field(**{k: v}))) for k, v in EDITS.items()]
    for n in (0, 1, 500):
        early = spoilt(stopped / "rounds.jsonl", lambda content, n=n: content[:n])  # type: ignore[misc]
        tries.append(("checkpoint: newer than the records", early))
    for i, (what, spoil) in enumerate(tries[::2] if small else tries):
        run, log = scratch / f"damaged{i}", scratch / f"damaged{i}.log"
        shutil.copytree(stopped, run)
        spoil(run)
        tally.check(what, sound_or_refused(run, log, WORDS, whole))
        shutil.rmtree(run)
    for word in ("lr=0.05",) if small else ("lr=0.05", "seed=1", "algorithm=feddyn", "clients=9", "precision=fp64"):
        problem = sound_or_refused(stopped, scratch / "other.log", words_with(word), None)
        tally.check("checkpoint: of another configuration refused", problem)


EDITS = {"round": 2, "seen": [], "seconds": "x", "data": "0" * 64, "config": {}, "sha256": None, "version": 1}


def words_with(word: str) -> list[str]:
    """The command with one key changed."""
    key = word.partition("=")[0] + "="
    return [w for w in WORDS if not w.startswith(key)] + [word]


def sound_or_refused(run: Path, log: Path, words: list[str], whole: dict[str, str] | None) -> str | None:
    """Resume: the uninterrupted run's result, or a refusal that names a file and changes none."""
    before = contents(run)
    code = finish(start([*words, "--out", str(run), "--resume"], log))
    if code == 0:
        return different(run, whole) if whole else "was not refused"
    return refusal(code, log, str(run)) or changed(before, run)


def two_at_once(tally: Tally, scratch: Path, whole: dict[str, str]) -> None:
    """The second run into a folder is refused; the first, which waits in a checkpoint meanwhile, does not notice."""
    out, log, over = scratch / "shared", scratch / "shared.log", scratch / "over"
    first = start([*WORDS, "--out", str(out)], scratch / "first.log", wait_before, "round-000002", str(out), str(over))
    wait_until(first, lambda: rounds_done(out) >= 2)
    code = finish(start([*WORDS, "--out", str(out), "--resume"], log))
    over.touch()
    problem = refusal(code, log, "another run is writing to this folder")
    problem = problem or (None if finish(first) == 0 else "the first run failed") or different(out, whole)
    tally.check("two runs into one folder: the second refused", problem)


def wait_before(name: str, out: str, over: str) -> None:
    """Wait in every operation on a file of this name until there is a file `over`."""

    def operation(event: str, path: str) -> None:
        while name in path and not os.path.exists(over):
            time.sleep(0.01)

    on_operations(out, operation)


def in_order(tally: Tally, scratch: Path) -> None:
    """Every file that takes its place has been synced before, and its folder after."""
    log = scratch / "order.log"
    problem = None if finish(start([*WORDS, "--out", str(scratch / "order")], log, note_order)) == 0 else "failed"
    renames = [line for line in log.read_text().splitlines() if line.startswith("renamed ")]
    for line in renames:
        tally.check(
            "written beside, synced, renamed, folder synced", problem or (None if line.endswith("ok") else line)
        )


def note_order() -> None:
    """Print for each rename whether the file was synced before it and the folder right after it."""
    synced: set[int] = set()
    pending: list[tuple[str, int, bool]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file: int) -> None:
        fsync(file)
        inode = os.fstat(file).st_ino
        synced.add(inode)
        for name, folder, before in pending:
            print(f"renamed {name} {'ok' if before and folder == inode else 'not synced'}", flush=True)
        pending.clear()

    def noted_replace(source: Path, target: Path) -> None:
        inode = os.stat(source).st_ino
        replace(source, target)
        pending.append((Path(target).name, os.stat(Path(target).parent).st_ino, inode in synced))

    os.fsync, os.replace = noted_fsync, noted_replace  # type: ignore[assignment]


def contents(run: Path) -> dict[Path, bytes]:
    """All files of a run but its lock."""
    return {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file() and p.name != ".lock"}


def changed(before: dict[Path, bytes], run: Path) -> str | None:
    """What a refusal has changed."""
    after = contents(run)
    names = sorted(p.name for p in {*before, *after} if before.get(p) != after.get(p))
    return f"refused, but changed {', '.join(names)}" if names else None
