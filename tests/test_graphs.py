"""A step that no CUDA graph can hold."""

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
