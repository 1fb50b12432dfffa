"""The server with clients in this process: the same bits as the simulator, missing replies, resume."""

import math
import re
import shutil
import time
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import nn

from fedman.algorithms import ALGORITHMS
from fedman.config import resolve
from fedman.data import load
from fedman.errors import TooFew, UserError
from fedman.flower import backend, roster
from fedman.flower.messages import ROUND
from fedman.flower.replies import PendingReplies
from fedman.flower.server import refuse_simulated, serve
from fedman.flower.server_options import ServerOptions
from fedman.runs import build, experiment
from fedman.runs.folder import RunFolder
from fedman.training.federation import Federation
from tests.federations import forget, simulator
from tests.flower.local_grid import LocalGrid

KEYS = {
    "dataset": "digits", "clients": 5, "participation": 0.6, "unbalanced": 0.5, "rounds": 3, "epochs": 1,
    "zeta": 0.1, "chunk": 1, "eval_others_every": 1, "batch_size": 150,
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


def test_what_clients_receive_is_aligned_as_torch_aligns_it(tmp_path, monkeypatch):
    """The last bit of a matrix product can depend on it; numpy's memory begins where it happens to."""
    work, places = Federation.work, []

    def noted(federation, drawn, vectors, memory):
        places.extend(v.data_ptr() % 64 for v in vectors.values())
        return work(federation, drawn, vectors, memory)

    monkeypatch.setattr(Federation, "work", noted)
    play(settings(algorithm="feddc", participation=1, rounds=1), tmp_path)
    assert places == [0] * 5 * 2


def test_bytes_that_are_sent_and_received(tmp_path):
    """FedDC sends θ and g down, and the model up."""
    result = play(settings(algorithm="feddc", participation=1, rounds=2), tmp_path)
    size = sum(v.numel() for v in result.models["all"].values()) * 4
    assert [r["bytes_up"] for r in result.rounds] == [5 * size] * 2
    assert [r["bytes_down"] for r in result.rounds] == [5 * 2 * (size + 128)] * 2  # 128: numpy's header


def test_an_honest_reply_is_within_the_limit_on_its_bytes(tmp_path, monkeypatch):
    """Also of a model whose buffers are larger than its parameters."""

    class Tabular(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 10)
            self.register_buffer("table", torch.randn(500, 64))

        def forward(self, x):
            return self.linear(x.flatten(1) + self.table.mean(0))

    sizes, limits = [], []

    class Noted(PendingReplies):
        def __init__(self, grid, limit):
            limits.append(limit)
            super().__init__(grid, limit)

    monkeypatch.setattr(backend, "PendingReplies", Noted)
    monkeypatch.setattr(build, "initial_model", lambda *given: Tabular())
    grid = LocalGrid.of(5, tmp_path / "memory")

    def weigh(order, reply):
        parts = get_all_nested_objects(reply.content).values()
        sizes.append(sum(len(part.deflate()) for part in parts))
        return reply

    grid.alter = train_only(weigh)
    play(settings(algorithm="feddc", rounds=1), tmp_path, grid)
    assert 130_000 < max(sizes) < limits[0] < 2 * max(sizes)


def negative_variance(buffers):
    """Not so far from the others that it is an outlier."""
    buffers[16 + np.argmin(buffers[16:32])] = -15.0


def huge_mean(buffers):
    buffers[0] = 3e38


@pytest.mark.parametrize(("spoil", "clients"), [(negative_variance, 5), (negative_variance, 2), (huge_mean, 2)])
def test_a_clients_buffers_cannot_make_the_models_outputs_nan(spoil, clients, tmp_path, monkeypatch):
    def normalised():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def by_the_last(order, reply):
        if about(order)[1] == clients - 1:
            upload = reply.content["upload"]
            buffers = upload["model.buffers"].numpy().copy()
            spoil(buffers)
            upload["model.buffers"] = Array(buffers)
        return reply

    monkeypatch.setattr(build, "initial_model", lambda *given: normalised())
    config = settings(algorithm="fedavg", clients=clients, participation=1, rounds=2)
    honest = play(config, tmp_path / "honest", LocalGrid.of(clients, tmp_path / "memory"))
    assert [record["refused"] for record in honest.rounds] == [{}, {}]
    grid = LocalGrid.of(clients, tmp_path / "memory")
    grid.alter = train_only(by_the_last)
    there = play(config, tmp_path / "hostile", grid)
    assert [list(record["refused"]) for record in there.rounds] == [[str(clients - 1)]] * 2
    assert math.isfinite(there.summary["test_loss"]["sel"])


def test_without_last_nothing_is_kept_of_clients_and_the_model_is_the_same(tmp_path):
    config = settings(algorithm="fedavg")
    kept = []
    grid = LocalGrid.of(5, tmp_path / "memory")
    uploads = tmp_path / "full" / "uploads"
    grid.alter = train_only(lambda order, reply: kept.append(Counter(p.parent for p in uploads.rglob("*.*"))) or reply)
    lean = play(config, tmp_path / "lean", grid, FAST.model_copy(update={"keep_last": False}))
    assert not (tmp_path / "lean" / "uploads").exists()
    full = play(config, tmp_path / "full", grid)
    assert 0 < max(count for found in kept for count in found.values()) <= 3  # of a client, as the page says
    assert same_cloud(lean, full)
    assert "all" not in lean.rounds[-1]["accuracy"]
    assert not (tmp_path / "memory").exists()  # FedAvg has nothing to remember
    assert not uploads.exists()  # a finished run does not need them


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


def test_a_round_is_recorded_before_the_next_is_sent_out(tmp_path):
    """On any device: a round takes as long as its slowest client."""
    seen = []
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: (seen.append(f"train {about(order)[0] + 1}"), reply)[1])
    play(settings(), tmp_path, grid, progress=lambda record: seen.append(f"record {record['round']}"))
    assert list(dict.fromkeys(seen)) == [f"{what} {t}" for t in (1, 2, 3) for what in ("train", "record")]


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


