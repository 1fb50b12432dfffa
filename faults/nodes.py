"""Nodes that never answer, that claim to be another's client, or that are killed, with real Flower on loopback."""

from __future__ import annotations

import time
from pathlib import Path

from faults.federation import CLIENTS, LIAR, SETTINGS, Stage, federation, problem
from faults.tally import Tally
from fedman.config import resolve
from fedman.flower.app import new_project
from fedman.flower.server import serve
from fedman.flower.server_options import ServerOptions
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import overrides
from tests.flower.deployment import Deployment
from tests.flower.local_grid import LocalGrid

EVERYONE = [range(CLIENTS)] * 3
WORDS = "algorithm=feddc rounds=3"
PATIENT = f"{WORDS} retries=5 quorum=1 round_timeout=20 bind_keys=false"
CLAIM = "claims to be client 2, whose key is SHA256:"
MOST = 20.0  # seconds by which mute nodes may delay a run


def run(tally: Tally, scratch: Path, small: bool) -> None:
    if small:
        few(tally, scratch)
        return
    with federation(scratch / "mute") as stage:
        mute(tally, stage)
        second_claimant(tally, stage)
    with federation(scratch / "replaced") as stage:
        in_the_owners_place(tally, stage)
    with federation(scratch / "announced") as stage:
        announced(tally, stage)
    roster(tally, scratch / "roster")
    for what, play in KILLED.items():
        with federation(scratch / play.__name__) as stage:
            tally.check(f"{what}: the same bits", problem(play(stage), WORDS, EVERYONE))


def mute(tally: Tally, stage: Stage) -> None:
    """A run with two nodes that never answer, against one without; the first run of all warms up."""
    seconds = []
    for number in range(3):
        if number == 2:
            for name in ("mute0", "mute1"):
                stage.deployment.start_node(name, "partition-id=1", mute=True)
        started = time.monotonic()
        out = stage.finish(WORDS)
        seconds.append(time.monotonic() - started)
        if number == 2:
            tally.check("nodes that never answer: the same bits", problem(out, WORDS, EVERYONE))
    _, without, with_them = seconds
    what = f"nodes that never answer delay a run by less than {MOST:g} s"
    tally.check(what, None if with_them < without + MOST else f"{with_them:.0f} s instead of {without:.0f} s")
    tally.note(what, f"{with_them:.1f} s with two of them, {without:.1f} s without")


def announced(tally: Tally, stage: Stage) -> None:
    """A reply that is announced at once and uploaded long after its time: it delays no round, and no other reply."""
    words, timeout = WORDS.replace("rounds=3", "rounds=4"), 20
    stage.tell(0, f"1 announce {3 * timeout}")  # the first that is asked for
    out = stage.finish(f"{words} retries=0 round_timeout={timeout}")
    records = RunFolder(out).read_rounds()
    cohorts = [[k for k in record["cohort"] if k not in record["quarantined"]] for record in records]
    what = "a reply that is announced and comes too late"
    tally.check(f"{what}: the model as without it", problem(out, words, cohorts))
    without = [t for t, cohort in enumerate(cohorts) if cohort != [*range(CLIENTS)]]
    others = all({1, 2, 3} <= {*cohort} for cohort in cohorts)
    tally.check(f"{what}: no other is refused", None if others and 1 in without else f"the clients are {cohorts}")
    longest = max(record["seconds"] for record in records)
    tally.check(f"{what}: no round is longer", None if longest < timeout + 5 else f"{longest:.0f} s")


def second_claimant(tally: Tally, stage: Stage) -> None:
    """A node that claims another's number after the first round is refused and named."""
    words = WORDS.replace("rounds=3", "rounds=12")
    number, out = stage.submit(words)
    stage.until_round(out, 1)
    stage.deployment.start_node("intruder", stage.config(2))
    stage.deployment.wait(number)
    tally.check("a second node of a client: the same bits", problem(out, words, [range(CLIENTS)] * 12))
    tally.check("a second node of a client is refused and named", unnamed(out))


def in_the_owners_place(tally: Tally, stage: Stage) -> None:
    """The owner of a number is killed and another node claims it: the run goes on without this client."""
    words = WORDS.replace("rounds=3", "rounds=8")
    number, out = stage.submit(f"{words} retries=0 round_timeout=15")
    stage.until_round(out, 1)
    stage.deployment.kill("node2")
    stage.deployment.start_node("intruder", stage.config(2))
    stage.deployment.wait(number)
    records = RunFolder(out).read_rounds()
    cohorts = [[k for k in record["cohort"] if k not in record["quarantined"]] for record in records]
    what = "a node in the place of a killed one"
    tally.check(f"{what}: the model as without it", problem(out, words, cohorts))
    tally.check(f"{what} is refused and named", unnamed(out))
    late = [cohort for cohort in cohorts[3:] if 2 in cohort]
    tally.check(f"{what} has no influence", f"client 2 is in {late}" if late or len(cohorts) < 8 else None)


