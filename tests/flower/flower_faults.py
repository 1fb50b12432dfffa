"""Faults of a real federation on loopback, one after the other, and a table of the outcomes.

    python -m tests.flower.flower_faults              # all trials, about half an hour on two busy cores
    python -m tests.flower.flower_faults killed slow  # those whose names contain a word

Every trial starts a run with `flwr run` and waits for its end with a time limit. A trial succeeds if the run completes
with exactly the weights that the simulator computes from the honest clients that were connected, or if it ends with the
exit code stated for it. The exit code of the command is 1 if a trial fails.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fedman.config import overrides, resolve
from fedman.data import load
from fedman.flower.app import new_project
from fedman.runs.folder import RunFolder
from tests.federations import simulator
from tests.flower.deployment import SOURCE, Deployment, TimeLimit
from tests.flower.hostile import KINDS

CLIENTS, LIAR, ROUNDS = 4, 3, 3
LIMIT = 300.0  # seconds, for any trial
RUN = "dataset=digits model=mlp partition=dir0.3 unbalanced=0.3 participation=1 cohort=fixed algorithm=feddc zeta=0.05"
RUN += f" epochs=1 chunk=1 eval_every={ROUNDS} clients={CLIENTS} rounds={ROUNDS}"


@dataclass
class Trial:
    """One fault: what is done to a run, and how the run must end."""

    name: str
    play: Callable[[Stage], Path]  # returns the run's folder
    clients: tuple[int, ...] = tuple(range(CLIENTS))  # whose result it must be
    exit: int = 0
    options: str = "retries=0 round_timeout=60"
    alone: bool = True  # in a federation of its own


@dataclass
class Stage:
    """A trial in a federation of four nodes that can be made hostile."""

    deployment: Deployment
    trial: Trial

    def tell(self, client: int, what: str) -> None:
        """Set what the node does from now on: see `hostile`."""
        orders(self.deployment, client).write_text(what)

    def restart(self, client: int) -> None:
        """Start a killed node again."""
        self.deployment.start_node(*node(self.deployment, client), wait=False)

    def submit(self, resume: bool = False) -> tuple[str, Path]:
        """Start the run; its id and its folder."""
        out = self.deployment.folder / re.sub(r"\W+", "-", self.trial.name)
        config = f'settings="{RUN} {self.trial.options}" out="{out}" resume={str(resume).lower()}'
        return self.deployment.submit(self.deployment.folder.parent / "app", config), out

    def finish(self, resume: bool = False) -> Path:
        """Start or resume the run, and wait for its end."""
        number, out = self.submit(resume)
        self.deployment.wait(number, LIMIT)
        return out

    def until_round(self, out: Path, rounds: int) -> None:
        """Wait until a run has finished so many rounds."""
        end = time.monotonic() + LIMIT
        while len(RunFolder(out).read_rounds()) < rounds:
            if time.monotonic() > end:
                raise TimeLimit(f"{self.trial.name}: no round {rounds} in {LIMIT:.0f} s{self.deployment.logs()}")
            time.sleep(0.1)


def node(deployment: Deployment, client: int) -> tuple[str, str]:
    """A node's name and its node config."""
    return f"node{client}", f'partition-id={client} hostile="{orders(deployment, client)}"'


def orders(deployment: Deployment, client: int) -> Path:
    return deployment.folder / f"orders-{client}"


def hostile(kind: str, *clients: int) -> Callable[[Stage], Path]:
    """All replies of these clients are of this kind."""

    def play(stage: Stage) -> Path:
        for k in clients:
            stage.tell(k, kind)
        return stage.finish()

    return play


def node_killed(stage: Stage) -> Path:
    """A node is killed while it works on round 2, and restarted at once."""
    number, out = stage.submit()
    stage.until_round(out, 1)
    stage.tell(LIAR, "sleep 30")
    time.sleep(5)
    stage.deployment.kill(f"node{LIAR}")
    stage.tell(LIAR, "")
    stage.restart(LIAR)
    stage.deployment.wait(number, LIMIT)
    return out


def server_killed(after: int) -> Callable[[Stage], Path]:
    """The ServerApp is killed after a round and resumed."""

    def play(stage: Stage) -> Path:
        _, out = stage.submit()
        stage.until_round(out, after)
        stage.deployment.kill_apps("superlink")
        return stage.finish(resume=True)

    return play


