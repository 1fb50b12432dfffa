"""Numbers: rates and weights that blow up, clients that are not finite, a device without enough memory."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from unittest import mock

import torch

import fedman
import fedman.backends.in_process
from faults.runs import SMALL, finish, start, tail
from faults.tally import Tally
from fedman.algorithms import ALGORITHMS
from fedman.errors import Diverged, UserError
from fedman.runs.folder import RunFolder
from tests.cases import CASES
from tests.federations import COHORTS, play, samples, simulation
from tests.training.test_rounds import Poisoned

RATES = (1.0, 100.0, 1e4, 1e9, 1e30)
WEIGHTS = (0.0, 1e3, 1e12, 3e38)
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # of float64, for another chunk


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Each in turn."""
    algorithms = ["fedspeed"] if small else list(ALGORITHMS)
    for algorithm in algorithms:
        for lr in RATES[::2] if small else RATES:
            for zeta in WEIGHTS[::3] if small else WEIGHTS:
                for clip in (10.0, math.inf):
                    what = "lr up to 1e30, ζ up to 3e38: finite records to the end, or named as diverged"
                    tally.check(what, blown_up(scratch, algorithm, lr=lr, zeta=zeta, clip=clip))
    sweep_goes_on(tally, scratch)
    for case in list(CASES)[::5] if small else CASES:
        for chunk in (1, 100):
            tally.check("one client not finite: left out and named", one_bad(case, chunk))
            tally.check("all clients not finite: diverged, the state untouched", all_bad(case, chunk))
        for room in (1, 2):
            tally.check("out of device memory: the chunk halves, the same result", out_of_memory(case, room))


def blown_up(scratch: Path, algorithm: str, **keys: float) -> str | None:
    """A run with absurd numbers: what it records is finite, or it is said to have diverged and writes no summary."""
    out = scratch / f"{algorithm}-{'-'.join(map(str, keys.values()))}"
    where = f"{algorithm} {keys}"
    small = {"model": "mlp", "clients": 6, "participation": 0.5, "rounds": 2, "epochs": 1, "batch_size": 40}
    try:
        fedman.run(**small, algorithm=algorithm, **keys, device="cpu", out=out)
    except Diverged as error:
        about = json.loads((out / "diverged.json").read_text())
        named = about["diverged"] == str(error) and str(error).startswith(f"round {about['round']}: ")
        return None if named and not (out / "summary.json").exists() else f"{where}: not named well: {error}"
    except Exception as error:
        return f"{where}: {type(error).__name__}: {error}"
    figures = [
        value
        for record in RunFolder(out).read_rounds()
        for value in (record["loss"], record["lr"], *record["penalty"].values(), *record["test_loss"].values())
    ]
    return None if all(map(math.isfinite, figures)) else f"{where}: recorded a number that is not finite"


def sweep_goes_on(tally: Tally, scratch: Path) -> None:
    """One run of a sweep diverges: it is named, the others are done, the command ends well."""
    out, log = scratch / "sweep", scratch / "sweep.log"
    words = ["sweep", *SMALL, "lr=0.1,1e30,0.05", "clip=inf", "rounds=2", "--out", str(out), "--device", "cpu"]
    code = finish(start(words, log))
    done, diverged = ({p.parent.name for p in out.glob(f"*/{name}.json")} for name in ("summary", "diverged"))
    good = code == 0 and (done, diverged) == ({"lr0.1", "lr0.05"}, {"lr1e30"}) and "diverged" in log.read_text()
    tally.check("a sweep goes on after a run that diverged", None if good else f"exit {code}: {tail(log)}")
    code = finish(start(["run", *SMALL, "lr=1e30", "clip=inf", "--out", str(scratch / "one")], log))
    good = code == 3 and "fedman: diverged: round 1: " in tail(log)
    tally.check("a run that diverged exits with 3 and a line", None if good else f"exit {code}: {tail(log)}")


def one_bad(case: str, chunk: int) -> str | None:
    """The round's result is the one without the client whose model is not finite."""
    name, hyper = CASES[case]
    data = samples()
    data.x[data.parts[2][0], 0] = 1e6  # Poisoned's mark
    options = {"data": data, "model": Poisoned(), "chunk": chunk}
    state, outcomes = play(simulation(name, hyper, **options), [[0, 2, 5], [1, 3]])
    clean, _ = play(simulation(name, hyper, **options), [[0, 5], [1, 3]])
    if [o.quarantined for o in outcomes] != [[2], []]:
        return f"{case}: quarantined {[o.quarantined for o in outcomes]}"
    return (
        None
        if _close(state.server, clean.server) and _close(state.clients.memory, clean.clients.memory)
        else f"{case}: not the same"
    )


def all_bad(case: str, chunk: int) -> str | None:
    name, hyper = CASES[case]
    data = samples()
    data.x[:, 0] = 1e6
    machine = simulation(name, hyper, data=data, model=Poisoned(), chunk=chunk)
    state, fresh = machine.start(), machine.start()
    try:
        machine.round(state, COHORTS[0])
    except Diverged:
        same = (
            _close(state.server, fresh.server)
            and torch.equal(state.clients.last, fresh.clients.last)
            and state.round == 0
        )
        return None if same else f"{case}: the state was touched"
    return f"{case}: was not noticed"


def out_of_memory(case: str, room: int) -> str | None:
    """`torch.OutOfMemoryError` wherever more than `room` clients are trained at once."""
    name, hyper = CASES[case]
    want = play(simulation(name, hyper))[0]
    train = fedman.backends.in_process.run_local_steps

    def limited(job, *rest):  # type: ignore[no-untyped-def]
        if len(job) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(job, *rest)

    with mock.patch.object(fedman.backends.in_process, "run_local_steps", limited), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = play(simulation(name, hyper))[0]
        except (torch.OutOfMemoryError, UserError) as error:
            return f"{case}: {error}"
    same = _close(state.server, want.server) and _close(state.clients.memory, want.clients.memory)
    return None if same else f"{case}: not the same"


def _close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(v, b[name], **TOLERANCE) for name, v in a.items())
