"""The figures of a round: the mean loss, and the penalty's terms of the final models on the clients' first batches."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedman.execution.branches import Branches
from fedman.execution.one_by_one import OneByOne
from fedman.execution.vmapped import Vmapped
from fedman.training.local_steps import run_local_steps, steps_of
from fedman.training.round import Round
from fedman.training.settings import BUFFERS
from tests.federations import COHORTS, TRAINING, Loop, play, samples, simulation

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
COHORTS_AND_ONE = [*COHORTS, [5], [3]]
"""The last two are of one client, with batches of other sizes."""


def net():
    """Buffers that every step changes, and random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 4)).double()


def on(device, **options):
    data = samples()
    here = {name: getattr(data, name).to(device) for name in ("x", "y", "x_test", "y_test")}
    return simulation("fedsam", data=replace(data, **here), model=net(), device=device, chunk=8, longest=20, **options)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("execution", [OneByOne, Vmapped, Branches])
@pytest.mark.parametrize("zeta", [0.0, 0.7])
def test_the_terms_are_those_of_the_final_models(device, execution, zeta):
    machine = on(device, execution=execution, training=replace(TRAINING, zeta=zeta))
    federation, executor, state = machine.federation, machine.backend.executor, machine.start()
    for t, cohort in enumerate(COHORTS_AND_ONE):
        now = Round(t, cohort, 0.1)
        work = federation.work(federation.draw(now, cohort), state.server, state.clients.memories(cohort))
        result = run_local_steps(work, executor)
        batch = work.batches.at(0)._replace(buffers=result.carried[BUFFERS])
        terms = executor.model.penalty_terms(result.w, batch)
        assert list(result.figures) == ["loss", *executor.model.terms]
        for name, v in terms.items():
            torch.testing.assert_close(result.figures[name], v, rtol=1e-10, atol=0)
            if device == "cpu":
                assert torch.equal(result.figures[name], v)
        assert (result.figures["loss"] > 0).all()


def test_they_are_a_pure_function_of_the_inputs():
    """As a captured graph needs it: in the next round other tensors are in their places."""
    machine = on("cpu", execution=OneByOne)
    federation, model, state = machine.federation, machine.backend.executor.model, machine.start()
    first, second = (
        federation.work(federation.draw(Round(t, [0, 2], 0.1), [0, 2]), state.server, state.clients.memories([0, 2]))
        for t in (0, 1)
    )
    one, other = steps_of(first, model), steps_of(second, model)
    carry = {name: v.clone() for name, v in other.carry.items()} | {"loss": torch.ones(2, dtype=torch.float64)}
    zero = torch.zeros(1, dtype=torch.int64)
    torch.testing.assert_close(one.figures(other.inputs, zero, carry), other.figures(other.inputs, zero, carry))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("calls", [1, 2])  # before the capture, and inside it
def test_too_little_memory_for_them_halves_the_chunk(device, calls, monkeypatch):
    machine = on(device, execution=OneByOne, graphs=None if device == "cuda" else Loop())
    want, _ = play(on(device, execution=OneByOne), COHORTS[:2])
    model, tried = machine.backend.executor.model, []
    terms = model.penalty_terms

    def greedy(W, batch):
        tried.append(len(W))
        if tried.count(3) == (calls if device == "cuda" else 1) and len(W) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return terms(W, batch)

    monkeypatch.setattr(model, "penalty_terms", greedy)
    monkeypatch.setattr(machine.backend.executor, "map", lambda function, items: [function(item) for item in items])
    with pytest.warns(UserWarning, match="3 clients at once do not fit into memory; going on with 1"):
        state, _ = play(machine, COHORTS[:2])
    assert machine.backend.chunk == 1
    torch.testing.assert_close(state.server, want.server, rtol=1e-9, atol=1e-10)
