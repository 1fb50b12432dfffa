"""Symbolic links in the place of a command's files: what they lead to stays as it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from faults.runs import SMALL, complete, finish, start
from faults.tally import Tally

WORDS = ["run", *SMALL, "rounds=2", "checkpoint_seconds=0", "--device", "cpu"]
PRECIOUS = "precious"
FILES = (".lock", "config.toml", "rounds.jsonl", "summary.json", "diverged.json", "model.safetensors", "manifest.json")
STAGED = ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors", "manifest.json")


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Every name that a command writes, as a link to a file or a folder of somebody else."""
    runs = scratch / "runs"
    for name in ("a", "b"):
        if problem := complete([*WORDS, f"seed={ord(name)}", "--out", str(runs / name)], scratch / "log"):
            raise RuntimeError(problem)
    tries = list(links())
    for number, (what, place, words) in enumerate(tries[::9] if small else tries):
        work = scratch / f"try{number}"
        victim = work / "victim"
        shutil.copytree(runs, work / "runs")
        (victim / "figures").mkdir(parents=True)
        (victim / "tables").mkdir()
        for name in ("file", "round-000001.json", "my-round-notes.txt"):
            (victim / name).write_text(PRECIOUS)
        tally.check(f"{what}: what it leads to is as before", problem_of(work, victim, place, words))


def links() -> Iterator[tuple[str, str, list[str]]]:
    """(what, the link's place, the command's words); {pid} in a place is the number of the process."""
    new, old = [*WORDS, "--out", "runs/new"], ["run", "--out", "runs/a", "--resume", "rounds=3"]
    for name in FILES:
        yield "a link in a new run's folder", f"runs/new/{name}", new
        yield "a link in a run that goes on", f"runs/a/{name}", old
        yield "a link in a run that is merged", f"runs/a/{name}", ["sweep", "--merge", "runs", "--out", "all"]
    for name in STAGED:
        yield "a link where a file is prepared", f"runs/new/.{name}.{{pid}}", new
    yield "a link for the checkpoints", "runs/new/checkpoint/", new
    yield "a link for the checkpoints", "runs/a/checkpoint/", old
    for name in ("round-000001.json", "round-000001.safetensors", ".round-000001.json.{pid}", "clients.rows"):
        yield "a link among the checkpoints", f"runs/new/checkpoint/{name}", new
    report = ["report", "runs", "--out", "page.html"]
    for place in ("page.html", "page_files/", "page_files/figures/", "page_files/tables/"):
        yield "a link in the place of a report", place, report
    for name in ("tables/summary.md", "tables/all-runs.csv", "tables/.summary.md.{pid}"):
        yield "a link in the place of a report", f"page_files/{name}", report
    results = ["results", "runs", "--out", "rows.jsonl"]
    for place in ("rows.jsonl", ".rows.jsonl.{pid}"):
        yield "a link in the place of results", place, results
    measured = ["flatness", "runs/a", "--samples", "10", "--top", "2", "--tol", "0.1", "--device", "cpu"]
    for name in ("flatness.json", ".flatness.json.{pid}", "flatness-top.png", "flatness-top.svg"):
        yield "a link in the place of a measurement", f"runs/a/{name}", measured
    yield "a link where runs are merged", "all/a/", ["sweep", "--merge", "runs", "--out", "all"]


def problem_of(work: Path, victim: Path, place: str, words: list[str]) -> str | None:
    """None if the command neither changes what the link leads to nor ends in a traceback."""
    before = contents(victim)
    log = work / "log"
    code = finish(start(words, log, put_link, str(work), place, str(victim)))
    text = log.read_text(errors="replace")
    if code not in (0, 2) or "Traceback" in text or "internal error" in text:
        return f"{place}: exit {code}: {text[-300:]}"
    after = contents(victim)
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return f"{place}: {', '.join(changed)} changed or copied" if changed or copied(work, victim) else None


def put_link(work: str, place: str, victim: str) -> None:
    """In the process itself, whose number is known now: go to its folder and put the link into its place."""
    os.chdir(work)
    link = Path(place.format(pid=os.getpid()))
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() or link.is_file():
        link.unlink()
    elif link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(victim if place.endswith("/") else Path(victim) / "file")


def contents(folder: Path) -> dict[str, str]:
    """What lies in a folder."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def copied(work: Path, victim: Path) -> bool:
    """Whether what the link leads to was copied somewhere."""
    found = (path for path in work.rglob("*") if path.is_file() and not path.is_symlink())
    return any(path.read_bytes() == PRECIOUS.encode() for path in found if not path.is_relative_to(victim))