def test_the_quorum_is_a_share_of_the_cohort():
    assert [backend.replies_needed(n, q) for n, q in ((1, 0.01), (4, 0.5), (5, 0.5), (5, 1.0))] == [1, 2, 3, 5]
    assert all(backend.replies_needed(n, good / n) == good for n in range(1, 200) for good in range(1, n + 1))


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

    grid.keys = {102: b"two", 300: b"two", 103: b"three", 301: b"three"}
    grid.alter = train_only(restart)
    assert same(play(config, tmp_path, grid), experiment.run(config, device="cpu"))
    nodes = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert 300 in nodes
    assert 301 not in nodes


@pytest.mark.parametrize("algorithm", ["fedavg", "feddc"])
def test_a_client_that_is_late_for_many_rounds_is_not_locked_out(algorithm, tmp_path):
    """Rounds that it has worked on in vain do not push out of its memory the one that was used."""
    config = settings(algorithm=algorithm, participation=1, rounds=7)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[1] == 2 and 1 <= about(order)[0] <= 5 else reply)
    there = play(config, tmp_path, grid, FAST.model_copy(update={"retries": 0, "round_timeout": 0.05}))
    assert [r["quarantined"] for r in there.rounds] == [[], *[[2]] * 5, []]
    machine = simulator(config, load(config.dataset))
    state = machine.start()
    for t in range(7):
        machine.round(state, [0, 1, 3, 4] if 1 <= t <= 5 else [0, 1, 2, 3, 4])
    assert torch.equal(torch.cat([v.flatten() for v in there.models["cloud"].values()]), state.server["w"])
    everyone = machine.federation.models(state)["all"]
    assert torch.equal(torch.cat([v.flatten() for v in there.models["all"].values()]), everyone)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_client_whose_memory_is_lost_starts_without_one_and_the_record_says_so(retries, tmp_path):
    """It is left out once and starts as at its first round; the models are the simulator's with that memory erased."""
    config = settings(algorithm="feddc", participation=1, rounds=5)
    grid = LocalGrid.of(5, tmp_path / "memory")

    def lose(order, reply):
        if about(order) == (1, 4):
            (folder,) = (tmp_path / "memory").glob("*/client-000002")
            shutil.rmtree(folder)
        return reply

    grid.alter = train_only(lose)
    options = FAST.model_copy(update={"retries": retries, "quorum": 1.0 if retries else 0.5})
    there = play(config, tmp_path, grid, options)
    gone = 2 if retries else 3
    assert [r["restarted"] for r in there.rounds] == [[2] if t == gone else [] for t in range(5)]
    if not retries:
        assert list(there.rounds[2]["refused"]) == ["2"]
        assert re.fullmatch(
            r"the client says: memory: \w{32}/client-000002/round-000001.safetensors is not there; "
            "it starts without a memory when it is asked again",
            there.rounds[2]["refused"]["2"],
        )
    machine = simulator(config, load(config.dataset))
    state = machine.start()
    for t in range(5):
        if t == gone:
            forget(state, [2])
        machine.round(state, [0, 1, 3, 4] if t == 2 and not retries else [0, 1, 2, 3, 4])
    for name in ("cloud", "all"):
        model = torch.cat([v.flatten() for v in there.models[name].values()])
        assert torch.equal(model, machine.federation.models(state)[name])


