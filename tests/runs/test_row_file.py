"""The file of clients' rows: what checkpoints point at stays, what is free is used again, damage is named."""

import errno
import os
import random

import pytest
import torch

from fedman.errors import UserError
from fedman.runs.row_file import Damaged, RowFile

ROW = {"last": torch.zeros(5), "memory.h": torch.zeros(3, dtype=torch.float64)}
LENGTH = sum(v.nbytes for v in ROW.values())


def rows(ids, number):
    return {name: v.repeat(len(ids), 1) + number + torch.tensor(ids)[:, None] for name, v in ROW.items()}


@pytest.fixture
def file(tmp_path):
    with RowFile(tmp_path / "checkpoint" / "clients.rows", ROW) as made:
        yield made


def test_the_rows_of_the_two_newest_checkpoints_stay(file):
    """Whatever is written after them; and the file does not grow for ever."""
    rng, table, checkpoints = random.Random(0), {}, []
    for number in range(40):
        ids = rng.sample(range(10), 3)
        file.write(ids, rows(ids, number))
        table |= dict.fromkeys(ids, number)
        if number % 3 == 2:
            checkpoints.append((dict(table), file.tensors(sorted(table))))
        for kept, tensors in checkpoints[-2:]:
            with RowFile(file.path, ROW) as other:
                other.restore(sorted(kept), tensors)
                for name in ROW:
                    want = torch.cat([rows([k], kept[k])[name] for k in sorted(kept)])
                    assert torch.equal(other.read(name, sorted(kept)), want)
    assert file.path.stat().st_size <= 3 * 10 * LENGTH


def test_a_restored_file_keeps_the_checkpoint_before(file):
    """Which the newest may have to give way to: its records are free only after the next checkpoint."""
    file.write([0, 1], rows([0, 1], 0))
    before = file.tensors([0, 1])
    file.write([1], rows([1], 1))
    newest = file.tensors([0, 1])
    with RowFile(file.path, ROW) as other:
        other.restore([0, 1], newest)
        other.write([0, 1], rows([0, 1], 2))
        with RowFile(file.path, ROW) as third:
            third.restore([0, 1], before)
        other.tensors([0, 1])
        size = file.path.stat().st_size
        other.write([0], rows([0], 3))
        assert file.path.stat().st_size == size


def test_a_checkpoint_of_the_same_rows_is_no_new_one(file):
    file.write([0], rows([0], 0))
    first = file.tensors([0])
    file.write([0], rows([0], 1))
    for _ in range(3):
        file.tensors([0])
    file.write([0], rows([0], 2))
    with RowFile(file.path, ROW) as other:
        other.restore([0], first)


def test_damage_is_named_when_a_row_is_read(file):
    file.write([3, 8], rows([3, 8], 0))
    content = bytearray(file.path.read_bytes())
    content[file.places[8].record * LENGTH] ^= 4
    file.path.write_bytes(content)
    assert torch.equal(file.read("last", [3]), rows([3], 0)["last"])
    with pytest.raises(Damaged, match=r"clients\.rows: damaged where the row of client 8 is; its hash differs"):
        file.read("last", [3, 8])


def test_a_file_that_ends_too_early_is_damage_whatever_the_memory_held(file, monkeypatch):
    """What lies behind its end is not read, and the memory may still hold a row that was right."""
    file.write([3, 8], rows([3, 8], 0))
    os.truncate(file.path, 2 * LENGTH - 1)
    monkeypatch.setattr(torch, "empty", lambda count, *_, **__: rows([8], 0)["memory.h"].expand(count, -1).clone())
    with pytest.raises(Damaged, match=r"damaged where the row of client 8 is; the file ends before it does"):
        file.read("memory.h", [8])


@pytest.mark.parametrize("clients", [[], [1, 2, 3]])
def test_other_numbers_of_clients_are_damage(file, clients):
    file.write([1, 2], rows([1, 2], 0))
    with RowFile(file.path, ROW) as other, pytest.raises(Damaged, match=rf"2 records for {len(clients)} clients"):
        other.restore(clients, file.tensors([1, 2]))


def test_a_full_disk_says_what_is_needed(file, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        UserError, match=r"clients\.rows: cannot be written: No space left on device \(88 bytes needed, "
    ):
        file.write([0, 1], rows([0, 1], 0))


def test_links_are_not_followed(file, tmp_path):
    file.path.parent.mkdir()
    (tmp_path / "precious").write_text("precious")
    file.path.symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"clients\.rows: cannot be written: Too many levels of symbolic links"):
        file.write([0], rows([0], 0))
    assert (tmp_path / "precious").read_text() == "precious"
