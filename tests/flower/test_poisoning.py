"""Aggregation rules on the server: the bits of the simulator with the same hostile client; attacks are refused."""

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedman.config import resolve
from fedman.errors import UserError
from fedman.flower import app
from fedman.flower.messages import SERVER
from fedman.flower.server import serve
from fedman.flower.server_options import ServerOptions
from fedman.flower.simulation import simulate
from fedman.runs import experiment
from fedman.training.attacks import SignFlip
from tests.flower.hostile import with_w
from tests.flower.local_grid import LocalGrid
from tests.flower.test_server import FAST, KEYS, about, train_only
from tests.runs.killed import Killed, die_after

LENIENT = FAST.model_copy(update={"norm_bound": 1e6, "keep_last": False})


def settings(**keys):
    return resolve({**KEYS, "participation": 1.0, "rounds": 2, **keys})


def backwards(order, reply):
    """θ − 8(w − θ), in the place of w."""
    theta = order.content.array_records[SERVER]["w"].numpy()
    with_w(lambda w: theta - np.float32(8) * (w - theta))(reply.content)
    return reply


@pytest.mark.parametrize(
    ("rule", "algorithm"),
    [
        ("mean", "feddc"),
        ("median", "fedavg"),
        ("trimmed-mean", "scaffold"),
        ("multi-krum", "feddc"),
        ("norm-clip", "feddyn"),
    ],
)
def test_the_bits_of_the_simulator_under_the_same_attack(rule, algorithm, tmp_path):
    config = settings(algorithm=algorithm, aggregation=rule)
    (hostile,) = SignFlip(0.2, 8.0).draw(config.seed, config.clients)
    grid = LocalGrid.of(config.clients, tmp_path / "memory")
    grid.alter = train_only(lambda order, reply: backwards(order, reply) if about(order)[1] == hostile else reply)
    there = serve(grid, config, LENIENT, out=tmp_path / "out", device="cpu")
    attack = {"attack": "sign-flip", "attackers": 0.2, "attack_scale": 8.0}
    here = experiment.run(settings(algorithm=algorithm, aggregation=rule, **attack), device="cpu")
    for model in ("sel", "cloud"):
        assert all(torch.equal(v, here.models[model][name]) for name, v in there.models[model].items())
    assert [r["refused"] for r in there.rounds] == [{}, {}]
    assert [r["attackers"] for r in here.rounds] == [[hostile]] * 2


def test_a_run_with_a_rule_resumes_to_the_same_bits_and_its_clients_are_not_told(tmp_path):
    config = settings(algorithm="feddc", aggregation="trimmed-mean", trim=0.25)
    grid = LocalGrid.of(config.clients, tmp_path / "memory")
    whole = serve(grid, config, FAST, out=tmp_path / "whole", device="cpu")
    told = [m.content.config_records["round"]["settings"] for m in grid.sent if m.metadata.message_type == "train"]
    assert told
    assert set(whole.models) == {"sel", "cloud"}
    assert not any("trim" in text or "aggregation" in text for text in told)

    grid = LocalGrid.of(config.clients, tmp_path / "other")
    with pytest.raises(Killed):
        serve(grid, config, FAST, out=tmp_path / "stopped", device="cpu", progress=die_after(1))
    again = serve(grid, config, FAST, out=tmp_path / "stopped", device="cpu", resume=True)
    assert len(again.rounds) == 2
    assert all(torch.equal(v, again.models["cloud"][name]) for name, v in whole.models["cloud"].items())


def test_attacks_are_refused_with_one_line(tmp_path):
    config = settings(attack="sign-flip")
    message = "^attack: sign-flip is for `fedman run` and `sweep`; on Flower nobody attacks on request$"
    with pytest.raises(UserError, match=message):
        serve(LocalGrid.of(5, tmp_path), config, FAST, out=tmp_path / "out")
    with pytest.raises(UserError, match=message):
        simulate(config, ServerOptions(), out=tmp_path / "out")
    given = {"preset": "", "settings": "dataset=digits attack=sign-flip", "out": str(tmp_path / "out"), "resume": False}
    with pytest.raises(app.Failed, match=r"^exit 2: attack: sign-flip is for"):
        app.main(LocalGrid.of(5, tmp_path), Context(1, 1, {}, RecordDict(), given))
    assert not (tmp_path / "out").exists()