def unnamed(out: Path) -> str | None:
    """None if a record names a node that was refused as client 2."""
    refused = [f"{who}: {why}" for record in RunFolder(out).read_rounds() for who, why in record["refused"].items()]
    found = [line for line in refused if line.startswith("node ") and CLAIM in line]
    return None if found else f"refused are {refused}"


def roster(tally: Tally, folder: Path) -> None:
    """With TLS and a roster, a node that comes first with a registered key of its own cannot be another's client."""
    from tests.flower.test_tls import bash, make_keys

    folder.mkdir()
    keys = make_keys(folder)
    bash("ssh-keygen -q -t ecdsa -b 384 -N '' -f west", keys)
    lines = [f"{k} {(keys / name).with_suffix('.pub').read_text()}" for k, name in enumerate(("north", "south"))]
    (folder / "roster").write_text("".join(lines))
    new_project(folder / "app")
    with Deployment(folder / "net", certificates=keys, env={"FEDMAN_MEMORY": str(folder / "memory")}) as net:
        for name in ("north", "south", "west"):
            net.flwr("supernode", "register", str(keys / f"{name}.pub"), "here")
        net.start_node("west", "partition-id=0")
        number = net.submit(
            folder / "app",
            f'settings="dataset=digits clients=2 participation=1 rounds=2 roster={folder}/roster" out="{folder}/out"',
        )
        time.sleep(15)  # the intruder has had its chance
        net.start_nodes({"north": "partition-id=0", "south": "partition-id=1"})
        ended = net.wait(number)
    what = "a registered node that is not in the roster is refused and named"
    if not ended.completed:
        tally.check(what, ended.details)
        return
    refused = [record["refused"] for record in RunFolder(folder / "out").read_rounds()]
    reasons = [why for why in refused[0].values() if "is not in the roster" in why]
    tally.check(what, None if len(reasons) == 1 and not refused[1] else f"refused are {refused}")


def node_killed(stage: Stage) -> Path:
    """A node is killed while it works on round 2, and restarted at once."""
    number, out = stage.submit(PATIENT)
    stage.until_round(out, 1)
    stage.tell(LIAR, "sleep 30")
    time.sleep(5)
    stage.deployment.kill(f"node{LIAR}")
    stage.tell(LIAR, "")
    stage.start(LIAR)
    stage.deployment.wait(number)
    return out


def server_killed(stage: Stage) -> Path:
    """The ServerApp is killed after a round and resumed."""
    _, out = stage.submit(PATIENT)
    stage.until_round(out, 1)
    stage.deployment.kill_apps("superlink")
    return stage.finish(PATIENT, out)


def run_stopped(stage: Stage) -> Path:
    """The run is stopped by `flwr stop` after a round, and resumed once its app has ended."""
    number, out = stage.submit(PATIENT)
    stage.until_round(out, 1)
    stage.deployment.flwr("stop", number, "here")
    time.sleep(10)
    return stage.finish(PATIENT, out)


def superlink_killed(stage: Stage) -> Path:
    """The SuperLink is killed after round 1 with its ServerApp and restarted, and the run resumed."""
    _, out = stage.submit(PATIENT)
    stage.until_round(out, 1)
    stage.deployment.kill("superlink")
    stage.deployment.start_superlink()
    for k in range(CLIENTS):  # what a service manager does
        stage.deployment.kill(f"node{k}")
        stage.start(k)
    return stage.finish(PATIENT, out)


KILLED = {
    "SuperNode killed at work and restarted": node_killed,
    "ServerApp killed, resumed": server_killed,
    "run stopped by flwr stop, resumed": run_stopped,
    "SuperLink killed, resumed": superlink_killed,
}


def few(tally: Tally, scratch: Path) -> None:
    """Mute nodes and a second claimant within this process, for the tests."""
    grid = LocalGrid.of(CLIENTS, scratch / "memory")
    grid.keys = {node: str(node).encode() for node in (*grid.nodes, 50)}
    grid.nodes |= {7: {"partition-id": 2}, 8: {"partition-id": 2}}

    def alter(order, reply):
        if order.metadata.dst_node_id in (7, 8):
            return None
        if order.metadata.message_type == "train" and order.content.config_records["round"]["round"] == 0:
            grid.nodes[50] = dict(grid.nodes[102])
        return reply

    grid.alter = alter
    config = resolve(overrides(f"{SETTINGS} {WORDS}".split()))
    started = time.monotonic()
    serve(grid, config, ServerOptions(), out=scratch / "run", device="cpu")
    seconds = time.monotonic() - started
    tally.check("mute nodes and a second claimant: the same bits", problem(scratch / "run", WORDS, EVERYONE))
    tally.check("a second node of a client is refused and named", unnamed(scratch / "run"))
    tally.check("nobody waits for mute nodes", f"{seconds:.0f} s" if seconds > MOST else None)
