"""Files on disks that are full, gone or read-only: one line, and nothing lost or left over."""

import errno
import os
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from safetensors import SafetensorError

from fedman.errors import UserError
from fedman.runs import atomic
from fedman.runs.atomic import write_json, write_toml, write_whole


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()
    for failing in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(atomic.os, failing, full)
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

        monkeypatch.setattr(atomic.os, name, noted)
    write_json(tmp_path / "a.json", [1])
    inode = (tmp_path / "a.json").stat().st_ino
    assert steps == [("fsync", inode), ("replace", inode), ("fsync", tmp_path.stat().st_ino)]


def test_threads_may_write_the_same_file(tmp_path):
    together = Barrier(2)

    def write(text):
        def content(staged):
            together.wait(timeout=60)
            staged.write_text(text)
            together.wait(timeout=60)

        write_whole(tmp_path / "a", content)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, ("one", "two"))) == [None, None]
    assert (tmp_path / "a").read_text() in ("one", "two")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_toml_that_is_written_can_be_read(tmp_path):
    values = {"b": True, "i": 3, "f": 1e-3, "inf": float("inf"), "s": 'ζ "quoted" \\ \n'}
    write_toml(tmp_path / "a.toml", values)
    assert tomllib.loads((tmp_path / "a.toml").read_text(encoding="utf-8")) == values
