"""A device without enough memory: the chunk halves, and the run goes on with the same result."""

import warnings
from dataclasses import replace

import pytest
import torch

import fedman.backends.in_process
from fedman.errors import UserError
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
