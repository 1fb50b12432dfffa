"""Rounds of the server with clients in this process: the simulator's bits, replies that fail, memories, resume."""

import shutil

import pytest
import torch
from local_grid import LocalGrid

from federations import simulator
from fedman.algorithms import ALGORITHMS
from fedman.config import read_toml, resolve
from fedman.data import load
from fedman.errors import TooFew, UserError
from fedman.flower.exchange import exchange
from fedman.flower.messages import ROUND
from fedman.flower.server import serve
from fedman.flower.service import Service
from fedman.runs import experiment
from fedman.runs.folder import read_rounds

KEYS = {
    "dataset": "digits", "clients": 5, "participation": 0.6, "unbalanced": 0.5, "rounds": 3, "epochs": 1,
    "zeta": 0.1, "chunk": 1, "eval_others_every": 1,
}  # fmt: skip
FAST = Service(round_timeout=0.2, wait=0.2, retries=1)


def settings(**keys):
    return resolve({**KEYS, **keys})


def play(config, out, grid=None, service=FAST, **options):
    grid = grid or LocalGrid.of(config.clients, out / "memory")
    return serve(grid, config, service, out=out, device="cpu", **options)


def same(a, b) -> bool:
    return all(torch.equal(a.models[m][k], b.models[m][k]) for m in ("all", "sel", "cloud") for k in a.models[m])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_simulators_bits(algorithm, tmp_path):
    config = settings(algorithm=algorithm)
    there, here = play(config, tmp_path), experiment.run(config, device="cpu")
    assert same(there, here)
    for a, b in zip(there.rounds, here.rounds, strict=True):
        assert {k: v for k, v in a.items() if k in b and k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }
        assert a["refused"] == {}
    assert there.summary["accuracy"] == here.summary["accuracy"]
    assert (tmp_path / "model.safetensors").exists()
    assert experiment.run(config, out=tmp_path, resume=True).summary == there.summary
    nobody = LocalGrid.of(0, tmp_path)
    assert play(config, tmp_path, nobody, resume=True).summary == there.summary


def test_the_simulators_bits_in_bf16(tmp_path):
    """The default of large models on some CPUs: clients and evaluation follow it there too."""
    config = settings(algorithm="feddc", precision="bf16")
    there, here = play(config, tmp_path), experiment.run(config, device="cpu")
    assert same(there, here)
    assert there.summary["precision"] == "bf16"
    assert not same(here, experiment.run(settings(algorithm="feddc", precision="fp32"), device="cpu"))


def test_what_travels(tmp_path):
    """Only what the other side cannot know: the server's θ (and g or c) down, the model up, and `last` again."""
    names = {name: exchange(kind()) for name, kind in ALGORITHMS.items()}
    assert {name: e.down for name, e in names.items() if e.down != ("w",)} == {
        "feddc": ("w", "g"),
        "scaffold": ("w", "c"),
    }
    assert {e.up for e in names.values()} == {("w",)}
    config = settings(algorithm="feddc", participation=1, rounds=2)
    result = play(config, tmp_path)
    size = sum(v.numel() for v in result.models["all"].values()) * 4
    assert [r["bytes_up"] for r in result.rounds] == [5 * size, 5 * 2 * size]
    assert [r["bytes_down"] for r in result.rounds] == [5 * 2 * (size + 128)] * 2  # 128: numpy's header


def test_without_last_there_is_half_the_upload_and_the_same_model(tmp_path):
    config = settings(algorithm="fedavg")
    lean = play(config, tmp_path / "lean", service=FAST.model_copy(update={"keep_last": False}))
    full = play(config, tmp_path / "full")
    assert same_cloud(lean, full)
    assert lean.rounds[-1]["bytes_up"] < full.rounds[-1]["bytes_up"]
    assert not (tmp_path / "lean" / "memory").exists()  # FedAvg has nothing to remember
    assert "all" not in lean.rounds[-1]["accuracy"]


def same_cloud(a, b) -> bool:
    return all(torch.equal(a.models["cloud"][k], b.models["cloud"][k]) for k in a.models["cloud"])


def train_only(alter):
    """Alter the replies of rounds, not the nodes' introductions."""
    return lambda order, reply: alter(order, reply) if order.metadata.message_type == "train" else reply


