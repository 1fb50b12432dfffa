"""Sweeps on the embedded data: finished runs are skipped, runs are stacked, one that diverges stops no other."""

import json

import numpy as np
import pytest
import torch

import fedman.data
from fedman.config import resolve
from fedman.errors import UserError
from fedman.execution.executor import Executor
from fedman.runs import build, checkpoint, experiment, results, sweep
from fedman.runs.folder import RunFolder
from fedman.runs.grid import Cell, cells
from fedman.runs.records import headline
from tests.federations import SMALL, Loop

DIGITS = {("digits", None): fedman.data.load("digits")}


def played(grid, out, warn=print):
    """Play what is not finished; the names of the runs that were."""
    left = [grid[i] for i in sweep.unfinished(grid, out)]
    names = []
    progress = [lambda record, cell=cell: names.append(cell.name) for cell in left]
    sweep.run(left, DIGITS, out, "cpu", progress, warn)
    assert len(names) == sum(cell.config.rounds for cell in left) or warn is not print
    return list(dict.fromkeys(names))


def test_finished_runs_are_skipped_and_others_resumed(tmp_path):
    grid = cells(
        {
            **{k: str(v) for k, v in SMALL.items()},
            "algorithm": "fedavg,feddyn",
            "zeta": "0,0.15",
            "seed": "0,1",
            "alpha": "0.1",
            "keep_state": "false",
        }
    )
    assert [c.name for c in grid] == [
        f"{a}-zeta{z}-seed{s}" for a in ("fedavg", "feddyn") for z in ("0", "0.15") for s in (0, 1)
    ]
    assert [c.config.hyper for c in grid] == [{}] * 4 + [{"alpha": 0.1}] * 4
    assert played(grid, tmp_path) == [c.name for c in grid]
    (table,) = sweep.tables(grid, tmp_path)
    header, lines = table.header, table.rows
    assert table.title == "test accuracy of the mean of all clients, %"
    assert header == ["method", "plain", "+MAN ζ=0.15", "gain"]
    assert [line[0] for line in lines] == ["FedAvg", "FedDyn"]
    plain = [headline(RunFolder(tmp_path / grid[i].name).ending()) for i in (0, 1)]
    assert lines[0][1] == f"{np.mean(plain):.2f} ± {np.std(plain, ddof=1):.2f}"
    (tmp_path / grid[3].name / "summary.json").unlink()
    assert played(grid, tmp_path) == [grid[3].name]
    assert sweep.tables(grid, tmp_path) == [table]
    (part,) = sweep.tables([grid[0], grid[6]], tmp_path)
    assert [(line[0], line[3]) for line in part.rows] == [("FedAvg", "–"), ("FedDyn", "–")], "nothing to compare with"
    (part,) = sweep.tables([grid[0], grid[1], grid[2]], tmp_path)  # as of a shard
    mine = [headline(RunFolder(tmp_path / grid[i].name).ending()) for i in (0, 2)]
    assert part.header[-1] == "gain over common seeds"
    assert part.rows[0][-1] == f"{mine[1] - mine[0]:+.2f}"
    with pytest.raises(UserError, match="holds a run of another configuration; lr differ"):
        sweep.unfinished([Cell(grid[0].varied, grid[0].config.model_copy(update={"lr": 0.2}))], tmp_path)


def test_runs_stacked_in_one_chunk_end_as_they_do_alone(tmp_path):
    """What a sweep does on a GPU, on the CPU: other seeds, ζ and ragged partitions side by side."""
    keys = {**SMALL, "algorithm": "feddc", "unbalanced": 0.5, "precision": "fp64"}
    configs = [
        resolve({**keys, "seed": s, "zeta": z, "partition": p}) for s, z, p in [(0, 0, "dir0.3"), (1, 0.1, "iid")]
    ]
    data = DIGITS["digits", None]
    outs = [tmp_path / "a", tmp_path / "b"]
    quiet = [lambda record: None] * 2
    stacked = experiment.run_stacked(configs, data, outs, False, "cpu", quiet, print)
    for config, out, result in zip(configs, outs, stacked, strict=True):
        alone = experiment.run(config, data=data, device="cpu")
        assert result.accuracy == alone.accuracy
        assert result.rounds[-1]["loss"] == pytest.approx(alone.rounds[-1]["loss"], rel=1e-9)
        for k, v in alone.models["cloud"].items():
            torch.testing.assert_close(result.models["cloud"][k], v, rtol=1e-9, atol=1e-11)
        assert json.loads((out / "summary.json").read_text())["stacked"] == 2
    assert sweep.groups(configs, [True, True]) == [[0, 1]]
    assert sweep.groups(configs, [False, False]) == [[0], [1]]
    assert sweep.groups(configs, [True, True], workers=3) == [[0], [1]]
    others = [{"lr": 0.05}, {"alpha": 0.02}, {"decayed": True}]
    assert sweep.groups(configs + [resolve({**keys, **o}) for o in others], [True] * 5) == [[0, 1, 3], [2], [4]]


