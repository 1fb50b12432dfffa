"""Hostile and late replies of clients, with real Flower on loopback, and the memory that giant ones take."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Mapping
from pathlib import Path

from faults.federation import CLIENTS, HONEST, LIAR, SETTINGS, Stage, federation, problem, simulated
from faults.tally import Tally
from fedman.config import resolve
from fedman.flower.server import serve
from fedman.flower.server_options import ServerOptions
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import overrides
from tests.flower.deployment import descendants
from tests.flower.hostile import ERRORS, GIANT, GIANTS, KINDS, planned, spoil
from tests.flower.local_grid import LocalGrid

ALGORITHMS = ("fedavg", "fedsam", "feddyn", "feddc", "scaffold")
HOSTILE = (*KINDS, *ERRORS)
LATE = 2  # the client that is honest, but late in some rounds
LATE_ROUNDS = range(2, 7)
LEAST_TIMEOUT, TOO_LONG = 8, 2  # seconds a client has for a round; by how much a late one exceeds them
LATE_REASONS = ("no reply within", "Flower says: Error: Message Unavailable")
MEMORY = 100  # MB by which a server may grow because of a giant reply


def run(tally: Tally, scratch: Path, small: bool) -> None:
    if small:
        few(tally, scratch)
        return
    with federation(scratch / "federation") as stage:
        timeout = pace(stage)
        for name in ALGORITHMS:
            hostile_and_late(tally, stage, name, timeout)
        all_but_one(tally, stage)
        unasked(tally, stage)
        giants(tally, stage)


def pace(stage: Stage) -> int:
    """Seconds that clients get for a round on this machine, however busy it is."""
    out = stage.finish("algorithm=scaffold rounds=4 retries=0 round_timeout=300")
    return max(LEAST_TIMEOUT, round(4 * max(record["seconds"] for record in RunFolder(out).read_rounds()[1:])))


def hostile_and_late(tally: Tally, stage: Stage, algorithm: str, timeout: int) -> None:
    """A run with one kind of hostile reply after the other, and an honest client that is late in some rounds."""
    rounds = len(HOSTILE) + 3
    stage.tell(LIAR, "\n".join(f"{t} {kind}" for t, kind in enumerate(HOSTILE, 1)))
    stage.tell(LATE, "\n".join(f"{t} sleep {timeout + TOO_LONG}" for t in LATE_ROUNDS))
    words = f"algorithm={algorithm} rounds={rounds}"
    out = stage.finish(f"{words} retries=0 round_timeout={timeout}")
    late = too_late(out)
    absent = {LIAR: range(1, len(HOSTILE) + 1)} | {k: late.get(k, set()) for k in HONEST}
    wrong = problem(out, words, without(rounds, absent), forgets=[LIAR])
    if not wrong and not {*LATE_ROUNDS} <= late.get(LATE, set()):
        wrong = f"client {LATE} was late in rounds {sorted(late.get(LATE, ()))} only"
    if not wrong and any(rounds - 1 in each for each in late.values()):
        wrong = f"not everybody is there in the last round; late were {late}"
    count = len(HOSTILE) + len(LATE_ROUNDS)
    what = "hostile or late replies: nobody honest locked out, the model as without them"
    failures = [f"{algorithm}: {wrong}"] if wrong else []
    tally.count(what, held=0 if wrong else count, tried=count, failures=failures)
    unasked = sum(len(each) for each in late.values()) - len(LATE_ROUNDS)
    tally.note(what, f"{tally.row(what).note} {algorithm}: {unasked} more were late".strip())
    for k in (LIAR, LATE):
        stage.tell(k, "")


def too_late(out: Path) -> dict[int, set[int]]:
    """By honest client the rounds in which its reply did not come in time, on request or on a busy machine."""
    late: dict[int, set[int]] = {}
    for t, record in enumerate(RunFolder(out).read_rounds()):
        for k in HONEST:
            if record["refused"].get(str(k), "").startswith(LATE_REASONS):
                late.setdefault(k, set()).add(t)
    return late


def without(rounds: int, absent: Mapping[int, Container[int]]) -> list[list[int]]:
    """The clients of every round, without some in some of them."""
    return [[k for k in range(CLIENTS) if t not in absent.get(k, ())] for t in range(rounds)]


def all_but_one(tally: Tally, stage: Stage) -> None:
    """Too few good replies end the run with its own error."""
    for k in (1, 2, 3):
        stage.tell(k, "NaN")
    out = stage.finish("rounds=2 retries=0 round_timeout=60")
    said = (out / "failed.json").read_text() if (out / "failed.json").exists() else "the run completed"
    tally.check("three of four replies NaN: exit 4", None if '"exit": 4' in said else said[:200])
    for k in (1, 2, 3):
        stage.tell(k, "")


def unasked(tally: Tally, stage: Stage) -> None:
    """A further node sends replies in other clients' names, which reply to nothing, and more parts than a reply has."""
    words = "algorithm=feddc rounds=5"
    stage.tell(LIAR, f"intrude 127.0.0.1:{stage.deployment.port}")
    out = stage.finish(f"{words} retries=0 round_timeout=60")
    what = "messages that reply to nothing"
    tally.check(f"{what}: nobody is refused, the model as without them", problem(out, words, [range(CLIENTS)] * 5))
    sent, wanted = stage.deployment.log("superlink").count("Push replies from node_id=1\n"), 5 * 2 * LIAR
    tally.check(f"{what} are sent", None if sent == wanted else f"{sent} of {wanted} were")
    stage.tell(LIAR, "")


