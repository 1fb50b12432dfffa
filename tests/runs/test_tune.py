"""Tuning on the embedded data: successive halving, choices, kills, bad plans."""

import json
import math
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

import fedman.data
from fedman.config import Preset, resolve
from fedman.errors import UserError
from fedman.runs import sweep, tune
from fedman.runs.folder import RunFolder, locked
from fedman.runs.grid import Grid, Sweep, cells
from fedman.runs.key_text import read_toml
from fedman.runs.records import Headline
from fedman.runs.tune import Played, Setting, progress
from tests.cli.command_line import main_ok, refused
from tests.federations import SMALL

DIGITS = {("digits", None): fedman.data.load("digits")}
KEYS = {
    **{k: str(v) for k, v in SMALL.items()},
    "rounds": "4",
    "validation": "0.1",
    "precision": "fp32",
    "eval_every": "3",
}
FOUR = {**KEYS, "algorithm": "feddyn", "lr": "0.001,0.03,0.1,1e9", "seed": "0,1"}


class Killed(Exception):
    pass


def play(plan, out, kill_after=math.inf):
    """Play a tuning; the rounds that were played by run, in order."""
    rounds = []

    def told(name, record):
        rounds.append((name, record["round"]))
        if len(rounds) >= kill_after:
            raise Killed

    for batch in plan.batches:
        while work := tune.next_runs(batch, plan, out):
            say = [lambda record, cell=cell: told(cell.name, record) for cell in work]
            sweep.run(work, DIGITS, out, "cpu", say, lambda message: None)
            tune.write(plan, out)
    return rounds


def timeless(out):
    found = tune.read(out / "tune.json")
    return [{k: v for k, v in tried.items() if k != "seconds"} for tried in found["settings"]]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("tunings") / "tuned"
    plan = tune.plan(cells(FOUR), [], [1, 2])
    return plan, out, play(plan, out)


def test_the_worse_half_stops_and_nothing_is_played_twice(tuned):
    _, out, rounds = tuned
    assert len(rounds) == len({*rounds})
    reached = {name: max(t for n, t in rounds if n == name) for name, _ in rounds}
    settings = tune.read(out / "tune.json")["settings"]
    by_lr = {s["varied"]["lr"]: s for s in settings}
    assert sorted(by_lr) == [0.001, 0.03, 0.1, 1e9]
    score = {lr: by_lr[lr]["scores"] for lr in by_lr}
    assert score[1e9] == {"1": None}  # diverged
    first = sorted((0.001, 0.03, 0.1), key=lambda lr: -score[lr]["1"])
    assert [len(score[lr]) for lr in first[2:]] == [1]
    assert {lr for lr in score if "2" in score[lr]} == {*first[:2]}
    second = sorted(first[:2], key=lambda lr: -score[lr]["2"])
    assert {lr for lr in score if "4" in score[lr]} == {second[0]}
    assert [lr for lr in by_lr if by_lr[lr]["chosen"]] == [second[0]]
    assert by_lr[second[0]]["seeds"] == [0, 1]
    for seed in (0, 1):
        assert reached[f"lr{second[0]}-seed{seed}"] == 4
        assert reached[f"lr{second[1]}-seed{seed}"] == 2
    assert not list(out.glob("*/checkpoint"))
    summary = RunFolder(out / f"lr{second[0]}-seed0").ending()
    assert summary["evaluated_on"] == "validation"
    assert summary["extended"] == [1, 2]


def test_scores_are_means_over_seeds_of_the_round(tuned):
    _, out, _ = tuned
    for tried in tune.read(out / "tune.json")["settings"]:
        for rung, value in tried["scores"].items():
            if value is not None:
                runs = [RunFolder(out / f"lr{tried['varied']['lr']}-seed{seed}").read_rounds() for seed in (0, 1)]
                assert value == pytest.approx(sum(r[int(rung) - 1]["accuracy"]["all"] for r in runs) / 2)


