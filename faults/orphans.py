"""Processes that are left after every kind of end of a federation's parts, with real Flower on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults.federation import CLIENTS, Stage, federation
from faults.tally import ROOT, Tally
from fedman.flower import superexec
from tests.flower.deployment import descendants

SOON = 30.0  # seconds in which processes end with the one they belong to
LATER = superexec.PATIENCE + 40.0  # seconds in which a SuperExec gives up, and its last retry's pause


def run(tally: Tally, scratch: Path, small: bool) -> None:
    if small:
        few(tally)
        return
    with federation(scratch / "superexecs") as stage:
        at_work(stage)
        trees = {name: tree(stage, f"{name}-superexec") for name in ("node0", "node1", "node2", "superlink")}
        ends = {"node0": signal.SIGTERM, "node1": signal.SIGINT, "node2": signal.SIGKILL, "superlink": signal.SIGHUP}
        for name, how in ends.items():
            stage.deployment.processes[f"{name}-superexec"].send_signal(how)
        for name, how in ends.items():
            gone(tally, f"a SuperExec ended by {how.name}: it, its server and its apps", trees[name], SOON)
    for what in ("SuperNode", "SuperLink"):
        with federation(scratch / what) as stage:
            at_work(stage)
            name = "superlink" if what == "SuperLink" else "node0"
            pids = tree(stage, f"{name}-superexec")
            stage.deployment.processes[name].kill()
            gone(tally, f"{what} killed: its SuperExec and the apps", pids, LATER)
    for how in (signal.SIGTERM, signal.SIGKILL):
        with federation(scratch / how.name) as stage:
            at_work(stage)
            pids = stage.deployment.pids()
            for process in stage.deployment.processes.values():
                process.send_signal(how)
            gone(tally, f"every command ended by {how.name}: all processes", pids, SOON)
    with federation(scratch / "apps") as stage:
        at_work(stage, 10)
        stage.deployment.kill_apps("superlink")
        apps = [pid for k in range(CLIENTS) for pid in tree(stage, f"node{k}-superexec")[3:]]
        gone(tally, "ServerApp killed: the clients' apps, after their work", apps, SOON)
        number = at_work(stage, 10)
        stage.deployment.flwr("stop", number, "here")
        apps = [pid for name in stage.deployment.processes for pid in tree(stage, name)[3:] if "superexec" in name]
        gone(tally, "flwr stop: all apps", apps, SOON)


def at_work(stage: Stage, seconds: float = 300) -> str:
    """Start a run whose clients are all at work, for so many seconds; its id."""
    for k in range(CLIENTS):
        stage.tell(k, f"sleep {seconds}")
    number, _ = stage.submit("algorithm=feddc rounds=3 round_timeout=300")
    end, idle = time.monotonic() + 120, time.monotonic()
    while time.monotonic() < min(end, idle + 3):  # queries are answered in less than three seconds
        if any(len(tree(stage, f"node{k}-superexec")) < 4 for k in range(CLIENTS)):
            idle = time.monotonic()  # a SuperExec has a resource tracker, the server that forks, and the app
        time.sleep(0.2)
    return number


def tree(stage: Stage, name: str) -> list[int]:
    """A process and all below it."""
    pid = stage.deployment.processes[name].pid
    return [pid, *descendants(pid)]


def gone(tally: Tally, what: str, pids: list[int], seconds: float) -> None:
    """Check that all these processes end in time."""
    started = time.monotonic()
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > started + seconds:
            break
        time.sleep(0.2)
    shown = ", ".join(f"{pid} {command(pid)}" for pid in left)
    tally.check(what, f"{len(left)} of {len(pids)} are left after {seconds:.0f} s: {shown}" if left else None)
    tally.note(what, f"{len(pids)} processes, {time.monotonic() - started:.0f} s")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[-80:]
    except OSError:
        return ""


def few(tally: Tally) -> None:
    """A SuperExec's app after the SuperExec was killed, for the tests."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environment) as process:
        end = time.monotonic() + 300
        while len(pids := [process.pid, *descendants(process.pid)]) < 4 and time.monotonic() < end:
            time.sleep(0.1)
        tally.check("the app is there", None if len(pids) == 4 else f"{len(pids)} processes")
        process.kill()
        gone(tally, "a SuperExec killed: it, its server and its app", pids, LATER)  # it may be importing still


PARENT = """
import functools, multiprocessing, time
from fedman.flower import superexec
app = functools.partial(time.sleep, 600)
multiprocessing.get_context("forkserver").Process(target=superexec._run_app, args=[app]).start()
time.sleep(600)
"""