def about(order):
    """(round, client) of an order."""
    record = order.content.config_records[ROUND]
    return record["round"], record["client"]


@pytest.mark.parametrize("algorithm", ["fedavg", "feddc", "scaffold"])
def test_a_client_that_fails_in_one_round_is_left_out_of_it_and_goes_on(algorithm, tmp_path):
    """The result, memories included, is the simulator's with that client missing from that round's cohort."""
    config = settings(algorithm=algorithm, participation=1, rounds=3)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order) == (1, 2) else reply)
    there = play(config, tmp_path, grid)
    assert [r["quarantined"] for r in there.rounds] == [[], [2], []]
    assert there.rounds[1]["refused"] == {"2": "no reply within 0.2 s"}
    machine = simulator(config, load(config.dataset))
    state = machine.start()
    for cohort in ([0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]):
        machine.round(state, cohort)
    assert torch.equal(torch.cat([v.flatten() for v in there.models["cloud"].values()]), state.server["w"])
    assert torch.equal(
        torch.cat([v.flatten() for v in there.models["all"].values()]), machine.federation.models(state)["all"]
    )


def test_a_round_is_repeated_for_those_who_did_not_reply(tmp_path):
    """All replies but one are lost the first time; the round is played again with the others and ends as if not."""
    config, lost = settings(algorithm="feddc"), set()

    def lose_once(order, reply):
        t, k = about(order)
        if t == 1 and k > 0 and k not in lost:
            lost.add(k)
            return None
        return reply

    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lose_once)
    there = play(config, tmp_path, grid, FAST.model_copy(update={"quorum": 1.0}))
    assert [r["attempts"] for r in there.rounds] == [1, 2, 1]
    assert [r["refused"] for r in there.rounds] == [{}, {}, {}]
    assert same(there, experiment.run(config, device="cpu"))


def test_too_few_good_replies_end_the_run_and_a_resume_ends_it_well(tmp_path):
    config = settings(algorithm="feddc")
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[0] == 2 else reply)
    with pytest.raises(
        TooFew, match=r"round 3: 0 good replies from a cohort of \d, \d are needed, after 2 attempts; client"
    ):
        play(config, tmp_path, grid)
    assert len(read_rounds(tmp_path / "rounds.jsonl")) == 2
    again = play(config, tmp_path, resume=True)
    assert same(again, experiment.run(config, device="cpu"))
    assert [r["round"] for r in again.rounds] == [1, 2, 3]


