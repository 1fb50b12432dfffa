"""A client's memory: the file of the round that is asked for, and a refusal of every other one."""

import shutil

import pytest
import torch

from fedman.errors import UserError
from fedman.flower.client_memory import KEEP, ClientMemory

RUN = "0123456789abcdef" * 2
LIKE = torch.zeros(3)


@pytest.fixture
def memory(tmp_path):
    """Client 1 after rounds 0 and 1."""
    memory = ClientMemory(tmp_path, RUN, 1)
    for t in (0, 1):
        memory.save(t, {"h": torch.full((3,), float(t))})
    return memory


def test_each_round_is_read_as_it_was_saved(memory):
    assert [memory.load(t, {"h": LIKE})["h"].tolist() for t in (0, 1)] == [[0.0] * 3, [1.0] * 3]


def test_the_newest_files_are_kept(memory):
    for t in range(2, 9):
        memory.save(t, {"h": LIKE})
    assert len(list(memory.folder.iterdir())) == KEEP
    with pytest.raises(UserError, match=r"round-000004.safetensors is not there \(but round-000005"):
        memory.load(4, {"h": LIKE})


def test_files_of_another_client_run_or_round_are_refused(memory, tmp_path):
    for name, other in {
        "client": ClientMemory(tmp_path, RUN, 2),
        "run": ClientMemory(tmp_path, "f" * 32, 1),
    }.items():
        other.folder.mkdir(parents=True)
        shutil.copy(memory.folder / "round-000001.safetensors", other.folder)
        with pytest.raises(UserError, match=f"is not of this client, run and round; {name} differs"):
            other.load(1, {"h": LIKE})
    shutil.copy(memory.folder / "round-000000.safetensors", memory.folder / "round-000001.safetensors")
    with pytest.raises(UserError, match="round differs"):
        memory.load(1, {"h": LIKE})


def test_a_damaged_file_is_refused(memory):
    path = memory.folder / "round-000001.safetensors"
    whole = path.read_bytes()
    for damaged, reason in ((whole[:-1] + b"\x01", "sha256 differs"), (whole[:20], "cannot be read")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=reason):
            memory.load(1, {"h": LIKE})


@pytest.mark.parametrize(
    "like", [{"h": LIKE, "last": LIKE}, {"h": torch.zeros(4)}, {"h": LIKE.double()}, {"h": LIKE, "t": torch.zeros(1)}]
)
def test_vectors_that_do_not_fit_the_model_are_refused(like, memory):
    with pytest.raises(UserError, match=r"holds h torch.float32 \[3\]; wanted are h"):
        memory.load(1, like)


def test_vectors_of_several_shapes(memory):
    """An optimiser's state can be smaller than the model."""
    like = {"h": LIKE, "optimizer.t": torch.zeros(1)}
    memory.save(2, {"optimizer.t": torch.ones(1), "h": LIKE})
    assert {name: v.tolist() for name, v in memory.load(2, like).items()} == {"h": [0.0] * 3, "optimizer.t": [1.0]}


def test_a_run_cannot_name_another_folder(tmp_path):
    with pytest.raises(UserError, match=r"'../../etc' is not the name of a run"):
        ClientMemory(tmp_path, "../../etc", 1)
