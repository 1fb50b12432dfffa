"""Disks that are full, gone or read-only, and what a killed process leaves: one line, nothing lost or left over."""

import errno
import os
import re
import signal
import subprocess
import sys

import pytest
from safetensors import SafetensorError

import fedman
from fedman.errors import UserError
from fedman.runs import folder as records
from fedman.runs.folder import RunFolder, write_json, write_whole

SMALL = {"model": "mlp", "clients": 8, "participation": 0.4, "rounds": 4, "epochs": 1, "batch_size": 20}


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()
    for failing in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(records.os, failing, full)
            with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: cannot be written: No space left"):
                write_json(path, {"a": 2})
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]

    def half(staged):
        staged.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(UserError, match=r"a\.json: cannot be written: No space left on device$"):
        write_whole(path, half)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_no_file_takes_its_place_before_it_is_on_the_disk(tmp_path, monkeypatch):
    """write, fsync of the file, rename, fsync of the folder, in this order."""
    steps = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(what, *rest, name=name, real=real):
            inode = os.fstat(what).st_ino if name == "fsync" else os.stat(what).st_ino
            steps.append((name, inode))
            return real(what, *rest)

        monkeypatch.setattr(records.os, name, noted)
    write_json(tmp_path / "a.json", [1])
    inode = (tmp_path / "a.json").stat().st_ino
    assert steps == [("fsync", inode), ("replace", inode), ("fsync", tmp_path.stat().st_ino)]


def test_records_that_cannot_be_written(tmp_path):
    """A disk that is full says so in the first record; the folder can be let go of all the same."""
    with RunFolder(tmp_path) as folder:
        folder.rounds.symlink_to("/dev/full")
        with pytest.raises(UserError, match=r"rounds\.jsonl: cannot be written: No space left on device"):
            folder.append({"round": 1})


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


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills(second):
    """The first asks for a checkpoint; who cannot wait for that sends another."""
    code = f"""
import os, signal, threading
from fedman.runs.signals import stop_on_signal
stopping = threading.Event()
with stop_on_signal(stopping) as caught:
    os.kill(os.getpid(), signal.SIGINT)
    assert caught == [signal.SIGINT] and stopping.is_set()
    print("asked", flush=True)
    os.kill(os.getpid(), {int(second)})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("asked\n", -second)


def test_a_run_is_not_overwritten(tmp_path):
    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"holds a run already; add --resume \(in Python resume=True\)"):
        fedman.run(**SMALL, out=tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