def superlink_killed(stage: Stage) -> Path:
    """The SuperLink is killed after round 1 with its ServerApp and restarted, and the run resumed."""
    _, out = stage.submit()
    stage.until_round(out, 1)
    stage.deployment.kill("superlink")
    stage.deployment.start_superlink()
    for k in range(CLIENTS):  # what a service manager does
        stage.deployment.kill(f"node{k}")
        stage.restart(k)
    return stage.finish(resume=True)


HONEST = tuple(k for k in range(CLIENTS) if k != LIAR)
PATIENT = "retries=5 quorum=1 round_timeout=20"
TRIALS = [
    *(Trial(f"reply: {kind}", hostile(kind, LIAR), HONEST, alone=False) for kind in KINDS),
    Trial("all replies but one NaN", hostile("NaN", 1, 2, LIAR), exit=4, alone=False),
    Trial("slow client", hostile("sleep 90", LIAR), HONEST, options="retries=0 round_timeout=15"),
    Trial("SuperNode killed at work and restarted", node_killed, options=PATIENT),
    Trial("ServerApp killed after round 1, resumed", server_killed(1), options=PATIENT),
    Trial("ServerApp killed after round 2, resumed", server_killed(2), options=PATIENT),
    Trial("SuperLink killed after round 1, resumed", superlink_killed, options=PATIENT),
    Trial("no fault", hostile("", LIAR), alone=False),
]


@contextmanager
def federation() -> Iterator[Deployment]:
    """Four nodes on loopback with the hostile client."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        new_project(folder / "app")
        text = '"""The hostile client."""\n\nfrom tests.flower import hostile\n\napp = hostile.app\n'
        (folder / "app" / "client_app.py").write_text(text)
        env = {"PYTHONPATH": f"{SOURCE}:{SOURCE.parent}", "FEDMAN_MEMORY": str(folder / "memory")}
        with Deployment(folder / "deployment", env=env, warm=True) as deployment:
            deployment.start_nodes(dict(node(deployment, k) for k in range(CLIENTS)))
            yield deployment


def simulated(clients: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """θ of the simulator with these clients in every round, by name of parameter."""
    config = resolve(overrides(RUN.split()))
    data = load(*config.source)
    machine = simulator(config, data)
    state = machine.start()
    for _ in range(ROUNDS):
        machine.round(state, list(clients))
    return machine.backend.executor.execution.parameters.unflatten(state.server["w"])


def verdict(trial: Trial, out: Path) -> tuple[bool, str]:
    """Whether a run ended as it must, and its outcome."""
    if (out / "failed.json").exists():
        failed = json.loads((out / "failed.json").read_text())
        return failed["exit"] == trial.exit, f"exit {failed['exit']}: {failed['reason'][:60]}…"
    theta = RunFolder(out).read_models()["cloud"]
    refused = sorted({int(k) for record in RunFolder(out).read_rounds() for k in record["refused"]})
    same = all(torch.equal(theta[name], v) for name, v in simulated(trial.clients).items())
    who = f"without {', '.join(map(str, refused))}" if refused else "of all clients"
    good = same and trial.exit == 0 and set(refused).isdisjoint(trial.clients)
    return good, f"completes, result {who} {'bit-identical' if same else 'DIFFERS'}"


def attempt(trial: Trial, deployment: Deployment) -> bool:
    """Play a trial and print its line."""
    start, stage = time.monotonic(), Stage(deployment, trial)
    for k in range(CLIENTS):
        stage.tell(k, "")
    try:
        fine, outcome = verdict(trial, trial.play(stage))
    except AssertionError as error:
        print(error, file=sys.stderr)
        fine, outcome = False, ("HANGS: " if isinstance(error, TimeLimit) else "") + str(error).split("\n")[0]
    print(f"| {trial.name} | {'' if fine else 'FAILS: '}{outcome} | {time.monotonic() - start:.0f} |", flush=True)
    return fine


def main(words: list[str]) -> int:
    """Play the trials and print the table."""
    torch.set_num_threads(1)
    chosen = [trial for trial in TRIALS if not words or any(word in trial.name for word in words)]
    good = 0
    print("| fault | outcome | seconds |\n| --- | --- | --- |", flush=True)
    if together := [trial for trial in chosen if not trial.alone]:
        with federation() as deployment:
            good += sum(attempt(trial, deployment) for trial in together)
    for trial in chosen:
        if trial.alone:
            with federation() as deployment:
                good += attempt(trial, deployment)
    print(f"\n{good} of {len(chosen)} as stated")
    return 0 if good == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
