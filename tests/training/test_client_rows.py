"""Rows of clients: who has one, where it lies, and what happens when memory ends."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedman.errors import UserError
from fedman.runs.row_file import RowFile
from fedman.training import client_rows
from fedman.training.client_rows import ClientRows, Slabs, as_row

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
START = as_row(torch.arange(6.0), {"h": torch.zeros(6), "seen": torch.full((2,), 7), "tiny": torch.ones(1).double()})
ROW = sum(v.nbytes for v in START.values())
CLIENTS = 40


@pytest.fixture
def rooms(monkeypatch):
    """A function that says for how many rows the machine has memory, of which they may take 0.6."""
    return lambda rows: monkeypatch.setattr(client_rows, "memory", lambda device: (rows * ROW, rows * ROW))


def new_rows(ids, rng):
    """Rows that are like no others."""
    number = rng.randrange(1000)
    return {name: v.repeat(len(ids), 1) + number + torch.tensor(ids)[:, None] for name, v in START.items()}


def save(rows, ids, new):
    memory = {name.removeprefix("memory."): v for name, v in new.items() if name != "last"}
    rows.save(0, ids, new["last"], {name: v.to(START[f"memory.{name}"].dtype) for name, v in memory.items()})


def same(rows, table):
    """Whether every client's row is the one in a table."""
    ids = random.Random(1).sample(range(CLIENTS), CLIENTS)
    found = {name: v.cpu() for name, v in as_row(torch.stack(rows.uploads(ids)), rows.memories(ids)).items()}
    return all(
        torch.equal(v, torch.stack([table.get(k, START)[name] for k in ids]).to(v.dtype)) for name, v in found.items()
    )


def test_without_participants_there_are_no_rows():
    rows = ClientRows({"last": torch.zeros(10**6)}, 10**7)
    assert rows.levels[0].capacity == 0
    assert [v.shape for v in rows.uploads([0, 10**7 - 1])] == [(10**6,), (10**6,)]


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("room", [1, 8, 30, 1000])
def test_rows_are_those_saved_last_wherever_they_lie(tmp_path, rooms, room, levels):
    """Against a table of all clients: vectors of several lengths and dtypes, on one level of memory, two, and disk."""
    rooms(room)
    rng, table = random.Random(room), {}
    with RowFile(tmp_path / "rows", START) as disk:
        rows = ClientRows(START, CLIENTS, disk)
        rows.levels = [Slabs(START, CLIENTS, CPU, pinned=False) for _ in range(levels)]
        for t in range(25):
            ids = rng.sample(range(CLIENTS), rng.randint(1, 12))
            new = new_rows(ids, rng)
            save(rows, ids, new)
            table |= {k: {name: v[i] for name, v in new.items()} for i, k in enumerate(ids)}
            assert same(rows, table)
            assert all(len(level.slots) <= 0.6 * room for level in rows.levels)
            if t % 7 == 6:
                rows.tensors(sorted(table))
        with RowFile(tmp_path / "rows", START) as other:
            again = ClientRows(START, CLIENTS, other)
            again.restore(sorted(table), rows.tensors(sorted(table)), rows.notes())
            assert same(again, table)
    in_memory = sum(len(level.slots) for level in rows.levels)
    assert in_memory == min(len(table), levels * int(0.6 * room))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_rows_go_to_pinned_memory_and_from_there_to_the_disk(tmp_path, rooms):
    rooms(10)
    rng, table = random.Random(0), {}
    with RowFile(tmp_path / "rows", START) as disk:
        rows = ClientRows({name: v.cuda() for name, v in START.items()}, CLIENTS, disk)
        for _ in range(25):
            ids = rng.sample(range(CLIENTS), rng.randint(1, 12))
            new = new_rows(ids, rng)
            save(rows, ids, {name: v.cuda() for name, v in new.items()})
            table |= {k: {name: v[i] for name, v in new.items()} for i, k in enumerate(ids)}
            assert same(rows, table)
        assert [(level.device.type, len(level.slots)) for level in rows.levels] == [("cuda", 6), ("cpu", 6)]
        rows.tensors(sorted(table))
        assert {*disk.places} == {*table}


def test_the_oldest_rows_make_room(rooms, tmp_path):
    rooms(10)
    with RowFile(tmp_path / "rows", START) as disk:
        rows = ClientRows(START, CLIENTS, disk)
        for ids in ([0, 1, 2], [3, 4, 5], [0, 6]):
            save(rows, ids, new_rows(ids, random.Random(0)))
        assert [*rows.levels[0].slots] == [2, 3, 4, 5, 0, 6]
        assert 1 in disk
        assert 0 not in disk


def test_without_a_disk_a_lack_of_memory_is_one_line(rooms):
    rooms(5)
    rows = ClientRows(START, CLIENTS)
    save(rows, [0, 1, 2, 3], new_rows([0, 1, 2, 3], random.Random(0)))
    rooms(1)
    with pytest.raises(
        UserError, match=r"^clients: the state of about 5 that take part, 72 bytes each, .*; give a folder"
    ):
        save(rows, [4], new_rows([4], random.Random(0)))


@pytest.mark.parametrize(("available", "total", "fits"), [(50, 100_000, 20), (50, 100, 40), (4, 100_000, 0)])
def test_few_rows_fit_though_others_fill_the_memory(monkeypatch, available, total, fits):
    """Less than a tenth was free, and rows of some kilobytes were refused."""
    slab = Slabs(START, 10, CPU, pinned=False)
    monkeypatch.setattr(client_rows, "memory", lambda device: ((available - slab.capacity) * ROW, total * ROW))
    slab.grow(CLIENTS, without_limit=True)
    assert slab.capacity == fits


def test_a_run_without_room_is_refused_at_its_start(rooms, tmp_path, monkeypatch):
    rooms(50)
    with pytest.raises(UserError, match=r"about 60 that take part, 72 bytes each, needs 4.32 KB and 3.6 KB of memory"):
        ClientRows(START, CLIENTS).require_room(60, on_disk=False)
    ClientRows(START, CLIENTS).require_room(40, on_disk=False)
    disk = RowFile(tmp_path / "checkpoint" / "rows", START)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 30 * ROW}))
    rows = ClientRows(START, CLIENTS, disk)
    rows.require_room(40, on_disk=False)
    rows.require_room(30, on_disk=True)
    for clients, on_disk in ((40, True), (60, False)):
        with pytest.raises(UserError, match=rf"rows: the state of about {clients} clients .* and 2.16 KB are free"):
            rows.require_room(clients, on_disk=on_disk)


@pytest.mark.slow
def test_the_benchmark_of_many_clients(tmp_path):
    """It asserts that a resumed run plays on to the same bits."""
    words = [
        "benchmarks/many_clients.py",
        "--device",
        "cpu",
        "--clients",
        "20",
        "--cohort",
        "2",
        "--rounds",
        "1",
        "--folder",
    ]
    done = subprocess.run([sys.executable, *words, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| 20 |") == 2
