"""A device without enough memory: the chunk halves, and the run goes on with the same result."""

import gc
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedman.backends.in_process
from fedman.config import resolve
from fedman.data import Dataset
from fedman.errors import UserError
from fedman.models import build as build_model
from fedman.runs.build import build
from fedman.training.aggregate import collect
from fedman.training.federation import Assignment
from fedman.training.round import Round
from tests.cases import CASES
from tests.federations import COHORTS, TRAINING, Loop, network, play, simulation, together


@pytest.fixture
def room(monkeypatch):
    """`room(n)`: from now on more than n clients at once do not fit; returns the list of what was tried."""
    real = fedman.backends.in_process.run_local_steps

    def limit(n):
        tried = []

        def train(job, *rest):
            tried.append(len(job))
            if len(job) > n:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(job, *rest)

        monkeypatch.setattr(fedman.backends.in_process, "run_local_steps", train)
        return tried

    return limit


@pytest.mark.parametrize("case", CASES)
def test_the_chunk_halves_and_the_result_stays(case, room):
    name, hyper = CASES[case]
    want, outcomes = play(simulation(name, hyper))
    tried = room(1)
    machine = simulation(name, hyper)
    with pytest.warns(UserWarning, match="clients at once do not fit into memory; going on with 1"):
        state, again = play(machine)
    assert machine.backend.chunk == 1
    assert tried == [3] + [1] * sum(map(len, COHORTS))
    torch.testing.assert_close(state.server, want.server, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state.clients.memory, want.clients.memory, rtol=1e-11, atol=1e-12)
    assert [o.cohort for o in again] == [o.cohort for o in outcomes]
    assert again[-1].loss == pytest.approx(outcomes[-1].loss, rel=1e-10)


def test_it_halves_as_often_as_needed_and_remembers(room):
    room(1)
    graphs = Loop()
    machine = simulation("feddyn", graphs=graphs)
    state = machine.start()
    with pytest.warns(UserWarning, match="do not fit") as said:
        machine.round(state, [0, 1, 2, 3, 4, 5])
    assert [str(w.message).split("; ")[1] for w in said] == ["going on with 3", "going on with 1"]
    assert graphs.cleared == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine.round(state, [0, 1, 2])


def test_a_lack_of_memory_where_the_uploads_are_joined(room, monkeypatch):
    """The graphs let go of their memory, and what the clients computed is joined without computing it again."""
    want, _ = play(simulation("feddc"), [COHORTS[0]])
    join, full = fedman.backends.in_process._join, iter([True])

    def too_little_once(parts):
        if next(full, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return join(parts)

    monkeypatch.setattr(fedman.backends.in_process, "_join", too_little_once)
    tried, graphs = room(9), Loop()
    machine = simulation("feddc", graphs=graphs)
    with pytest.warns(UserWarning, match="3 clients at once do not fit into memory; going on with 1"):
        state, _ = play(machine, [COHORTS[0]])
    assert (tried, graphs.cleared, machine.backend.chunk) == ([3], 1, 1)
    torch.testing.assert_close(state.server, want.server, rtol=1e-11, atol=1e-12)


def test_one_client_that_does_not_fit_is_a_users_problem(room):
    room(0)
    machine = simulation("feddc")
    state = machine.start()
    before = state.clients.last.clone()
    with (
        pytest.warns(UserWarning, match="going on with 1"),
        pytest.raises(UserError, match="not even one client at a time fits"),
    ):
        machine.round(state, COHORTS[0])
    assert state.round == 0
    assert torch.equal(state.clients.last, before)


def test_stacked_runs_are_taken_apart(room):
    """Three runs of three clients, room for four clients: run by run, to the same result."""
    variants = [replace(TRAINING, seed=s, zeta=z) for s, z in ((0, 0.0), (1, 0.7), (2, 0.3))]
    want = [play(simulation("feddc", training=t), [COHORTS[0]])[0].server for t in variants]
    tried = room(4)
    runs = [simulation("feddc", training=t, model=network(), longest=20) for t in variants]
    states = [run.start() for run in runs]
    with pytest.warns(UserWarning, match="9 clients at once do not fit into memory; going on with 4"):
        outcomes = together(runs, states, [COHORTS[0]] * 3)
    assert len(outcomes) == 3
    assert tried == [9, 3, 3, 3]
    for state, server in zip(states, want, strict=True):
        torch.testing.assert_close(state.server, server, rtol=1e-11, atol=1e-12)


def resnet_rounds(rounds):
    """Ten clients with a ResNet-18, as in a long run; the server's model after some rounds, and the execution."""
    rng, clients, samples = np.random.default_rng(0), 10, 100
    x, y = rng.integers(0, 256, (clients * samples, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, clients * samples)
    data = Dataset("cifar10", x, y, x[:50], y[:50], 10, (0.5,) * 3, (0.25,) * 3, True)
    keys = {"dataset": "cifar10", "clients": clients, "participation": 1.0, "epochs": 1, "rounds": 10000}
    config = resolve({**keys, "algorithm": "feddc", "lr": 0.01, "precision": "tf32"})
    parts = [np.arange(samples) + samples * k for k in range(clients)]
    torch.manual_seed(0)
    model = build_model("resnet18_gn", (3, 32, 32), 10)
    built = build([config], data, "cuda", model=model, parts=parts, whole_run=True)
    federation = built.federations[0]
    state = federation.start()
    for t in range(rounds):
        now = [Assignment(federation, state, Round(t, list(range(clients)), 0.01))]
        list(collect(now, built.in_process.train(now, [])))
    return state.server["w"].cpu(), built


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_resnet_on_a_gpu_with_too_little_memory():
    """Compiled blocks of ten clients do not fit: blocks of five do, and the rounds go on to the same result."""
    want, built = resnet_rounds(2)
    assert built.executor.execution.title == "compiled vmap"
    start = torch.cat([p.flatten() for p in built.executor.execution.model.parameters()]).cpu()
    del built
    gc.collect()  # what the compiler left refers to itself
    peak = torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_allocated() < 0.1 * peak  # or blocks of five would not fit either
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.75 * peak / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.warns(UserWarning, match="10 clients at once do not fit into memory; going on with 5"):
            found, built = resnet_rounds(2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert built.in_process.chunk <= 5
    assert (found - want).norm() < 0.02 * (want - start).norm()
