"""A federation of four nodes on loopback that can be made hostile, with real Flower, and what its runs must end as."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fedman.config import resolve
from fedman.data import load
from fedman.flower.app import new_project
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import overrides
from tests.federations import forget, simulator
from tests.flower.deployment import SOURCE, Deployment, TimeLimit

CLIENTS, LIAR = 4, 3
HONEST = tuple(k for k in range(CLIENTS) if k != LIAR)
LIMIT = 600.0  # seconds, for any run
SETTINGS = "dataset=digits model=mlp partition=dir0.3 unbalanced=0.3 participation=1 cohort=fixed zeta=0.05"
SETTINGS += f" epochs=1 chunk=1 clients={CLIENTS} eval_every=100 eval_others_every=100"


@dataclass
class Stage:
    """A deployment with an app whose clients can be made hostile, and runs on it."""

    deployment: Deployment
    app: Path
    number: int = 0

    def tell(self, client: int, lines: str) -> None:
        """Set what the node does from now on: see `tests.flower.hostile`."""
        self.orders(client).write_text(lines)

    def orders(self, client: int) -> Path:
        return self.deployment.folder / f"orders-{client}"

    def config(self, client: int) -> str:
        """The node config of a client."""
        return f'partition-id={client} hostile="{self.orders(client)}"'

    def start(self, client: int) -> None:
        """Start a client's node, or start it again."""
        self.deployment.start_node(f"node{client}", self.config(client), wait=False)

    def submit(self, words: str, out: Path | None = None) -> tuple[str, Path]:
        """Start a run, or resume the one in `out`; its id and its folder."""
        self.number += out is None
        folder = out or self.deployment.folder / f"run-{self.number}"
        config = f'settings="{SETTINGS} {words}" out="{folder}" resume={str(out is not None).lower()}'
        return self.deployment.submit(self.app, config), folder

    def finish(self, words: str, out: Path | None = None) -> Path:
        """Start or resume a run, and wait for its end."""
        number, folder = self.submit(words, out)
        self.deployment.wait(number, LIMIT)
        return folder

    def until_round(self, out: Path, rounds: int) -> None:
        """Wait until a run has finished so many rounds."""
        end = time.monotonic() + LIMIT
        while len(RunFolder(out).read_rounds()) < rounds:
            if time.monotonic() > end:
                raise TimeLimit(f"no round {rounds} in {LIMIT:.0f} s{self.deployment.logs()}")
            time.sleep(0.1)


@contextmanager
def federation(folder: Path, nodes: Sequence[int] = range(CLIENTS)) -> Iterator[Stage]:
    """A SuperLink and these clients' nodes."""
    folder.mkdir()
    new_project(folder / "app")
    text = '"""The hostile client."""\n\nfrom tests.flower import hostile\n\napp = hostile.app\n'
    (folder / "app" / "client_app.py").write_text(text)
    env = {"PYTHONPATH": f"{SOURCE}:{SOURCE.parent}", "FEDMAN_MEMORY": str(folder / "memory")}
    with Deployment(folder / "net", env=env, warm=True) as deployment:
        stage = Stage(deployment, folder / "app")
        deployment.start_nodes({f"node{k}": stage.config(k) for k in nodes})
        yield stage


def simulated(words: str, cohorts: Sequence[Sequence[int]], forgets: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """θ of the simulator with these clients in the rounds, by name of parameter.

    Clients that forget lose their memory after every round in which they were not.
    """
    config = resolve(overrides(f"{SETTINGS} {words}".split()))
    machine = simulator(config, load(*config.source))
    state = machine.start()
    for cohort in cohorts:
        machine.round(state, list(cohort))
        for k in set(forgets).difference(cohort):
            forget(state, [k])
    return machine.backend.executor.execution.parameters.unflatten(state.server["w"])


def problem(out: Path, words: str, cohorts: Sequence[Sequence[int]], forgets: Sequence[int] = ()) -> str | None:
    """None if a run has completed with exactly these clients in its rounds and the simulator's weights of them."""
    if (out / "failed.json").exists():
        return f"exit {json.loads((out / 'failed.json').read_text())['exit']}: {failure(out)}"
    records = RunFolder(out).read_rounds()
    used = [[k for k in record["cohort"] if k not in record["quarantined"]] for record in records]
    if used != [list(cohort) for cohort in cohorts]:
        t = next((t for t, (a, b) in enumerate(zip(used, cohorts, strict=False)) if a != list(b)), len(used))
        reasons = records[t]["refused"] if t < len(records) else "no record"
        return f"round {t + 1}: clients {used[t : t + 1]}, wanted {list(cohorts[t : t + 1])}; {reasons}"
    if unclean := [text for record in records for text in record["refused"].values() if not text.isprintable()]:
        return f"a record holds {unclean[0]!r:.80}"
    if not all(abs(record["loss"]) < 1e3 for record in records):
        return f"a loss of {max(record['loss'] for record in records):.3g} is recorded"
    theta, wanted = RunFolder(out).read_models()["cloud"], simulated(words, cohorts, forgets)
    different = [name for name, v in wanted.items() if not torch.equal(theta[name], v)]
    return f"the model differs in {different[0]}" if different else None


def failure(out: Path) -> str:
    """Why a run has failed."""
    return str(json.loads((out / "failed.json").read_text())["reason"])[:300]