def test_a_lost_memory_is_still_known_after_a_restart_of_the_server(tmp_path):
    config, strict = settings(algorithm="feddc", participation=1, rounds=4), FAST.model_copy(update={"retries": 0})
    grid = LocalGrid.of(5, tmp_path / "memory")

    def lose(order, reply):
        if about(order) == (1, 4):
            (folder,) = (tmp_path / "memory").glob("*/client-000002")
            shutil.rmtree(folder)
        return reply if about(order)[0] < 3 else None

    grid.alter = train_only(lose)
    with pytest.raises(TooFew):
        play(config, tmp_path, grid, strict)
    there = play(config, tmp_path, resume=True, options=strict)
    assert [list(record["refused"]) for record in there.rounds] == [[], [], ["2"], []]
    assert there.rounds[3]["restarted"] == [2]


def test_a_second_node_of_a_client_is_refused_and_named_for_good(tmp_path):
    """The first accepted round binds a number to a key, in the checkpoints too; the owner cannot be locked out."""
    config = settings(algorithm="feddc", participation=1, rounds=5)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.keys = {100 + k: f"key {k}".encode() for k in range(5)} | {50: b"intruder"}
    owner = grid.nodes[102]

    def come_and_go(order, reply):
        if about(order) == (0, 4):  # the owner leaves, the intruder takes its chance
            del grid.nodes[102]
            grid.nodes[50] = dict(owner)
        if about(order) == (2, 0):
            grid.nodes[102] = owner
        return reply if about(order)[0] < 4 else None

    grid.alter = train_only(come_and_go)
    with pytest.raises(TooFew):
        play(config, tmp_path, grid)
    records = RunFolder(tmp_path).read_rounds()
    assert [r["refused"].get("2") for r in records] == [None, "not connected", "not connected", None]
    assert re.match(
        "claims to be client 2, whose key is SHA256:.*; its own is SHA256:", records[1]["refused"]["node 50"]
    )
    assert "node 50" not in records[2]["refused"]
    assert records[3]["refused"] == {}
    asked = {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"}
    assert 50 not in asked

    del grid.nodes[102]  # a restart of the server at which only the intruder is there
    grid.alter = lambda order, reply: reply
    grid.nodes = {50: grid.nodes.pop(50), **grid.nodes}
    there = play(config, tmp_path, grid, resume=True)
    assert there.rounds[4]["refused"]["2"] == "not connected"
    assert "node 50" in there.rounds[4]["refused"]


def test_without_binding_another_node_may_take_a_number(tmp_path):
    """For federations on one machine: a node without a key of its own has another one after every start.

    This can be decided later, too, when a run is resumed.
    """
    config = settings(algorithm="feddc", participation=1)
    grid = LocalGrid.of(5, tmp_path / "memory")

    def restart(order, reply):
        if about(order) == (0, 4):
            grid.nodes[300] = grid.nodes.pop(102)
        return reply

    grid.alter = train_only(restart)
    there = play(config, tmp_path / "open", grid, FAST.model_copy(update={"bind_keys": False}))
    assert same(there, experiment.run(config, device="cpu"))

    grid.alter = train_only(lambda order, reply: reply if about(order)[0] < 2 else None)
    with pytest.raises(TooFew):
        play(config, tmp_path / "bound", grid)
    others = LocalGrid.of(5, tmp_path / "memory")
    others.nodes = {node + 500: config for node, config in others.nodes.items()}
    with pytest.raises(TooFew, match="0 good replies from a cohort of 5"):
        play(config, tmp_path / "bound", others, resume=True)
    there = play(config, tmp_path / "bound", others, FAST.model_copy(update={"bind_keys": False}), resume=True)
    assert same(there, experiment.run(config, device="cpu"))


def test_a_node_that_never_answers_costs_a_round_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "QUERY_TIMEOUT", 300.0)
    config = settings(algorithm="fedavg", participation=1, rounds=2)
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.nodes |= {7: {"partition-id": 1}, 8: {"partition-id": 1}}
    grid.alter = lambda order, reply: None if order.metadata.dst_node_id in (7, 8) else reply
    started = time.monotonic()
    there = play(config, tmp_path, grid, FAST.model_copy(update={"wait": 200.0, "round_timeout": 200.0}))
    assert time.monotonic() - started < 100
    assert [r["refused"] for r in there.rounds] == [{}, {}]


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
        "1": "the client says: device: 'abacus' is not one of auto, cpu, cuda, cuda:0, ..."
    }