@pytest.mark.parametrize("saves", [1, 2, 3, 4, 5, 8, 11])
def test_stacked_runs_go_on_together_after_a_kill_between_their_checkpoints(saves, tmp_path, monkeypatch):
    """Alone for a round, one would end with other last bits: so they begin and end with a checkpoint each."""
    configs, data, quiet = pair(), DIGITS["digits", None], [lambda record: None] * 2
    whole = experiment.run_stacked(configs, data, [None] * 2, False, "cpu", quiet, print)
    save, written = checkpoint.save, []

    def killed(*given):
        if len(written) == saves:
            raise KeyboardInterrupt
        written.append(save(*given))

    outs = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(checkpoint, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        experiment.run_stacked(configs, data, outs, False, "cpu", quiet, print)
    monkeypatch.setattr(checkpoint, "save", save)
    played = [[], []]
    progress = [lambda record, mine=mine: mine.append(record["round"]) for mine in played]
    results = experiment.run_stacked(configs, data, outs, True, "cpu", progress, print)
    assert played == [list(range(max(0, saves // 2 - 1) + 1, SMALL["rounds"] + 1))] * 2
    for a, b in zip(whole, results, strict=True):
        same_models(a, b)


def test_a_kill_between_the_ends_of_stacked_runs_leaves_no_round_to_play_alone(tmp_path, monkeypatch):
    configs, data, quiet = pair(), DIGITS["digits", None], [lambda record: None] * 2
    whole = experiment.run_stacked(configs, data, [None] * 2, False, "cpu", quiet, print)
    write, written = RunFolder.write_ending, []

    def killed(folder, ending):
        if written:
            raise KeyboardInterrupt
        written.append(write(folder, ending))

    outs = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(RunFolder, "write_ending", killed)
    with pytest.raises(KeyboardInterrupt):
        experiment.run_stacked(configs, data, outs, False, "cpu", quiet, print)
    monkeypatch.setattr(RunFolder, "write_ending", write)
    assert [(out / "summary.json").exists() for out in outs] == [True, False]
    played = []
    (result,) = experiment.run_stacked(configs[1:], data, outs[1:], True, "cpu", [played.append], print)
    assert played == []
    same_models(whole[1], result)
    assert len(result.rounds) == SMALL["rounds"]


def pair():
    return [resolve({**SMALL, "algorithm": "feddc", "seed": s, "checkpoint_seconds": 0}) for s in (0, 1)]


def same_models(a, b):
    for name, model in a.models.items():
        torch.testing.assert_close(b.models[name], model, rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_shards_are_every_cell_once_and_of_nearly_the_same_cost(count):
    grid = cells({"algorithm": "fedavg,fedsam,feddyn", "seed": "0,1,2,3", "rounds": "10,30"})
    shards = [sweep.shard(grid, i + 1, count) for i in range(count)]
    assert sorted(cell.name for shard in shards for cell in shard) == sorted(cell.name for cell in grid)
    costs = [sum(cell.cost for cell in shard) for shard in shards]
    assert max(costs) - min(costs) <= 2 * max(cell.cost for cell in grid)
    assert sweep.shard(grid, 1, count) == shards[0]


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_largest_round_is_captured_first_and_changes_nothing(seeds, monkeypatch):
    """On a GPU graphs live in each other's memory, where that is large enough."""
    configs = [resolve({**SMALL, "rounds": 12, "precision": "fp64", "seed": s}) for s in range(seeds)]
    data, quiet = DIGITS["digits", None], [lambda record: None] * seeds
    plain = experiment.run_stacked(configs, data, [None] * seeds, False, "cpu", quiet, print)
    graphs = Loop()
    monkeypatch.setattr(build, "Executor", lambda *given: Executor(*given, graphs))
    replayed = experiment.run_stacked(configs, data, [None] * seeds, False, "cpu", quiet, print)
    assert len(graphs.sizes) > 1
    assert graphs.sizes[0] == max(graphs.sizes)
    for a, b in zip(plain, replayed, strict=True):
        assert a.accuracy == b.accuracy
        for k, v in a.models["all"].items():
            torch.testing.assert_close(b.models["all"][k], v, rtol=1e-9, atol=1e-11)


class Demanding(torch.nn.Linear):
    """Refuses an empty batch."""

    def forward(self, x):
        return super().forward(x.flatten(1) + 0 * x.amax())


@pytest.mark.parametrize("chunk", [1, 3])
def test_clients_alone_in_their_chunk_take_no_empty_batches(chunk):
    """Two runs in chunks of one client, and with a last chunk of one: as each run by itself."""
    keys = {**SMALL, "clients": 4, "participation": 1, "rounds": 2, "unbalanced": 0.8, "chunk": chunk}
    configs = [resolve({**keys, "seed": s, "execution": "vmap"}) for s in range(2)]
    model, data, quiet = Demanding(64, 10), DIGITS["digits", None], lambda record: None
    both = experiment.run_stacked(configs, data, [None] * 2, False, "cpu", [quiet] * 2, print, model)
    for config, result in zip(configs, both, strict=True):
        alone = experiment.run(config, data=data, model=model, device="cpu")
        for k, v in alone.models["all"].items():
            torch.testing.assert_close(result.models["all"][k], v)


def test_a_sweep_goes_on_after_a_diverged_cell(tmp_path):
    grid = cells({**{k: str(v) for k, v in SMALL.items()}, "lr": "1e30,0.1", "clip": "inf"})
    said = []
    played(grid, tmp_path, said.append)
    assert len(said) == 1
    assert "not finite" in said[0]
    good = headline(RunFolder(tmp_path / grid[1].name).ending())
    assert [line[1:] for line in sweep.tables(grid, tmp_path)[0].rows] == [["diverged"], [f"{good:.2f}"]]
    assert sweep.unfinished(grid, tmp_path) == []


def test_states_that_were_kept_stay_whatever_a_later_command_keeps(tmp_path):
    """Of a run that diverged none can be used, and none stays where states are not kept."""
    keys = {**{k: str(v) for k, v in SMALL.items()}, "lr": "1e30,0.1", "clip": "inf", "checkpoint_seconds": "0"}
    for keep, states in (("true", 1), ("false", 0)):
        grid = cells({**keys, "keep_state": keep})
        played(grid, tmp_path / keep, lambda message: None)
        assert not list(tmp_path.glob(f"{keep}/lr1e30/checkpoint/*.json"))
        for later in ("false", "true"):
            assert sweep.unfinished(cells({**keys, "keep_state": later}), tmp_path / keep) == []
            assert len(list(tmp_path.glob(f"{keep}/lr0.1/checkpoint/*.json"))) == states


def test_runs_that_results_have_are_done_and_stand_in_the_table(tmp_path):
    keys = {**{k: str(v) for k, v in SMALL.items()}, "model": "mlp", "zeta": "0,0.15", "seed": "0,1"}
    assert "precision" not in keys
    grid = cells(keys)
    assert played(grid[:2], tmp_path / "there") == [c.name for c in grid[:2]]
    rows = [row | {"source": {"commit": "a"}} for row in results.collect(tmp_path / "there")]
    known = sweep.recorded(grid, rows)
    assert [*known] == [c.name for c in grid[:2]]
    assert sweep.unfinished(grid, tmp_path / "here", known) == [2, 3]
    assert sweep.recorded(cells({**keys, "precision": "fp32"}), rows).keys() == known.keys()
    assert not sweep.recorded(cells({**keys, "precision": "bf16"}), rows)
    assert not sweep.recorded(cells({**keys, "lr": "0.3"}), rows)
    assert not sweep.recorded(grid, [row | {"source": {"unknown": "no git"}} for row in rows])
    assert played(grid[2:], tmp_path / "here") == [c.name for c in grid[2:]]
    stopped = {name: row | {"stopped": "plateau", "round": 2} for name, row in known.items()}
    (table,) = sweep.tables(grid, tmp_path / "here", stopped)
    assert table.title.endswith("%; 2 runs were stopped early, after round 2")
    (table,) = sweep.tables(grid, tmp_path / "here", known)
    played(grid, tmp_path / "whole")
    assert [table] == sweep.tables(grid, tmp_path / "whole")