@pytest.mark.parametrize("when", ["before the replies", "after the replies"])
def test_a_server_killed_in_a_round_resumes_to_the_same_bits(when, tmp_path):
    """Clients have worked on the round already, some twice: the memory the server counts on is the one read."""
    config = settings(algorithm="feddc", participation=1)

    class Killed(BaseException):
        pass

    def kill(order, reply):
        if about(order) == (2, 3 if when == "before the replies" else 4):
            raise Killed
        return reply

    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(kill)
    with pytest.raises(Killed):
        play(config, tmp_path, grid)
    assert same(play(config, tmp_path, resume=True), experiment.run(config, device="cpu"))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    config = settings(algorithm="feddc", participation=1, rounds=4)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[0] == 3 else reply)
    with pytest.raises(TooFew):
        play(config, tmp_path, grid)
    newest = sorted((tmp_path / "checkpoint").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    heard = []
    assert same(play(config, tmp_path, resume=True, warn=heard.append), experiment.run(config, device="cpu"))
    assert "damaged" in heard[0]


def test_a_stale_and_a_foreign_memory_are_refused(tmp_path):
    config = settings(algorithm="feddc", participation=1, rounds=2)
    grid = LocalGrid.of(5, tmp_path / "memory")

    def meddle(order, reply):
        if about(order) == (0, 4):  # after the first round of all
            folders = sorted((tmp_path / "memory").glob("*/client-*"))
            (folders[0] / "round-000000.safetensors").unlink()
            shutil.copy(folders[2] / "round-000000.safetensors", folders[1] / "round-000000.safetensors")
            path = folders[3] / "round-000000.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        return reply

    grid.alter = train_only(meddle)
    refused = play(config, tmp_path, grid, FAST.model_copy(update={"quorum": 0.2})).rounds[1]["refused"]
    assert set(refused) == {"0", "1", "3"}
    assert refused["0"].endswith("client-000000/round-000000.safetensors is not there")
    assert "is not of this client, run and round; client differs" in refused["1"]
    assert "sha256 differs" in refused["3"]


def test_missing_clients_are_named_before_anything_is_played(tmp_path):
    config = settings()
    grid = LocalGrid.of(3, tmp_path / "memory")
    grid.nodes[200] = {"partition-id": 1}
    grid.nodes[201] = {"partition-id": 7}
    grid.nodes[202] = {}
    with pytest.raises(TooFew, match=r"3 of 5 clients are there after 0\.2 s; missing: 3, 4; node ") as error:
        play(config, tmp_path, grid)
    assert "node 200: client 1 is node 101" in str(error.value)
    assert "client: 7 is not one of 0 to 4" in str(error.value)
    assert "partition-id: None is not a client's number" in str(error.value)
    assert {m.metadata.message_type for m in grid.sent} == {"query"}


def test_a_restarted_node_takes_its_clients_seat_and_memory(tmp_path):
    """A node comes back under another id; while the old one still answers, a second claim is turned away."""
    config = settings(algorithm="feddc", participation=1)
    grid = LocalGrid.of(5, tmp_path / "memory")

    def restart(order, reply):
        if about(order) == (0, 4):
            grid.nodes[300] = grid.nodes.pop(102)
            grid.nodes[301] = dict(grid.nodes[103])
        return reply

    grid.alter = train_only(restart)
    assert same(play(config, tmp_path, grid), experiment.run(config, device="cpu"))
    nodes = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert 300 in nodes
    assert 301 not in nodes


def test_a_node_that_no_longer_answers_loses_its_seat(tmp_path, monkeypatch):
    """Killed, it stays on Flower's list for a while; its successor is let in as soon as it does not answer."""
    monkeypatch.setattr("fedman.flower.roster.QUESTION_TIMEOUT", 0.2)
    config = settings(algorithm="feddc", participation=1)
    grid, dead = LocalGrid.of(5, tmp_path / "memory"), set()

    def die(order, reply):
        if order.metadata.message_type == "train" and about(order) == (0, 4):
            grid.nodes[300] = dict(grid.nodes[102])
            dead.add(102)
        return None if order.metadata.dst_node_id in dead else reply

    grid.alter = die
    assert same(play(config, tmp_path, grid), experiment.run(config, device="cpu"))
    questions = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "query"]
    assert questions.count(102) == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_honest_clients_are_within_reach(algorithm, tmp_path):
    """The bound on a model's way holds for clients at the clip's limit, and is not far above them."""
    config = settings(algorithm=algorithm, clip=0.01, lr=0.5, rounds=2, zeta=5.0)
    there = play(config, tmp_path)
    assert [r["refused"] for r in there.rounds] == [{}, {}]
    narrow = FAST.model_copy(update={"norm_bound": 1e-4})
    with pytest.raises(TooFew, match="w: lies"):
        play(config, tmp_path / "narrow", service=narrow)


def test_a_clients_error_is_its_reason(tmp_path):
    config = settings(participation=1, rounds=1)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.nodes[101]["data-dir"], grid.nodes[101]["device"] = "nowhere", "abacus"
    assert play(config, tmp_path, grid).rounds[0]["refused"] == {
        "1": "the client says: device: 'abacus' is not one of auto, cpu, cuda"
    }


def test_a_resumed_run_keeps_its_service(tmp_path):
    config = settings(algorithm="fedavg")
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[0] == 1 else reply)
    lean = FAST.model_copy(update={"keep_last": False})
    with pytest.raises(TooFew):
        play(config, tmp_path, grid, lean)
    with pytest.raises(UserError, match="holds a run of another configuration; keep_last differ"):
        play(config, tmp_path, resume=True)
    saved = Service.model_validate(read_toml(tmp_path / "flower.toml"))
    assert saved == lean
    assert len(play(config, tmp_path, service=saved, resume=True).rounds) == 3


def test_nothing_is_written_before_the_clients_are_there(tmp_path):
    with pytest.raises(TooFew):
        play(settings(), tmp_path / "out", LocalGrid.of(2, tmp_path))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
