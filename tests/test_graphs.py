"""A step that no CUDA graph can hold."""

import contextlib

import pytest
import torch

from fedman import graphs


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    return graphs.Graphs()


def step(inputs, j, carry):
    return {"sum": carry["sum"] + inputs["a"]["x"] * (j + 1)}


def play(machine, steps=3):
    return machine.run(step, {"a": {"x": torch.tensor([2.0])}}, {"sum": torch.zeros(1)}, steps)["sum"]


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


class Device:
    """In the place of CUDA's streams and graphs; a capture that broke off cannot be ended."""

    def __init__(self):
        self.broken = False

    def capture_begin(self, pool):
        self.broken = True

    def capture_end(self):
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


def test_too_little_memory_inside_a_capture_is_told_as_that(monkeypatch):
    """Else the chunk would not halve, and every step would run without a graph."""
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    calls = []

    def greedy(inputs, j, carry):
        calls.append(j)
        if len(calls) == 3:  # the first step is taken before the capture
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(inputs, j, carry)

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        graphs.Graphs().run(greedy, {"a": {"x": torch.tensor([2.0])}}, {"sum": torch.zeros(1)}, 3)
    assert len(calls) == 3
