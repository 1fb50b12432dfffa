"""Checkpoints: what they hold, and what happens to those that are damaged, foreign or ahead of the records."""

import contextlib
import json
import random
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedman
from faults.runs import fingerprint
from fedman.config import resolve
from fedman.errors import UserError
from fedman.execution.device import pick_precision
from fedman.runs import checkpoint, experiment, results, run_under_way
from fedman.runs.checksums import Chain, digest
from fedman.runs.folder import RunFolder
from fedman.runs.records import is_explained
from fedman.runs.row_file import RowFile
from fedman.training.client_rows import ClientRows
from tests.cli.command_line import main_ok, refused

KEYS = {
    "model": "mlp", "clients": 8, "participation": 0.4, "rounds": 5, "epochs": 1, "batch_size": 20,
    "algorithm": "feddc", "checkpoint_seconds": 0.0,
}  # fmt: skip


def stop_after(rounds):
    def stop(record):
        if record["round"] == rounds:
            raise KeyboardInterrupt

    return stop


@pytest.fixture
def stopped(tmp_path):
    """A run that was ended after its third round; the checkpoints of rounds 2 and 3, and the clients' rows."""
    with pytest.raises(KeyboardInterrupt):
        fedman.run(**KEYS, out=tmp_path / "run", progress=stop_after(3))
    files = sorted((tmp_path / "run" / "checkpoint").iterdir())
    rounds = [f"round-00000{t}.{end}" for t in (2, 3) for end in ("json", "safetensors")]
    assert [f.name for f in files] == ["clients.rows", *rounds]
    return tmp_path / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    fedman.run(**KEYS, out=out)
    return fingerprint(out)


def newest(run, end):
    return sorted(run.glob(f"checkpoint/*.{end}"))[-1]


def resumed(run, **changes):
    played = []
    fedman.run(**{**KEYS, **changes}, out=run, resume=True, progress=lambda r: played.append(r["round"]))
    return played


def test_only_rows_of_clients_seen_are_stored(stopped):
    played = [record["cohort"] for record in RunFolder(stopped).read_rounds()]
    seen = {k for cohort in played for k in cohort}
    assert len(seen) < KEYS["clients"]
    tensors = load_file(newest(stopped, "safetensors"))
    assert len(set(tensors["rows.record"].tolist())) == len(seen)
    record = 3 * tensors["sel"].nbytes  # the last model, h and g
    assert (stopped / "checkpoint" / "clients.rows").stat().st_size == record * sum(map(len, played))


