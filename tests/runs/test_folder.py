"""The folder of a run: what is left by a crash, what is damaged, and that no run is overwritten."""

import json
import os
import re
import stat

import pytest

import fedman
from fedman.errors import UserError
from fedman.runs import folder as folder_module
from fedman.runs import manifest, records, row_file
from fedman.runs.atomic import staged_name
from fedman.runs.checksums import sha256
from fedman.runs.folder import SUMMARY as FILE
from fedman.runs.folder import RunFolder, find_runs
from tests.runs.run_records import RECORD, SUMMARY

SMALL = {"model": "mlp", "clients": 8, "participation": 0.4, "rounds": 4, "epochs": 1, "batch_size": 20}


def test_records_that_cannot_be_written(tmp_path, monkeypatch):
    """A disk that is full says so in the first record; the folder can be let go of all the same."""
    with RunFolder(tmp_path) as folder:
        monkeypatch.setattr(folder_module, "_open", lambda name, flags: os.open("/dev/full", flags))
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
            names.append(sorted(p.name for p in folder.iterdir() if p.name != row_file.NAME))

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
    theirs = {".mine.1", ".config.toml.backup", ".config.toml.1.txt"}
    for name in theirs:
        (tmp_path / name).write_text("not ours")
    fedman.run(**{**SMALL, "rounds": 1}, keep_state=False, out=tmp_path)
    (tmp_path / "checkpoint").mkdir()  # as if killed between the summary and the end
    (tmp_path / "checkpoint" / "round-000001.json").touch()
    fedman.run(**{**SMALL, "rounds": 1}, keep_state=False, out=tmp_path, resume=True)
    written = {".lock", "config.toml", "manifest.json", "model.safetensors", "rounds.jsonl", "summary.json"}
    assert {p.name for p in tmp_path.rglob("*")} == written | theirs


def test_checkpoints_before_the_last_are_cleared_later(tmp_path):
    """As if killed between the summary and the end."""
    fedman.run(**{**SMALL, "rounds": 2}, out=tmp_path)
    names = {"round-000002.json", "round-000002.safetensors", row_file.NAME}
    for end in ("json", "safetensors"):
        (tmp_path / "checkpoint" / f"round-000001.{end}").touch()
    fedman.run(**{**SMALL, "rounds": 2}, out=tmp_path, resume=True)
    assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == names


def test_every_file_of_a_run_has_the_usual_mode(tmp_path):
    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path)
    (tmp_path / "usual").touch()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_file()}
    assert len(modes) > 8
    assert set(modes.values()) == {modes["usual"]}


def test_a_run_is_not_overwritten(tmp_path):
    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"holds a run already; add --resume \(in Python resume=True\)"):
        fedman.run(**SMALL, out=tmp_path)
    assert contents(tmp_path) == before


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_that_another_process_began_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """Both have found the folder empty; the second gets the lock when the first has finished, or was killed."""
    real, before = RunFolder.__enter__, {}

    def other_was_first(folder):
        monkeypatch.setattr(RunFolder, "__enter__", real)
        fedman.run(**SMALL, seed=1, out=tmp_path)
        before.update(contents(tmp_path))
        return real(folder)

    monkeypatch.setattr(RunFolder, "__enter__", other_was_first)
    with pytest.raises(UserError, match="holds a run already"):
        fedman.run(**SMALL, out=tmp_path)
    assert contents(tmp_path) == before


def test_there_must_be_a_run_to_resume(tmp_path):
    out = tmp_path / "mistyped"
    with pytest.raises(UserError, match=r"mistyped: holds no run that could be resumed \(no config\.toml\)"):
        fedman.run(**SMALL, out=out, resume=True)
    assert not out.exists()


# --- symbolic links and names ---------------------------------------------------------------------------------------


def test_links_are_not_followed(tmp_path):
    """Whatever of a run's folder is a link: what it leads to stays as it is."""
    victim = tmp_path / "victim"
    for name in (".lock", "rounds.jsonl", "config.toml", "summary.json", "model.safetensors", "manifest.json"):
        victim.write_text("precious")
        out = tmp_path / f"run-{name}"
        out.mkdir()
        (out / name).symlink_to(victim)
        if name in (".lock", "config.toml"):
            with pytest.raises(UserError, match=rf"{name}: cannot be written: Too many levels|holds a run already"):
                fedman.run(**{**SMALL, "rounds": 1}, out=out)
        elif name == "manifest.json":
            with pytest.raises(UserError, match=r"manifest\.json: not JSON"):
                fedman.run(**{**SMALL, "rounds": 1}, out=out)
        elif name == "summary.json":
            with pytest.raises(UserError, match=r"summary\.json: not JSON"):
                fedman.run(**{**SMALL, "rounds": 1}, out=out)
        else:
            fedman.run(**{**SMALL, "rounds": 1}, out=out)
            assert not (out / name).is_symlink()
        assert victim.read_text() == "precious"


def test_what_is_staged_does_not_go_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    for name in ("config.toml", "rounds.jsonl", "model.safetensors"):
        staged_name(tmp_path / "run" / name).symlink_to(victim)
    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path / "run")
    assert victim.read_text() == "precious"


