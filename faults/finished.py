"""Finished and stopped runs whose files are damaged at random: every command tells, or its figures are the same."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from faults.runs import SMALL, complete, fingerprint, finish, on_operations, sha256, start
from faults.tally import Tally

TRIES = 500
WORDS = ["run", *SMALL, "algorithm=feddyn", "rounds=4", "checkpoint_seconds=0", "--device", "cpu"]
FLATNESS = ("--samples", "10", "--top", "1", "--tol", "0.1", "--device", "cpu")
NAMES = ("plain", "man", "stopped")


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Damage one file of a folder of runs at random, then use the folder; over and over."""
    whole, work, rng = scratch / "whole", scratch / "work", random.Random(0)
    commands = {name: use for name, use in COMMANDS.items() if not small or name not in SLOW}
    prepare(whole, scratch, measured="flatness" in commands)
    spoilt = scratch / "spoilt"
    sound = {}
    for command, use in commands.items():
        renew(spoilt, whole)
        told, sound[command] = use(spoilt, work, scratch)
        if told:
            raise RuntimeError(f"{command}: {sound[command]}")
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.name != ".lock")
    tried = 0
    while tried < (6 if small else TRIES):
        command = list(commands)[tried % len(commands)]
        file, how = rng.choice(files), rng.choice(list(DAMAGE))
        renew(spoilt, whole)
        before = (spoilt / file).read_bytes()
        DAMAGE[how](spoilt / file, rng)
        if (spoilt / file).is_file() and (spoilt / file).read_bytes() == before:
            continue  # such as a file that no other run has
        tried += 1
        told, said = commands[command](spoilt, work, scratch)
        held = told and "internal error" not in said and "Traceback" not in said
        problem = (
            None if held or said == sound[command] else f"{file} {how}: {said[-300:] if told else 'other figures'}"
        )
        tally.check(f"{command}, a file damaged: told, or the same figures", problem)


def prepare(whole: Path, scratch: Path, measured: bool) -> None:
    """Two finished runs, which may be measured, a stopped one, and a results file of the first two."""
    log = scratch / "log"
    for name, zeta in (("plain", "0"), ("man", "0.15")):
        words = [*WORDS, f"zeta={zeta}", "--out", str(whole / name)]
        told, text = told_by(words, scratch)  # on one thread as later, since a summary says how many there were
        if told:
            raise RuntimeError(text)
        if measured:
            told, text = told_by(["flatness", str(whole / name), *FLATNESS], scratch)
            if told:
                raise RuntimeError(text)
    if problem := complete(["results", str(whole), "--out", str(whole / "all.jsonl")], log):
        raise RuntimeError(problem)
    stopped = whole / "stopped"
    finish(start([*WORDS, "seed=1", "--out", str(stopped)], log, die_before_the_end, str(stopped)))
    if not (stopped / "config.toml").exists() or (stopped / "summary.json").exists():
        raise RuntimeError("the run was not stopped before its end")


def die_before_the_end(out: str) -> None:
    """End this process as it begins to write its models."""
    on_operations(out, lambda event, path: os._exit(9) if "model.safetensors" in path else None)


Said = tuple[bool, str]
"""Whether a command told that something is wrong, and its figures or what it told."""


def told_by(words: list[str], scratch: Path) -> tuple[bool, str]:
    """Run a command; whether it ended with one line of error, or said that something was not checked."""
    log = scratch / "log"
    code = finish(start(words, log, torch.set_num_threads, 1))
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("fedman: error: ")]
    if code == 0:
        return "not checked" in text or "damaged" in text, text
    return True, lines[-1] if code == 2 and len(lines) == 1 else f"Traceback or exit {code}: {text[-400:]}"


def report(runs: Path, work: Path, scratch: Path) -> Said:
    """The page, and each figure and table beside it."""
    fresh(work)
    told, text = told_by(["report", str(runs), "--out", str(work / "page.html")], scratch)
    return told, text if told else hashes(work)


def results(runs: Path, work: Path, scratch: Path) -> Said:
    """The rows, and the measurements beside them."""
    fresh(work)
    words = ["results", str(runs), "--out", str(work / "rows.jsonl")]
    words += ["--flatness", str(work / "flatness")] if list(runs.rglob("flatness.json")) else []
    told, text = told_by(words, scratch)
    return told, text if told else hashes(work)


def merge(runs: Path, work: Path, scratch: Path) -> Said:
    """The figures of the merged runs."""
    fresh(work)
    told, text = told_by(["sweep", "--merge", str(runs), "--out", str(work / "all")], scratch)
    return told, text if told else json.dumps([fingerprint(work / "all" / name) for name in NAMES[:2]])


def flatness(runs: Path, work: Path, scratch: Path) -> Said:
    """The eigenvalue and the loss of both finished runs."""
    told, text = told_by(["flatness", *(str(runs / name) for name in NAMES[:2]), *FLATNESS], scratch)
    if told:
        return told, text
    models = [json.loads((runs / name / "flatness.json").read_bytes())["models"]["all"] for name in NAMES[:2]]
    return told, json.dumps([(m["top"]["values"], m["loss"]["value"]) for m in models])


def resume(runs: Path, work: Path, scratch: Path) -> Said:
    """What resuming each of the runs prints and leaves."""
    said = []
    for name in NAMES:
        told, text = told_by(["run", "--out", str(runs / name), "--resume"], scratch)
        if told:
            return told, text
        said.append((re.findall(r"all [\d.]+ %.*?;", text), fingerprint(runs / name)))
    return False, json.dumps(said)


COMMANDS: dict[str, Callable[[Path, Path, Path], Said]] = {
    "report": report, "results": results, "merge": merge, "flatness": flatness, "resume": resume,
}  # fmt: skip


def renew(folder: Path, whole: Path) -> None:
    """The undamaged runs in the same place as before."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)


SLOW = ("report", "flatness")


def fresh(folder: Path) -> None:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def hashes(folder: Path) -> str:
    """The contents of a folder in short."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return json.dumps({str(path.relative_to(folder)): sha256(path.read_bytes()) for path in files})


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def digit(path: Path, rng: random.Random) -> None:
    """Another digit in the place of one: still JSON or TOML."""
    content = bytearray(path.read_bytes())
    places = [i for i, c in enumerate(content) if chr(c).isdigit()]
    if places:
        place = rng.choice(places)
        content[place] = ord("0") + (content[place] - ord("0") + rng.randint(1, 9)) % 10
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])


def zero(path: Path, rng: random.Random) -> None:
    """A block that never reached the disk."""
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content) + 1)
    content[place : place + 512] = bytes(len(content[place : place + 512]))
    path.write_bytes(content)


def lose_a_line(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        del lines[rng.randrange(len(lines))]
    path.write_bytes(b"".join(lines))


def repeat_a_line(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    path.write_bytes(b"".join(lines))


def exchange(path: Path, rng: random.Random) -> None:
    """The file of the same name of another run."""
    others = [other for other in path.parents[1].rglob(path.name) if other != path]
    if others:
        path.write_bytes(rng.choice(others).read_bytes())


def make_a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "with a flipped bit": flip,
    "with another digit": digit,
    "cut": cut,
    "emptied": lambda path, rng: path.write_bytes(b""),
    "with a block of zeros": zero,
    "with more at its end": lambda path, rng: path.write_bytes(path.read_bytes() + rng.randbytes(9)),
    "without a line": lose_a_line,
    "with a line twice": repeat_a_line,
    "of another run": exchange,
    "deleted": lambda path, rng: path.unlink(),
    "a folder": make_a_folder,
}