def test_nothing_is_written_before_all_clients_have_joined(tmp_path):
    with pytest.raises(TooFew):
        play(settings(), tmp_path / "out", LocalGrid.of(2, tmp_path))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_resumed_run_with_other_fixed_options_is_refused_before_clients_are_waited_for(tmp_path):
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[0] == 1 else reply)
    with pytest.raises(TooFew):
        play(settings(), tmp_path, grid)
    with pytest.raises(UserError, match="holds a run of another configuration; keep_last differ"):
        play(settings(), tmp_path, LocalGrid({}), FAST.model_copy(update={"keep_last": False}), resume=True)


def test_a_resume_that_is_refused_leaves_the_options_as_they_were(tmp_path):
    """One of another configuration is refused before clients are waited for, one without its records after that."""
    grid = LocalGrid.of(5, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: None if about(order)[0] == 1 else reply)
    out, other = tmp_path / "out", FAST.model_copy(update={"quorum": 0.1})
    with pytest.raises(TooFew):
        play(settings(), out, grid)
    options, records = (out / "flower.toml").read_bytes(), (out / "rounds.jsonl").read_bytes()
    with pytest.raises(UserError, match="from another configuration; zeta differ"):
        play(settings(zeta=0.2), out, LocalGrid({}), other, resume=True)
    (out / "rounds.jsonl").unlink()
    with pytest.raises(UserError, match=r"rounds\.jsonl"):
        play(settings(), out, grid, other, resume=True)
    assert (out / "flower.toml").read_bytes() == options
    (out / "rounds.jsonl").write_bytes(records)
    grid.alter = lambda order, reply: reply
    play(settings(), out, grid, other, resume=True)
    assert "quorum = 0.1" in (out / "flower.toml").read_text()


def test_a_validation_part_is_refused():
    with pytest.raises(UserError, match=r"validation: 0\.1 is for `fedman run` and `sweep`; on Flower the training"):
        refuse_simulated(resolve({"validation": 0.1}))