def test_checkpoints_delete_nothing_but_checkpoints(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    mine = ["my-round-notes.txt", "round-1.json", "round-000001.json.txt", ".round-000001.json.old"]
    for name in mine:
        (folder / name).write_text("mine")
    fedman.run(**SMALL, checkpoint_seconds=0.0, keep_state=False, out=tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == sorted(mine)


def test_checkpoints_are_not_written_elsewhere(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "round-000001.json").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"checkpoint: is a symbolic link, which is not followed"):
        fedman.run(**SMALL, checkpoint_seconds=0.0, out=tmp_path / "run")
    assert [p.read_text() for p in elsewhere.iterdir()] == ["mine"]


# --- readers beside a run ------------------------------------------------------------------------------------------


def test_a_run_can_be_read_at_every_moment(tmp_path, monkeypatch):
    """An ending is listed before it is there, so that a kill leaves nothing unlisted; a reader was told of damage."""
    found, real = [], os.replace

    def read_around(staged, path):
        for step in (lambda: None, lambda: real(staged, path)):
            step()
            reader = RunFolder(tmp_path)
            found.append((reader.ending() is not None, len(reader.read_rounds())))

    monkeypatch.setattr("fedman.runs.atomic.os.replace", read_around)
    fedman.run(**{**SMALL, "rounds": 1}, keep_state=True, out=tmp_path)
    fedman.run(**{**SMALL, "rounds": 2}, keep_state=True, resume=True, out=tmp_path)
    assert {*found} == {(False, 0), (False, 1), (True, 1), (False, 2), (True, 2)}
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match=r"summary\.json: is missing, though manifest\.json lists it"):
        RunFolder(tmp_path).ending()


def test_a_file_that_was_written_while_it_was_read_is_read_again(finished, monkeypatch):
    real, new = records.content, json.dumps(SUMMARY | {"seconds": 2.0})

    def meanwhile(path):
        if path.name == "summary.json" and path.read_text() != new:
            path.write_text(new)
            manifest.write(path.parent, {path.name: sha256(new.encode())})
        return real(path)

    monkeypatch.setattr(records, "content", meanwhile)
    assert finished.ending()["seconds"] == 2.0


# --- damage ---------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def older(finished):
    """A finished run of an earlier version: no manifest, and records without sums."""
    finished.manifest.unlink()
    finished.rounds.write_text(without_sums(finished.rounds.read_text()))
    return finished


def without_sums(text):
    return re.sub(r', "sum": "\w+"}', "}", text)


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
    with pytest.raises(UserError, match=r"rounds\.jsonl: line 2: damaged .*; the checkpoint's round 3 needs it"):
        unfinished.start(3, {})
    assert unfinished.start(1, {}) == [RECORD]
    assert unfinished.rounds.read_text() == first + "\n"


@pytest.mark.parametrize("lines", ["132", "1", "12", "1223", "23", "13"])
def test_lost_swapped_and_repeated_records_are_noticed(unfinished, lines):
    """Each line by itself is sound."""
    written = unfinished.rounds.read_text().splitlines(keepends=True)
    unfinished.rounds.write_text("".join(written[int(k) - 1] for k in lines))
    with pytest.raises(UserError, match=r"line \d: damaged|ends before the checkpoint's round 3"):
        unfinished.start(3, {})


def test_any_flipped_bit_of_a_record_is_noticed(unfinished):
    content = unfinished.rounds.read_bytes()
    before = unfinished.read_rounds()
    for place in range(len(content)):
        unfinished.rounds.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 7]) + content[place + 1 :])
        assert unfinished.read_rounds() in ([], before[:1], before[:2]), place


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_record_of_a_finished_run_is_named(older, line):
    first, _, third = older.rounds.read_text().splitlines()
    older.rounds.write_text(f"{first}\n{line}\n{third}\n")
    with pytest.raises(UserError, match=r"^[^\n]*rounds\.jsonl: line 2: [^\n]{,300}$"):
        older.read_rounds()


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "gone", "folder"])
@pytest.mark.parametrize("name", ["config.toml", "rounds.jsonl", "summary.json", "model.safetensors", "manifest.json"])
def test_every_damaged_file_of_a_finished_run_is_named(tmp_path, name, how):
    fedman.run(**{**SMALL, "rounds": 2}, out=tmp_path)
    folder, path = RunFolder(tmp_path), tmp_path / name
    assert sorted(folder.check()) == ["config.toml", "model.safetensors", "rounds.jsonl", "summary.json"]
    content = bytearray(path.read_bytes())
    if how in ("gone", "folder"):
        path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    if (name, how) == ("manifest.json", "gone"):
        assert not folder.is_checked
        assert folder.check() == []
    else:
        with pytest.raises(UserError, match=rf"^{path}: [^\n]*$"):
            folder.check()


@pytest.mark.parametrize("name", ["../victim", "/etc/hostname", ".."])
def test_a_manifest_lists_files_of_its_folder(finished, name):
    manifest.write(finished.path, {name: "0" * 64})
    with pytest.raises(UserError, match=r"manifest\.json: damaged"):
        finished.check()


def test_an_earlier_versions_folder_is_read(older):
    assert older.ending()["method"] == "FedAvg"
    assert len(older.read_rounds()) == 3
    assert not older.is_checked


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "rounds.jsonl"])
def test_a_pipe_is_not_waited_for(older, name):
    path = older.path / name
    older.config.touch()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=rf"{name}: is not a regular file"):
        older.check()


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
def test_summaries_with_a_wrong_field(older, key, value):
    older.summary.write_text(json.dumps(json.loads(older.summary.read_text()) | {key: value}))
    with pytest.raises(UserError, match=rf"^{older.summary}: {key}[^\n]* should be [^\n]*$"):
        older.ending()


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
