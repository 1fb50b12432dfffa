"""The server with clients in this process: the same bits as the simulator, missing replies, resume."""

import pytest
import torch

from fedman.algorithms import ALGORITHMS
from fedman.config import resolve
from fedman.data import load
from fedman.errors import TooFew
from fedman.flower.messages import ROUND
from fedman.flower.server import serve
from fedman.flower.server_options import ServerOptions
from fedman.runs import experiment
from fedman.runs.folder import RunFolder
from tests.federations import simulator
from tests.flower.local_grid import LocalGrid

KEYS = {
    "dataset": "digits", "clients": 5, "participation": 0.6, "unbalanced": 0.5, "rounds": 3, "epochs": 1,
    "zeta": 0.1, "chunk": 1, "eval_others_every": 1,
}  # fmt: skip
FAST = ServerOptions(round_timeout=0.2, wait=0.2, retries=1)


def settings(**keys):
    return resolve({**KEYS, **keys})


def play(config, out, grid=None, options=FAST, **more):
    grid = grid or LocalGrid.of(config.clients, out / "memory")
    return serve(grid, config, options, out=out, device="cpu", **more)


def same(a, b) -> bool:
    return all(torch.equal(a.models[m][k], b.models[m][k]) for m in ("all", "sel", "cloud") for k in a.models[m])


def train_only(alter):
    """Alter replies to rounds, not to queries."""
    return lambda order, reply: alter(order, reply) if order.metadata.message_type == "train" else reply


def about(order):
    """(round, client) of an order."""
    record = order.content.config_records[ROUND]
    return record["round"], record["client"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_bits_as_the_simulator(algorithm, tmp_path):
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


def test_the_same_bits_as_the_simulator_in_bf16(tmp_path):
    """bf16, the default of large models on some CPUs, is used by clients and evaluation."""
    config = settings(algorithm="feddc", precision="bf16")
    there, here = play(config, tmp_path), experiment.run(config, device="cpu")
    assert same(there, here)
    assert there.summary["precision"] == "bf16"
    assert not same(here, experiment.run(settings(algorithm="feddc", precision="fp32"), device="cpu"))


def test_bytes_that_are_sent_and_received(tmp_path):
    """FedDC sends θ and g down, and the model up, from the second round on with `last`."""
    result = play(settings(algorithm="feddc", participation=1, rounds=2), tmp_path)
    size = sum(v.numel() for v in result.models["all"].values()) * 4
    assert [r["bytes_up"] for r in result.rounds] == [5 * size, 5 * 2 * size]
    assert [r["bytes_down"] for r in result.rounds] == [5 * 2 * (size + 128)] * 2  # 128: numpy's header


def test_without_last_there_is_half_the_upload_and_the_same_model(tmp_path):
    config = settings(algorithm="fedavg")
    lean = play(config, tmp_path / "lean", options=FAST.model_copy(update={"keep_last": False}))
    full = play(config, tmp_path / "full")
    assert same_cloud(lean, full)
    assert lean.rounds[-1]["bytes_up"] < full.rounds[-1]["bytes_up"]
    assert not (tmp_path / "lean" / "memory").exists()  # FedAvg has nothing to remember
    assert "all" not in lean.rounds[-1]["accuracy"]


def same_cloud(a, b) -> bool:
    return all(torch.equal(a.models["cloud"][k], b.models["cloud"][k]) for k in a.models["cloud"])


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
    """All replies but one are lost at first; the others are asked again, and the result is the same."""
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


def test_too_few_good_replies_end_the_run_which_can_be_resumed(tmp_path):
    config = settings(algorithm="feddc")
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[0] == 2 else reply)
    with pytest.raises(
        TooFew, match=r"round 3: 0 good replies from a cohort of \d, \d are needed, after 2 attempts; client"
    ):
        play(config, tmp_path, grid)
    assert len(RunFolder(tmp_path).read_rounds()) == 2
    again = play(config, tmp_path, resume=True)
    assert same(again, experiment.run(config, device="cpu"))
    assert [r["round"] for r in again.rounds] == [1, 2, 3]


@pytest.mark.parametrize("when", ["before the replies", "after the replies"])
def test_a_server_killed_in_a_round_resumes_to_the_same_bits(when, tmp_path):
    """Clients repeat a round that they have worked on before, from the memory of the round before it."""
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


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path):
    config = settings(algorithm="feddc", participation=1, rounds=4)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[0] == 3 else reply)
    with pytest.raises(TooFew):
        play(config, tmp_path, grid)
    newest = sorted((tmp_path / "checkpoint").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    warnings = []
    assert same(play(config, tmp_path, resume=True, warn=warnings.append), experiment.run(config, device="cpu"))
    assert "damaged" in warnings[0]


def test_a_restarted_node_continues_with_its_clients_memory(tmp_path):
    """A restarted node has another id. A second node for a client whose node still answers is not used."""
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_honest_clients_are_within_the_bound(algorithm, tmp_path):
    """Clients whose gradients are all clipped are accepted; a smaller bound refuses them."""
    config = settings(algorithm=algorithm, clip=0.01, lr=0.5, rounds=2, zeta=5.0)
    there = play(config, tmp_path)
    assert [r["refused"] for r in there.rounds] == [{}, {}]
    narrow = FAST.model_copy(update={"norm_bound": 1e-4})
    with pytest.raises(TooFew, match="w: lies"):
        play(config, tmp_path / "narrow", options=narrow)


def test_a_clients_error_is_the_reason_in_the_record(tmp_path):
    config = settings(participation=1, rounds=1)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.nodes[101]["data-dir"], grid.nodes[101]["device"] = "nowhere", "abacus"
    assert play(config, tmp_path, grid).rounds[0]["refused"] == {
        "1": "the client says: device: 'abacus' is not one of auto, cpu, cuda"
    }


def test_nothing_is_written_before_all_clients_have_joined(tmp_path):
    with pytest.raises(TooFew):
        play(settings(), tmp_path / "out", LocalGrid.of(2, tmp_path))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