def test_going_on_from_a_rung_ends_as_playing_through(tuned, tmp_path):
    _, out, _ = tuned
    (best,) = tune.choices(tune.read(out / "tune.json"), out)
    whole = fedman.run(**{**best["config"], "seed": 0}, out=tmp_path / "whole", device="cpu")
    parts = RunFolder(out / f"lr{best['varied']['lr']}-seed0").read_rounds()
    assert [r["accuracy"] for r in parts if r["round"] == 4] == [whole.rounds[-1]["accuracy"]]
    assert parts[-1]["loss"] == whole.rounds[-1]["loss"]


@pytest.mark.parametrize(
    "after", [pytest.param(3, marks=pytest.mark.slow), 10, pytest.param(13, marks=pytest.mark.slow)]
)
def test_a_killed_tuning_goes_on_and_chooses_the_same(tuned, tmp_path, after):
    plan, out, rounds = tuned
    assert after < len(rounds)
    with pytest.raises(Killed):
        play(plan, tmp_path, after)
    play(plan, tmp_path)
    assert timeless(tmp_path) == timeless(out)
    assert play(plan, tmp_path) == []


def test_the_choice_as_a_file_a_sweep_and_a_table(tuned, capsys):
    plan, out, _ = tuned
    tune.write(plan, out)
    (best,) = tune.choices(tune.read(out / "tune.json"), out)
    config = resolve(read_toml(out / "best.toml"))
    assert (config.lr, config.validation, config.rounds) == (best["varied"]["lr"], 0.0, 4)
    assert config.eval_every == 1
    main_ok(["tune", "--best", "--out", str(out)])
    assert capsys.readouterr().out == f"fedman run --config {out / 'best.toml'}\n"
    grid = cells({"seed": "0,1,2", "partition": "iid,dir0.3"}, tune.chosen_sweep(out))
    assert [(c.config.seed, c.config.partition) for c in grid] == [(s, p) for s in range(3) for p in ("iid", "dir0.3")]
    assert {(c.config.lr, c.config.validation) for c in grid} == {(best["varied"]["lr"], 0.0)}
    assert [c.config for c in cells({}, tune.chosen_sweep(out / "tune.json"))] == [
        c.config for c in cells({"seed": "0,1"}, tune.chosen_sweep(out))
    ]
    several = cells({"seed": "0"}, tune.chosen_sweep(out.parent))  # all that lie in a folder
    assert [c.config for c in several] == [grid[1].config]
    table = tune.table(tune.read(out / "tune.json"))
    assert table.title == "validation accuracy of the mean of all clients, %"
    assert table.header == ["lr", "round 1", "round 2", "round 4", "s", "chosen"]
    assert [row[-1] for row in table.rows] == ["●", "", "", ""]
    assert table.rows[-1][:4] == ["1000000000.0", "diverged", "–", "–"]


def race(scores, rungs, lower=False):
    """Successive halving of settings whose values after each round are given."""
    grid = cells({**KEYS, "lr": ",".join(f"0.{i + 1}" for i in range(len(scores)))})
    group = [Setting((cell,)) for cell in grid]
    plan = tune.Plan((tuple(group),), (), tuple(rungs), Headline("rmse", True) if lower else Headline())
    runs = {c.name: Played(v, len(v), diverged, 0.0) for c, (v, diverged) in zip(grid, scores, strict=True)}
    return progress(group, plan, runs)


