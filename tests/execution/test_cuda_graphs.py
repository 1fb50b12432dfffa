"""Steps as captured graphs: their places, their figures, steps that no graph can hold, too little memory."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from fedman.execution import cuda_graphs as graphs


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    return graphs.Graphs()


def step(inputs, j, carry):
    return {"sum": carry["sum"] + inputs["a"]["x"] * (j + 1)}


def figures(inputs, j, carry):
    return {"first": inputs["a"]["x"] * (j + 1), "twice": 2 * carry["sum"]}


def play(machine, steps=3, step=step):
    carry, found = machine.run(task(step, steps))
    assert {name: v.item() for name, v in found.items()} == {"first": 2, "twice": 2 * carry["sum"].item()}
    return carry["sum"]


def task(step, steps, fixed=None, figures=figures):
    return graphs.Steps(step, {"a": {"x": torch.tensor([2.0])}}, {"sum": torch.zeros(1)}, steps, fixed, figures)


def test_it_runs_step_by_step_and_is_not_tried_again(machine, monkeypatch):
    tried = []

    def refuse(*arguments):
        tried.append(arguments)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_Captured", refuse)
    with pytest.warns(UserWarning, match="no CUDA graph of this model.*not permitted"):
        assert play(machine).item() == 2 + 4 + 6
    assert play(machine).item() == 12
    assert len(tried) == 1


def test_too_little_memory_is_not_taken_for_that(machine, monkeypatch):
    def refuse(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(graphs, "_Captured", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        play(machine)


def test_steps_of_the_same_shapes_are_told_apart(machine, monkeypatch):
    """Halves of a stack too large for the memory have inputs of the same shapes, and numbers of their own."""
    monkeypatch.setattr(graphs, "_Captured", lambda task, *rest: SimpleNamespace(replay=lambda now: task))
    first, second, *again = (task(step, 1, fixed) for fixed in (0.0, 0.1, 0.0, 0.1))
    assert [machine.run(t) for t in (first, second, *again)] == [first, second, first, second]


def test_steps_of_other_types_are_told_apart(machine, monkeypatch):
    """A graph would cast inputs of the same shapes to the types that it was captured with."""
    monkeypatch.setattr(graphs, "_Captured", lambda task, *rest: SimpleNamespace(replay=lambda now: task))
    single = task(step, 1)
    double = graphs.Steps(step, {"a": {"x": torch.tensor([2.0], dtype=torch.float64)}}, single.carry, 1)
    assert [machine.run(t) for t in (single, double, single)] == [single, double, single]


class Device:
    """In the place of CUDA's streams and graphs; a capture that broke off cannot be ended."""

    broken = False

    def capture_begin(self, pool):
        pass

    def capture_end(self):
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        self.again()

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def device(monkeypatch):
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.fixture
def replayed(device, monkeypatch):
    """Graphs that do the captured work again and write what it returns to where it was the first time."""

    def record(work, pool):
        graph, value = Device(), work()

        def again():
            for name, v in (work() or {}).items():
                value[name].copy_(v)

        graph.again = again
        return graph, value

    monkeypatch.setattr(graphs, "_record", record)


def test_figures_are_those_of_the_round_and_of_step_0(replayed):
    machine = graphs.Graphs()
    assert [play(machine).item() for _ in range(2)] == [12, 12]
    (captured,) = machine._captured.values()
    given = task(step, 3)
    given.inputs["a"]["x"].fill_(5)
    _, found = captured.replay(given)
    assert {name: v.item() for name, v in found.items()} == {"first": 5, "twice": 60}
    captured.replay(task(step, 3))
    assert found["first"].item() == 5  # the caller's own, not the graph's


def test_graphs_of_all_sizes_share_their_places(replayed):
    machine = graphs.Graphs()

    def play(n, seed):
        x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
        inputs = {"a": {"x": x}, "hp": {"lr": torch.tensor(0.5)}}
        carry = {"sum": torch.zeros(()).expand(n, 4)}

        def step(inputs, j, carry):
            return {"sum": carry["sum"] + inputs["hp"]["lr"] * inputs["a"]["x"] * (j + 1)}

        found, none = machine.run(graphs.Steps(step, inputs, carry, 6))
        torch.testing.assert_close(found["sum"], 0.5 * x * 21)
        assert none == {}

    for seed, n in enumerate([3, 10, 2, 3, 8, 10, 2, 9]):
        play(n, seed)
    places = {len(c.carry["sum"]): c.carry["sum"].data_ptr() for c in machine._captured.values()}
    assert set(places) == {2, 3, 8, 9, 10}
    assert places[2] == places[8] == places[9] == places[10] != places[3]  # captured before the largest
    machine.clear()
    assert not machine._rooms


@pytest.mark.parametrize("where", ["step", "figures"])
def test_too_little_memory_inside_a_capture_is_told_as_that(where, device, monkeypatch):
    """Else the chunk would not halve, and every step would run without a graph."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    calls = []

    def greedy(inputs, j, carry):
        calls.append(j)
        if len(calls) == 2:  # the first call is before the capture
            monkeypatch.setattr(Device, "broken", True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (step if where == "step" else figures)(inputs, j, carry)

    given = task(greedy, 3) if where == "step" else task(step, 3, figures=greedy)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        graphs.Graphs().run(given)
    assert len(calls) == 2


@pytest.mark.parametrize("broken", [False, True])
def test_after_a_capture_that_failed_others_are_taken(broken, device, monkeypatch):
    """PyTorch takes none into its pool; where it did not even end, the allocator has to be told so."""
    pools, released = iter("ab"), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(graphs, "_release", released.append)
    calls = []

    def asks_the_host(inputs, j, carry):
        calls.append(j)
        if len(calls) == 2:  # the first call is before the capture
            monkeypatch.setattr(Device, "broken", broken)
            raise RuntimeError("operation not permitted when stream is capturing")
        return step(inputs, j, carry)

    machine = graphs.Graphs()
    with pytest.warns(UserWarning, match="no CUDA graph of this model.*not permitted"):
        assert play(machine, step=asks_the_host).item() == 12
    monkeypatch.setattr(Device, "broken", False)
    assert machine.capture(task(step, 3, fixed="another")) is not None
    assert machine._pool == "b"
    assert released == ["a"] * broken
