"""The folder of a run: what is left by a crash, what is damaged, and that no run is overwritten."""

import json

import pytest

import fedman
from fedman.errors import UserError
from fedman.runs.folder import SUMMARY as FILE
from fedman.runs.folder import RunFolder, find_runs
from tests.runs.run_records import RECORD, SUMMARY

SMALL = {"model": "mlp", "clients": 8, "participation": 0.4, "rounds": 4, "epochs": 1, "batch_size": 20}


def test_records_that_cannot_be_written(tmp_path):
    """A disk that is full says so in the first record; the folder can be let go of all the same."""
    with RunFolder(tmp_path) as folder:
        folder.rounds.symlink_to("/dev/full")
        with pytest.raises(UserError, match=r"rounds\.jsonl: cannot be written: No space left on device"):
            folder.append(RECORD)


def test_a_folder_deleted_under_the_run(tmp_path):
    def delete(record):
        if record["round"] == 2:
            for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            (tmp_path / "run").rmdir()

    with pytest.raises(UserError, match=r"cannot be written: No such file or directory"):
        fedman.run(**SMALL, checkpoint_seconds=0.0, out=tmp_path / "run", progress=delete)
    assert not (tmp_path / "run").exists()


def test_checkpoints_leave_room_for_two_and_clear_what_was_left_half_done(tmp_path):
    names = []

    def look(record):
        folder = tmp_path / "checkpoint"
        if record["round"] == 3:
            (folder / ".round-000003.safetensors.123").write_bytes(b"half")
            (folder / "round-000001.safetensors").write_bytes(b"without its json")
        if folder.exists():
            names.append(sorted(p.name for p in folder.iterdir()))

    fedman.run(**{**SMALL, "rounds": 5}, checkpoint_seconds=0.0, out=tmp_path, progress=look)
    pairs = [[f"round-{t:06d}.{end}" for t in rounds for end in ("json", "safetensors")] for rounds in ([1], [1, 2])]
    assert names[:2] == pairs
    assert names[3] == [
        "round-000003.json",
        "round-000003.safetensors",
        "round-000004.json",
        "round-000004.safetensors",
    ]


def test_what_a_killed_process_staged_is_cleared(tmp_path):
    (tmp_path / ".model.safetensors.123").write_bytes(b"half")
    (tmp_path / ".mine.1").write_text("not ours")
    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path)
    (tmp_path / "checkpoint").mkdir()  # as if killed between the summary and the end
    (tmp_path / "checkpoint" / "round-000001.json").touch()
    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path, resume=True)
    written = {".lock", "config.toml", "model.safetensors", "rounds.jsonl", "summary.json"}
    assert {p.name for p in tmp_path.rglob("*")} == written | {".mine.1"}


def test_a_run_is_not_overwritten(tmp_path):
    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"holds a run already; add --resume \(in Python resume=True\)"):
        fedman.run(**SMALL, out=tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.fixture
def unfinished(tmp_path):
    with RunFolder(tmp_path) as folder:
        for t in (1, 2, 3):
            folder.append(RECORD | {"round": t})
    return folder


@pytest.fixture
def finished(unfinished):
    unfinished.write_ending(SUMMARY)
    return unfinished


DAMAGED = [
    json.dumps(RECORD | {"round": 2})[:-5],
    json.dumps(RECORD | {"round": "two"}),
    json.dumps(RECORD | {"accuracy": {"all": 1e308}}),
    json.dumps(RECORD | {"loss": float("nan")}),
    json.dumps(RECORD | {"penalty": {"\ud800": 1.0}}),
    "[" * 100_000,
    "[]",
    "\0" * 10,
    "",
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_record_ends_the_records_of_a_run_under_way(unfinished, line):
    first, _, third = unfinished.rounds.read_text().splitlines()
    unfinished.rounds.write_text(f"{first}\n{line}\n{third}\n")
    assert [record["round"] for record in unfinished.read_rounds()] == [1]
    with pytest.raises(UserError, match=r"rounds\.jsonl: ends before the checkpoint's round 2; start again"):
        unfinished.truncate(2)
    assert unfinished.truncate(1) == [RECORD]
    assert unfinished.rounds.read_text() == first + "\n"


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_record_of_a_finished_run_is_named(finished, line):
    first, _, third = finished.rounds.read_text().splitlines()
    finished.rounds.write_text(f"{first}\n{line}\n{third}\n")
    with pytest.raises(UserError, match=r"^[^\n]*rounds\.jsonl: line 2: [^\n]{,300}$"):
        finished.read_rounds()


@pytest.mark.parametrize("file", ["summary", "diverged"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"config": {', "not JSON"),
        ("[" * 100_000, "not JSON: recursion limit"),
        ('{"device": "\\ud800"}', "not JSON"),
        ("\xff", "not JSON|should be"),
        ("[]", r"should be a JSON object, not \[\]"),
        ("{}", "config is missing"),
        ('{"config": 3}', "config should be a JSON object, not 3"),
        ('{"config": {"lr": [0.1]}}', r"config\.lr should be a number, a string, true or false, not \[0.1\]"),
    ],
)
def test_endings_that_are_none(tmp_path, file, text, message):
    folder = RunFolder(tmp_path)
    path = getattr(folder, file)
    path.write_text(text)
    with pytest.raises(UserError, match=rf"^{path}: ({message})[^\n]*$"):
        folder.ending()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", 1e308),
        ("seconds", "1"),
        ("accuracy", {"all": 1e308}),
        ("accuracy", {"all": float("nan")}),
        ("rounds_to_target", 1.5),
        ("device", None),
    ],
)
def test_summaries_with_a_wrong_field(finished, key, value):
    finished.summary.write_text(json.dumps(json.loads(finished.summary.read_text()) | {key: value}))
    with pytest.raises(UserError, match=rf"^{finished.summary}: {key}[^\n]* should be [^\n]*$"):
        finished.ending()


def test_a_finished_run_is_told_from_one_of_another_configuration(finished):
    same = SUMMARY["config"] | {"data_dir": "elsewhere"}
    assert finished.finished(same)["method"] == "FedAvg"
    with pytest.raises(UserError, match="holds a run of another configuration; lr, seed differ"):
        finished.finished(same | {"seed": 1, "lr": 0.1})


def test_models_that_cannot_be_read(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match=r"model\.safetensors: no such file"):
        folder.read_models()
    folder.model.write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        folder.read_models()


def test_half_copied_runs_are_not_found(finished):
    (finished.path / "a").mkdir()
    (finished.path / ".b.123").mkdir()
    for name in ("a", ".b.123"):
        (finished.path / name / "summary.json").touch()
    assert [run.path for run in find_runs(finished.path, FILE)] == [finished.path, finished.path / "a"]