def test_a_checkpoint_writes_the_rows_that_changed(tmp_path, monkeypatch):
    written = []
    write = RowFile.write
    monkeypatch.setattr(RowFile, "write", lambda file, ids, rows: (written.append(ids), write(file, ids, rows)))
    fedman.run(**KEYS, out=tmp_path)
    assert written == [record["cohort"] for record in RunFolder(tmp_path).read_rounds()]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_rows(stopped, whole, damage):
    """Rows of the newest checkpoint alone give way to the one before it; rows of both are refused by name."""
    path, tensors = stopped / "checkpoint" / "clients.rows", newest(stopped, "safetensors")
    old, new = (set(load_file(p)["rows.record"].tolist()) for p in (tensors.with_stem("round-000002"), tensors))
    length, content = 3 * load_file(tensors)["sel"].nbytes, bytearray(path.read_bytes())
    both, before = max(old & new), {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    if damage == "flipped":
        content[max(new - old) * length + length // 2] ^= 1
        path.write_bytes(content)
        assert resumed(stopped) == [3, 4, 5]
        assert fingerprint(stopped) == whole
        for p, good in before.items():
            p.parent.mkdir(exist_ok=True)
            p.write_bytes(good)
        (stopped / "summary.json").unlink()
        content[both * length + length - 1] ^= 1
    path.write_bytes(content[: both * length + length - 1] if damage == "cut" else content)
    if damage == "gone":
        path.unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged; start again in a new folder"):
        resumed(stopped)


def test_restored_vectors_are_aligned_as_torch_aligns_them(stopped, monkeypatch):
    """The last bit of a matrix product can depend on it; in the file they lie wherever the tensors before them end."""
    vectors, lay_over = [], checkpoint._lay_over

    def noted(state, *found):
        lay_over(state, *found)
        vectors.extend([state.sel["w"], state.total, *state.server.values()])

    monkeypatch.setattr(checkpoint, "_lay_over", noted)
    resumed(stopped)
    assert len(vectors) == 5
    assert [v.data_ptr() % 64 for v in vectors] == [0] * 5


def test_rows_of_another_length_are_refused(stopped, monkeypatch):
    """What is kept of a client is not all of it of the model's length."""
    kept = ClientRows.notes
    monkeypatch.setattr(
        ClientRows, "notes", lambda rows: {"row": {**kept(rows)["row"], "memory.m": [3, "torch.int64"]}}
    )
    with pytest.raises(UserError, match=r"round-000003\.json: from another model; what it holds of a client is not"):
        resumed(stopped)


@pytest.mark.parametrize("end", ["safetensors", "json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(stopped, whole, end, damage):
    path = newest(stopped, end)
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        content[content.index(b'"round": 3') + 9 if end == "json" else len(content) // 2] ^= 1  # round 2, still JSON
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    assert resumed(stopped) == [3, 4, 5]
    assert fingerprint(stopped) == whole


def test_no_flipped_bit_changes_a_result(stopped, whole):
    """Wherever a bit of the newest description flips: the run goes on to the same result, or is refused by name."""
    path = newest(stopped, "json")
    sound = 0
    good, rng = path.read_bytes(), random.Random(0)
    files = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    for _ in range(12):
        shutil.rmtree(stopped)
        for p, content in files.items():
            p.parent.mkdir(parents=True, exist_ok=True)
            p.write_bytes(content)
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with contextlib.suppress(UserError):  # where the format's number itself is hit
            resumed(stopped)
            assert fingerprint(stopped) == whole
            sound += 1
    assert sound > 9


def test_all_damaged(stopped):
    for path in stopped.glob("checkpoint/*.json"):
        path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="every checkpoint is damaged; start again in a new folder"):
        resumed(stopped)


def test_another_configuration_is_refused(stopped):
    with pytest.raises(UserError, match=r"round-000003\.json: from another configuration; lr, zeta differ"):
        resumed(stopped, zeta=0.2, lr=0.05)


def test_another_format_is_refused(stopped):
    path = newest(stopped, "json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(UserError, match=r"round-000003\.json: checkpoint format 99, this version reads 3; finish"):
        resumed(stopped)


@pytest.mark.parametrize("old", [1, 2])
def test_earlier_formats_are_refused_with_the_way_out(stopped, old):
    """The first had neither version nor notes, and one hash; in the second the rows stood among the tensors."""
    before = {}
    for path in stopped.glob("checkpoint/*.json"):
        new = json.loads(path.read_text()) | {"format": old}
        if old == 1:
            new = {key: new[key] for key in ("format", "round", "seen", "seconds", "config")} | {"sha256": new["data"]}
        path.write_text(json.dumps(new))
        before[path] = path.read_bytes()
    how = "finish the run with the version that wrote it, or start again in a new folder"
    with pytest.raises(
        UserError, match=rf"^\S*round-000003\.json: checkpoint format {old}, this version reads 3; {how}$"
    ):
        resumed(stopped)
    assert {path: path.read_bytes() for path in before} == before
    assert len(RunFolder(stopped).read_rounds()) == 3


def test_an_unfinished_run_may_have_more_rounds(stopped):
    assert resumed(stopped, rounds=7) == [4, 5, 6, 7]
    records = RunFolder(stopped).read_rounds()
    assert {r["round"]: r["extended_from"] for r in records if "extended_from" in r} == {4: 5}


def test_an_earlier_versions_records_are_said_to_be_unchecked(stopped, whole):
    (stopped / "manifest.json").unlink()
    rounds = stopped / "rounds.jsonl"
    rounds.write_text(re.sub(r', "sum": "\w+"}', "}", rounds.read_text()))
    unname_the_records(stopped)
    said = []
    experiment.run(resolve({**KEYS}), out=stopped, resume=True, warn=said.append)
    assert said == [f"{stopped}: written by an earlier version, without checksums; its records are not checked"]
    assert fingerprint(stopped) == whole


def test_a_checkpoint_that_names_no_records_is_said_to_be_an_earlier_versions(stopped, whole):
    unname_the_records(stopped)
    said = []
    experiment.run(resolve({**KEYS}), out=stopped, resume=True, warn=said.append)
    assert said == [f"{stopped}: an earlier version's checkpoint; whether the records belong to it is not checked"]
    assert fingerprint(stopped) == whole
    assert "records" in json.loads(newest(stopped, "json").read_text())


def unname_the_records(run):
    """Make the checkpoints those of earlier versions."""
    for path in run.glob("checkpoint/*.json"):
        about = json.loads(path.read_text())
        del about["records"]
        path.write_text(json.dumps(about | {"sha256": digest(about)}))


@pytest.mark.parametrize("other", ["seed", "time"])
def test_records_of_another_run_are_refused(stopped, tmp_path, other):
    """Sound in themselves: those of another seed, or of the same run at another time."""
    foreign = tmp_path / "other"
    fedman.run(**{**KEYS, "rounds": 3, "seed": int(other == "seed")}, out=foreign)
    (stopped / "rounds.jsonl").write_bytes((foreign / "rounds.jsonl").read_bytes())
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    wanted = r"rounds\.jsonl: not the records that the checkpoint of round 3 belongs to; put this run's own file back"
    with pytest.raises(UserError, match=wanted):
        resumed(stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_records_that_were_changed_with_their_checksums_are_refused(stopped):
    path = stopped / "rounds.jsonl"
    records = RunFolder(stopped).read_rounds()
    records[1]["loss"] += 1
    path.write_bytes(b"".join(map(Chain().line, records)))
    assert len(RunFolder(stopped).read_rounds()) == 3
    with pytest.raises(UserError, match="not the records that the checkpoint of round 3 belongs to"):
        resumed(stopped)


def test_a_changed_record_or_configuration_is_noticed_before_the_run_goes_on(stopped):
    rounds, config = stopped / "rounds.jsonl", stopped / "config.toml"
    good, before = rounds.read_text(), config.read_text()
    rounds.write_text(good.replace('"all": ', '"all": 9', 1))
    with pytest.raises(UserError, match=r"rounds\.jsonl: line 1: damaged \(its checksum differs"):
        resumed(stopped)
    rounds.write_text(good)
    config.write_text(before.replace("clients = 8", "clients = 9"))
    with pytest.raises(UserError, match=r"config\.toml: damaged"):
        RunFolder(stopped).read_config()


@pytest.mark.parametrize("seen", [[8], [-1], [10**9]])
def test_clients_that_there_are_not_are_refused(stopped, seen):
    """Even if the hash agrees."""
    path = newest(stopped, "json")
    about = json.loads(path.read_text()) | {"seen": seen}
    path.write_text(json.dumps(about | {"sha256": digest(about)}))
    with pytest.raises(
        UserError, match=r"round-000003\.json: from another configuration; it names clients beyond the 8"
    ):
        resumed(stopped)


def test_another_module_is_refused(tmp_path):
    """The module is not part of the configuration, so its shapes are compared."""
    keys = {**KEYS, "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}
    with pytest.raises(KeyboardInterrupt):
        fedman.run(**keys, out=tmp_path, progress=stop_after(1))
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 11))
    with pytest.raises(UserError, match="holds a run with another model of your own"):
        fedman.run(**{**keys, "model": other}, out=tmp_path, resume=True)
    path = newest(tmp_path, "json")
    about = {k: v for k, v in json.loads(path.read_text()).items() if k != "inputs"}  # as earlier versions wrote it
    path.write_text(json.dumps(about | {"sha256": digest(about)}))
    with pytest.raises(UserError, match=r"from another model; server\.w is not of shape \[715\]"):
        fedman.run(**{**keys, "model": other}, out=tmp_path, resume=True)


def test_another_version_is_named_and_goes_on(stopped, whole, monkeypatch):
    said = []
    monkeypatch.setattr(checkpoint, "version", lambda: "9.9")
    experiment.run(resolve({**KEYS}), out=stopped, resume=True, warn=said.append)
    assert len(said) == 1
    assert "written by fedman" in said[0]
    assert "this is 9.9" in said[0]
    assert fingerprint(stopped) == whole


@pytest.mark.parametrize("changed", [False, True])
def test_a_result_names_all_code_that_computed_its_rounds(tmp_path, monkeypatch, changed):
    """It is explained if commits have all of it."""
    first, second = {"commit": "a", "changed": changed}, {"commit": "b", "changed": False}
    for source, rounds in ((first, 1), (second, 2), (second, 9)):
        monkeypatch.setattr(run_under_way, "source", lambda source=source: source)
        with contextlib.suppress(KeyboardInterrupt):
            fedman.run(**KEYS, out=tmp_path, resume=source is second, progress=stop_after(rounds))
    summary = RunFolder(tmp_path).ending()
    assert (summary["source"], summary["earlier_sources"]) == (second, [first])
    assert is_explained(summary) is not changed
    (row,) = results.collect(tmp_path)
    assert row["earlier_sources"] == [first]


def classifier(width=5, activation=nn.Tanh):
    return nn.Sequential(nn.Linear(4, width), activation(), nn.Linear(width, 3))


def points(shift=0.0, n=60):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, 4)).astype(np.float32) + np.float32(shift), np.arange(n) % 3
    return x, y, x, y


OWN = {"clients": 6, "participation": 0.4, "epochs": 1, "batch_size": 5, "partition": "iid", "checkpoint_seconds": 0.0}


@pytest.mark.parametrize("rounds", [3, 5])  # of the run that is there: finished, or to go on
@pytest.mark.parametrize(
    ("data", "model", "named"),
    [
        (points(1.0), classifier(), "another dataset"),
        (points(n=57), classifier(), "another dataset"),
        (points(), classifier(activation=nn.ReLU), "another model"),
        (points(1.0), classifier(width=6), "another dataset and another model"),
    ],
)
def test_other_data_and_models_of_ones_own_are_refused(tmp_path, rounds, data, model, named):
    """In a notebook a cell is changed and run again."""
    with contextlib.suppress(KeyboardInterrupt):
        fedman.run(**OWN, rounds=rounds, dataset=points(), model=classifier(), out=tmp_path, progress=stop_after(4))
    before = sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(UserError, match=f"holds a run with {named} of your own; give those of the run"):
        fedman.run(**OWN, rounds=rounds, dataset=data, model=model, out=tmp_path, resume=True)
    assert sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()) == before


def test_a_module_may_have_other_weights_when_its_run_goes_on(tmp_path):
    """Those that clients start from are in the checkpoint."""
    torch.manual_seed(0)
    fedman.run(**OWN, rounds=5, dataset=points(), model=classifier(), out=tmp_path / "whole")
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        fedman.run(**OWN, rounds=5, dataset=points(), model=classifier(), out=tmp_path / "run", progress=stop_after(2))
    torch.manual_seed(1)
    result = fedman.run(**OWN, rounds=5, dataset=points(), model=classifier(), out=tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    assert set(result.summary["inputs"]) == {"dataset", "model"}
    assert "inputs" not in fedman.run(**{**OWN, "clients": 50}, rounds=1, out=tmp_path / "digits").summary


class Constant(nn.Module):
    """A frozen layer, an order of the inputs, a mask that is not stored."""

    def __init__(self, changed=""):
        super().__init__()
        self.o, self.f = nn.Linear(5, 3), nn.Linear(4, 5).requires_grad_(False)
        self.register_buffer("order", torch.arange(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("edges", torch.eye(4).to_sparse(), persistent=False)
        constant = {"f": self.f.weight, "order": self.order, "mask": self.mask, "edges": self.edges}
        if changed:
            constant[changed].mul_(2)

    def forward(self, x):
        return self.o(self.f(x[:, self.order % 4] * self.mask).tanh())


@pytest.mark.parametrize("changed", ["f", "order", "mask", "edges"])
def test_what_is_constant_in_a_module_is_the_same_when_its_run_goes_on(tmp_path, changed):
    def play(model_of="", **keys):
        torch.manual_seed(0)
        return fedman.run(**OWN, rounds=3, dataset=points(), model=Constant(model_of), out=tmp_path, **keys)

    with pytest.raises(KeyboardInterrupt):
        play(progress=stop_after(2))
    with pytest.raises(UserError, match="holds a run with another model of your own"):
        play(changed, resume=True)
    play(resume=True)


def test_a_lazy_module_is_one_line_when_a_run_goes_on_too(tmp_path):
    fedman.run(**OWN, rounds=1, dataset=points(), model=classifier(), out=tmp_path)
    with pytest.raises(UserError, match=r"0\.weight has no shape yet"):
        fedman.run(**OWN, rounds=1, dataset=points(), model=nn.Sequential(nn.LazyLinear(3)), out=tmp_path, resume=True)


def test_a_part_of_a_known_data_set_is_data_of_ones_own(tmp_path):
    whole = fedman.data.load("digits")
    first, second = (
        replace(whole, x_train=whole.x_train[at], y_train=whole.y_train[at]) for at in (slice(700), slice(700, 1400))
    )
    fedman.run(**OWN, rounds=1, dataset=first, model="mlp", out=tmp_path)
    fedman.run(**OWN, rounds=2, dataset=first, model="mlp", out=tmp_path, resume=True)
    with pytest.raises(UserError, match="holds a run with another dataset of your own"):
        fedman.run(**OWN, rounds=3, dataset=second, model="mlp", out=tmp_path, resume=True)


def test_rounds_of_an_earlier_version_are_of_unknown_code(stopped):
    """Its checkpoints did not say which."""
    path = newest(stopped, "json")
    about = {k: v for k, v in json.loads(path.read_text()).items() if k != "computed"} | {"version": "0.0.9"}
    path.write_text(json.dumps(about | {"sha256": digest(about)}))
    resumed(stopped)
    summary = RunFolder(stopped).ending()
    assert summary["earlier_sources"] == [{"unknown": "fedman 0.0.9 did not say"}]
    assert not is_explained(summary)


def test_a_sweep_does_not_mix_data_sets_under_one_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "dataset=npz:d.npz", "model=mlp", "clients=6", "rounds=1", "epochs=1", "--out", "runs"]
    for shift in (0.0, 1.0):
        np.savez(tmp_path / "d.npz", **dict(zip(("x", "y"), points(shift), strict=False)))
        if not shift:
            main_ok([*words, "seed=0,1"])
            capsys.readouterr()
    assert "seed0: holds a run with another dataset of your own" in refused(capsys, [*words, "seed=0,1,2"])
    assert not (tmp_path / "runs/seed2").exists()


def test_a_file_that_was_rewritten_is_other_data(tmp_path):
    def write(shift):
        x, y, *_ = points(shift)
        np.savez(tmp_path / "d.npz", x=x, y=y)

    keys = {**OWN, "dataset": f"npz:{tmp_path / 'd.npz'}", "model": "mlp", "out": tmp_path / "run"}
    write(0.0)
    with pytest.raises(KeyboardInterrupt):
        fedman.run(**keys, rounds=4, progress=stop_after(2))
    write(0.5)
    with pytest.raises(UserError, match="holds a run with another dataset of your own"):
        fedman.run(**keys, rounds=4, resume=True)
    write(0.0)
    fedman.run(**keys, rounds=4, resume=True)
    write(0.5)
    with pytest.raises(UserError, match="holds a run with another dataset of your own"):
        fedman.run(**keys, rounds=4, resume=True)


def test_a_run_that_goes_on_in_another_precision_says_so(stopped, monkeypatch):
    before = pick_precision("auto", "cpu")
    monkeypatch.setattr("fedman.runs.build.pick_precision", lambda *_: "bf16")
    said = []
    summary = experiment.run(resolve({**KEYS}), out=stopped, resume=True, warn=said.append).summary
    assert [line.partition(": ")[2] for line in said] == [
        f"was computed in {before} and goes on in bf16, which is precision=auto on this device"
    ]
    assert summary["precision"] == f"{before}, bf16"


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_checkpoint_ahead_of_the_records_is_refused(stopped, lines):
    path = stopped / "rounds.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(UserError, match=r"rounds\.jsonl: ends before the checkpoint's round 3"):
        resumed(stopped)
    assert len(RunFolder(stopped).read_rounds()) == lines


@pytest.mark.parametrize(
    ("seconds", "writing", "due"), [(60, 1, [60, 121, 182]), (60, 12, [60, 192, 324]), (0, 12, [1, 14, 27])]
)
def test_checkpoints_cost_a_tenth_of_the_time_at_most(seconds, writing, due, monkeypatch):
    """Rounds of a second each, two stacked runs that write one after the other. With 0 s they write after each."""
    now = 0.0
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: now)
    timer, begun = checkpoint.Timer(seconds), []
    for t in range(1, 400):
        now += 1
        if timer.is_due(t):
            begun.append(now)
        for _ in range(2):
            if timer.is_due(t):
                now += writing / 2
                timer.restart()
    assert begun[:3] == due