def giants(tally: Tally, stage: Stage) -> None:
    """The memory of the ServerApp and of the SuperLink during runs with giant replies, against one without."""
    plain: dict[str, int] = {}
    for kind in ("", *GIANTS):
        stage.tell(LIAR, kind)
        words = "algorithm=feddc rounds=2"
        with Watch(stage) as watch:
            out = stage.finish(f"{words} retries=0 round_timeout=60")
        if not kind:
            plain = watch.peak
            continue
        what = f"{kind} of {GIANT // 2**20} MB"
        tally.check(f"{what}: refused", problem(out, words, [HONEST] * 2))
        reason = RunFolder(out).read_rounds()[0]["refused"].get(str(LIAR), "")
        tally.check(f"{what}: refused", None if "has more than" in reason else f"the reason is {reason!r}")
        grown = {name: (watch.peak[name] - plain[name]) / 2**20 for name in plain}
        limited = f"{what}: the server grows by less than {MEMORY} MB"
        tally.check(limited, None if grown["ServerApp"] < MEMORY else f"grew by {grown['ServerApp']:.0f} MB")
        tally.note(limited, f"{grown['ServerApp']:.0f} MB; the SuperLink, which stores it: {grown['SuperLink']:.0f} MB")
    stage.tell(LIAR, "")


class Watch:
    """The largest resident memory, in bytes, of the ServerApp and the SuperLink, sampled in a thread."""

    def __init__(self, stage: Stage) -> None:
        self.processes, self.peak = stage.deployment.processes, {"ServerApp": 0, "SuperLink": 0}
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        superlink, superexec = self.processes["superlink"].pid, self.processes["superlink-superexec"].pid
        while not self.done.is_set():
            pids = {"ServerApp": descendants(superexec), "SuperLink": [superlink]}
            for name, found in pids.items():
                self.peak[name] = max([self.peak[name], *map(resident, found)])
            time.sleep(0.05)


def resident(pid: int) -> int:
    """The memory of a process, in bytes."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def few(tally: Tally, scratch: Path) -> None:
    """Some of them within this process, for the tests."""
    kinds = dict(enumerate(("huge norm", "error", "loss 3e38", "forget", "garbage bytes"), 1))
    (scratch / "orders").write_text("\n".join(f"{t} {kind}" for t, kind in kinds.items()))
    words, rounds = "algorithm=feddc", 7
    grid = LocalGrid.of(CLIENTS, scratch / "memory")

    def alter(order, reply):
        if order.metadata.message_type != "train":
            return reply
        t, k = (order.content.config_records["round"][name] for name in ("round", "client"))
        kind = planned(scratch / "orders", t) if k == LIAR else ""
        if k == LATE and t in LATE_ROUNDS[:-1]:
            return None
        if kind in ERRORS:
            return type(reply)(ERRORS[kind], reply_to=order)
        return spoil(kind, reply) if kind else reply

    grid.alter = alter
    cohorts = without(rounds, {LIAR: kinds, LATE: LATE_ROUNDS[:-1]})
    config = resolve(overrides(f"{SETTINGS} {words} rounds={rounds}".split()))
    options = ServerOptions(retries=0, round_timeout=0.05, wait=5.0)
    serve(grid, config, options, out=scratch / "run", device="cpu")
    wrong = problem(scratch / "run", f"{words} rounds={rounds}", cohorts, forgets=[LIAR])
    tally.check("hostile or late replies within one process", wrong)
    other = simulated(f"{words} rounds={rounds}", [range(CLIENTS)] * rounds)
    same = all(bool((other[n] == v).all()) for n, v in RunFolder(scratch / "run").read_models()["cloud"].items())
    tally.check("the model with them is another", "the hostile replies made no difference" if same else None)