def test_halving_by_hand():
    going = [([5, 6, 7], False), ([4, 9, 9], False), ([3], False)]
    found = race(going, [1, 3])
    assert (found.scores, found.left, found.next, found.best) == ([{1: 5, 3: 7}, {1: 4, 3: 9}, {1: 3}], [1], None, 1)
    assert race(going, [2, 3]).next == 2  # the third has not come so far
    assert race(going, [1, 3], lower=True).left == [2, 1]  # the better half is the lower
    assert race(going, [1, 3], lower=True).next == 3
    equal = race([([5, 5], False), ([5, 5], False)], [1, 2])
    assert equal.best == 0
    assert race([([5], True), ([4, 4], False)], [1, 2]).best is None  # the better one diverged later, the other stopped
    lost = race([([], True), ([], True)], [1])
    assert (lost.next, lost.best) == (None, None)  # all diverged: there is nothing left to play
    assert race([([5, None, 5], False), ([4, None, 6], False)], [3]).best == 1


BAD = [
    (["lr=0.1"], "tune: one setting alone; give a key several values, as lr=0.03,0.1"),
    (["lr=0.1,0.2", "validation=0"], "validation: 0 leaves nothing to choose by; give a share, as validation=0.1"),
    (["lr=0.1,0.2", "validation=1"], "validation: should be less than 1"),
    (["lr=0.1,0.2", "validation=0.0001"], "validation: 0.0001 of 1437 training samples are 0"),
    (["learning_rate=0.1,0.2"], "learning_rate: no such key"),
    (["alpha=0.1,0.2"], "alpha: fedavg has no such hyper-parameter"),
    (["lr=0.1,0.1"], "lr: a value stands twice"),
    (["lr=0.1,fast"], "lr: should be a number"),
    (["rounds=3,4"], "rounds: runs of different lengths cannot be compared"),
    (["lr=0.1,0.2", "--each", "zeta"], "each: 'zeta' has not several values; lr has"),
    (["lr=0.1,0.2", "--each", "lr"], "tune: one setting alone has lr=0.1; give a key several values"),
    (["lr=0.1,0.2", "--each", "lr,"], "each: 'lr,' has an empty word"),
    (["lr=0.1,0.2", "--rungs", "5", "rounds=5"], "rungs: '5' are not ascending rounds between 0 and the 5 of a run"),
    (["lr=0.1,0.2", "--rungs", "3,2"], "rungs: '3,2' are not ascending"),
    (["lr=0.1,0.2", "--rungs", "two"], "rungs: 'two' is not a list of rounds, as 100,250"),
    (["lr=0.1,0.2", "lr_schedule=cosine", "--rungs", "2"], "rungs: a run with lr_schedule=cosine cannot go on"),
    (["--best"], "No such file or directory"),
    (["--preset", "nothing", "lr=0.1,0.2"], "preset: no preset named 'nothing'"),
]


@pytest.mark.parametrize(
    ("words", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_plans_end_in_one_line_and_write_nothing(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = refused(capsys, ["tune", *words])
    assert message in told
    assert told.count("\n") == 1
    assert not list(tmp_path.rglob("summary.json"))


def test_a_folder_of_another_tuning_is_refused(tuned):
    _, out, _ = tuned
    plan = tune.plan(cells({**FOUR, "clip": "5"}), [], [1, 2])
    with pytest.raises(UserError, match=r"lr0\.001-seed0: holds a run of another configuration; clip differ"):
        tune.next_runs(plan.batches[0], plan, out)


def test_scores_are_those_of_this_tunings_rounds(tuned, tmp_path):
    """A longer run has other rates with some schedules, and was evaluated in other rounds."""
    _, out, _ = tuned
    shorter = tune.plan(cells({**FOUR, "rounds": "3"}), [], [1, 2])
    with pytest.raises(UserError, match=r"lr[0-9.]+-seed0: holds a run of 4 rounds, not 3; choose another --out"):
        tune.next_runs(shorter.batches[0], shorter, out)
    grid = cells({**KEYS, "lr": "0.03,0.1"})
    play(tune.plan(grid, [], []), tmp_path)
    rungs = tune.plan(grid, [], [2])
    with pytest.raises(UserError, match=r"lr0\.03: was not evaluated after round 2; choose another --out"):
        tune.next_runs(rungs.batches[0], rungs, tmp_path)


def test_bad_files_are_refused(tuned, tmp_path, capsys):
    _, out, _ = tuned
    good = json.loads((out / "tune.json").read_text())
    (lost,) = [tried for tried in good["settings"] if tried["scores"] == {"1": None}]
    for content, message in (
        ("{", "not JSON"),
        ('{"format": 2}', "not a tuning in format 1"),
        (json.dumps({**good, "settings": [{"chosen": True}]}), "settings.0.varied is missing"),
        (json.dumps({**good, "settings": []}), "no setting is chosen yet"),
        (json.dumps({**good, "settings": [lost]}), "no setting could be chosen; all of them diverged"),
    ):
        (tmp_path / "tune.json").write_text(content)
        assert message in refused(capsys, ["sweep", "--tuned", str(tmp_path), "seed=0"])
    assert "no tune.json here" in refused(capsys, ["sweep", "--tuned", str(out / "lr0.1-seed0")])
    told = refused(capsys, ["sweep", "--tuned", str(out), "--preset", "digits"])
    assert "holds whole settings; leave out --preset digits" in told


def test_choices_apart_and_batches(tmp_path):
    grid = cells({**KEYS, "algorithm": "fedavg,feddyn", "zeta": "0,0.1", "lr": "0.1,0.2", "alpha": "0.1"})
    plan = tune.plan(grid, ["algorithm", "zeta"], [])
    assert [[s.varied["lr"] for s in group] for group in plan.groups] == [[0.1, 0.2]] * 4
    assert [len(batch) for batch in plan.batches] == [2, 2]
    assert len(tune.plan(grid, ["zeta"], []).batches) == 1
    assert plan.rungs == (4,)
    first = tune.next_runs(plan.batches[0], plan, tmp_path)
    assert {(c.config.algorithm, c.config.rounds, c.config.keep_state) for c in first} == {("fedavg", 4, False)}
    rungs = tune.plan(grid, ["algorithm"], [1, 3])
    assert {(c.config.rounds, c.config.keep_state) for c in tune.next_runs(rungs.batches[1], rungs, tmp_path)} == {
        (1, True)
    }


def test_parts_of_a_tuning_share_a_file(tmp_path):
    """What a part tried stays while others are played; another tuning in the same folder is refused."""
    axes = {"algorithm": ("fedavg", "fedprox"), "lr": ("0.03", "0.1")}
    base = Sweep("both", (Grid(Preset({**KEYS, "rounds": 1, "validation": 0.1}), axes),))

    def tune_part(out, each=("algorithm",), **keys):
        planned = tune.plan(cells(keys, base), each, [])
        play(planned, out)
        return tune.write(planned, out)

    tune_part(tmp_path / "parts", algorithm="fedprox")
    parts = tune_part(tmp_path / "parts", algorithm="fedavg")
    assert [tried["varied"]["algorithm"] for tried in parts["settings"]] == ["fedprox"] * 2 + ["fedavg"] * 2
    assert len(cells({}, tune.chosen_sweep(tmp_path / "parts"))) == 2
    tune_part(tmp_path / "whole")
    assert tune_part(tmp_path / "parts") == tune.read(tmp_path / "parts/tune.json")
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    with pytest.raises(UserError, match=r"tune\.json: of a tuning with other each; choose another --out"):
        tune_part(tmp_path / "parts", each=(), algorithm="fedavg")
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


def test_two_processes_may_play_parts_of_a_tuning(tmp_path):
    """What one writes while the other waits to write is not lost."""
    base = Sweep(
        "both", (Grid(Preset({**KEYS, "rounds": 1}), {"algorithm": ("fedavg", "fedprox"), "lr": ("0.03", "0.1")}),)
    )
    plans = [tune.plan(cells({"algorithm": name}, base), ["algorithm"], []) for name in ("fedavg", "fedprox")]
    for plan in plans:
        for batch in plan.batches:
            sweep.run(tune.next_runs(batch, plan, tmp_path), DIGITS, tmp_path, "cpu", [print] * 2, print)
    with ThreadPoolExecutor() as pool:
        with locked(tmp_path):
            waiting = [pool.submit(tune.write, plan, tmp_path) for plan in plans]
            assert not wait(waiting, timeout=0.5).done
            assert not (tmp_path / "tune.json").exists()
        for each in waiting:
            each.result()
    assert {tried["varied"]["algorithm"] for tried in tune.read(tmp_path / "tune.json")["settings"]} == {
        "fedavg", "fedprox",
    }  # fmt: skip


def test_tuned_methods_are_compared_whatever_was_chosen_for_them(tmp_path, capsys):
    """Plain and penalised stand in one row though their settings differ; two settings of one method do not."""
    words = [f"{k}={v}" for k, v in {**KEYS, "rounds": 2}.items()]
    tuning = ["tune", *words, "--each", "algorithm,zeta", "algorithm=fedavg,feddyn", "zeta=0,0.1", "lr=0.01,0.1"]
    main_ok([*tuning, "--out", str(tmp_path / "tuned")])
    settings = json.loads((tmp_path / "tuned/tune.json").read_text())["settings"]
    for tried in settings:  # with the penalty another rate is chosen
        tried["chosen"] = tried["varied"]["lr"] == (0.01 if tried["varied"]["zeta"] else 0.1)
    known = {**json.loads((tmp_path / "tuned/tune.json").read_text()), "settings": settings}
    (tmp_path / "tuned/tune.json").write_text(json.dumps(known))
    capsys.readouterr()
    main_ok(["sweep", "--tuned", str(tmp_path / "tuned"), "seed=0,1", "--out", str(tmp_path / "out")])
    table = (tmp_path / "out/table.md").read_text().splitlines()
    assert table[0] == "| method | plain | +MAN ζ=0.1 | gain |"
    assert [line.split("|")[1].strip() for line in table[2:4]] == ["FedAvg", "FedDyn"]
    assert not any("–" in line for line in table[2:4])
    both = [{**tried, "chosen": True} for tried in settings]
    (tmp_path / "tuned/tune.json").write_text(json.dumps({**known, "settings": both}))
    several = tune.chosen_sweep(tmp_path / "tuned")
    labels = [row[0] for row in sweep.tables(cells({}, several), tmp_path / "out", {}, several.tuned)[0].rows]
    assert labels == ["FedAvg lr=0.1", "FedAvg lr=0.01", "FedDyn lr=0.1", "FedDyn lr=0.01"]


def test_choices_that_are_missing_are_named(tmp_path, capsys):
    def tried(algorithm, zeta, chosen, *scores):
        config = {"algorithm": algorithm, "zeta": zeta, "validation": 0.1}
        return [
            {"varied": {"algorithm": algorithm, "zeta": zeta}, "config": config, "seeds": [0],
             "scores": score, "chosen": chosen}
            for score in scores
        ]  # fmt: skip

    settings = [
        *tried("fedavg", 0.0, True, {"4": 50.0}),
        *tried("fedavg", 0.1, False, {"4": None}, {"2": None}),
        *tried("feddyn", 0.0, False, {"2": 40.0}, {}),
    ]
    known = {"format": 1, "headline": "accuracy", "lower_is_better": False, "each": ["algorithm", "zeta"],
             "rungs": [2, 4], "settings": settings}  # fmt: skip
    (tmp_path / "tune.json").write_text(json.dumps(known))
    main_ok(["sweep", "--tuned", str(tmp_path), "--out", str(tmp_path / "out"), "--left"])
    told = capsys.readouterr()
    assert "tune.json: nothing is chosen for fedavg 0.1 (diverged), feddyn 0.0; repeat the fedman tune" in told.err
    assert told.out.splitlines() == ["fedavg-zeta0.0-seed0"]
