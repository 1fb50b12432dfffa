"""Hostile clients in the simulator: who they are, what they upload, what they do not change; and rules against them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fedman
from fedman.algorithms import ALGORITHMS
from fedman.config import resolve
from fedman.data import from_arrays, load
from fedman.errors import UserError
from fedman.flower.exchange import exchange
from fedman.runs import build as build_module
from fedman.runs import experiment, sweep
from fedman.runs.folder import RunFolder
from fedman.training.attacks import Attack, Collusion, Hostile, LabelFlip, Scaled, SignFlip, poisoned, relabelled
from fedman.training.check_parts import check_attack
from tests.cases import CASES
from tests.federations import SMALL, TRAINING, play, samples, simulation
from tests.runs.killed import run_killed

COHORT, THEIRS = [0, 2, 3, 5], [2, 5]
SHORT = replace(TRAINING, epochs=1, batch_size=10)
ATTACKED = {**SMALL, "attack": "sign-flip", "attackers": 0.25, "participation": 0.6, "device": "cpu"}


def hostile(case, attack, **more):
    machine = simulation(*CASES[case], training=SHORT, **more)
    return replace(machine, federation=replace(machine.federation, attack=attack, attackers=frozenset(THEIRS)))


def forged(attack, own, honest, theta):
    """The attacks' formulas, for one attacker."""
    return {
        SignFlip: lambda: theta - 3 * (own - theta),
        Scaled: lambda: theta + 3 * (own - theta),
        Collusion: lambda: honest.mean(0) - 3 * np.sqrt(((honest - honest.mean(0)) ** 2).mean(0)),
    }[type(attack)]()


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("attack", [SignFlip(0.3, 3.0), Scaled(0.3, 3.0), Collusion(0.3, 3.0)], ids=lambda a: a.title)
def test_attackers_upload_the_formula_and_train_as_before(attack, chunk):
    plain, _ = play(simulation(*CASES["feddyn"], training=SHORT, chunk=chunk), [COHORT])
    state, (outcome,) = play(hostile("feddyn", attack, chunk=chunk), [COHORT])
    theta, x = simulation().federation.initial.numpy(), plain.clients.last.numpy()
    honest = x[[k for k in COHORT if k not in THEIRS]]
    for k in COHORT:
        want = forged(attack, x[k], honest, theta) if k in THEIRS else x[k]
        np.testing.assert_allclose(state.clients.last[k].numpy(), want, rtol=1e-12, atol=1e-12)
    assert outcome.attackers == THEIRS
    torch.testing.assert_close(state.clients.memory, plain.clients.memory, rtol=0, atol=0)


@pytest.mark.parametrize("case", [name for name, kind in ALGORITHMS.items() if exchange(kind()).up == ("w",)])
def test_what_else_is_uploaded_follows_from_the_model(case):
    """The server's step is the one of a Flower server, which computes it from the model that it receives."""
    machine = hostile(case, SignFlip(0.3, 3.0))
    federation, state = machine.federation, machine.start()
    before = dict(state.server)
    machine.round(state, COHORT)
    w = state.clients.last[COHORT]
    zero = {name: torch.zeros_like(w) for name in federation.algorithm.client}
    steps = federation.draw(RoundLike, COHORT).hp.steps[:, 0].tolist()
    _, upload = federation.algorithm.finish(w, before, zero, federation.local(RoundLike, COHORT, steps))
    share = torch.tensor([federation.share[k] for k in COHORT], dtype=torch.float64)[:, None]
    mean = {name: (share * v).sum(0) / share.sum() for name, v in upload.items()}
    after = dict(federation.algorithm.update(before, mean, len(COHORT) / 6))
    torch.testing.assert_close(state.server, after, rtol=1e-11, atol=1e-12)


class RoundLike:
    """Round 0."""

    number, cohort, lr = 0, COHORT, SHORT.rate(0)


def test_attackers_among_themselves_use_their_own_models():
    machine = hostile("fedavg", Collusion(0.3, 1.0))
    state, _ = play(machine, [THEIRS])
    plain, _ = play(simulation("fedavg", training=SHORT), [THEIRS])
    x = plain.clients.last[THEIRS]
    want = x.mean(0) - x.std(0, correction=0)
    torch.testing.assert_close(state.clients.last[THEIRS], want.expand(2, -1), rtol=1e-12, atol=1e-12)


def test_attackers_leave_out_honest_models_that_are_not_finite():
    """As the server does: else one client that diverges would disarm the attack."""
    w, theta = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    w[1, 2] = torch.nan
    attack, attackers = Collusion(0.3, 1.0), {3, 4}
    forged = poisoned(attack, attackers, [0, 1, 2, 3, 4], w, theta)
    torch.testing.assert_close(forged[3:], poisoned(attack, attackers, [0, 2, 3, 4], w[[0, 2, 3, 4]], theta)[2:])
    assert forged[3:].isfinite().all()
    alone = poisoned(attack, attackers, [1, 3, 4], w[[1, 3, 4]], theta)
    torch.testing.assert_close(alone[1:], poisoned(attack, attackers, [3, 4], w[3:], theta))


def test_a_cohort_without_attackers_is_as_it_was():
    state, (outcome,) = play(hostile("feddc", SignFlip()), [[0, 1]])
    plain, (usual,) = play(simulation("feddc", CASES["feddc"][1], training=SHORT), [[0, 1]])
    torch.testing.assert_close(state.server, plain.server, rtol=0, atol=0)
    assert outcome.attackers == []
    assert usual.attackers is None


def test_flipped_labels_are_those_of_the_attackers_alone():
    data = samples()
    flipped = relabelled(LabelFlip(), THEIRS, data, 4)
    for k, part in enumerate(data.parts):
        want = 3 - data.y[part] if k in THEIRS else data.y[part]
        assert torch.equal(flipped.y[part], want)
    assert torch.equal(flipped.y_test, data.y_test)
    assert relabelled(SignFlip(), THEIRS, data, 4) is data


def test_a_run_with_flipped_labels_is_the_run_on_such_data():
    keys = {"clients": 5, "participation": 0.6, "rounds": 2, "epochs": 1, "partition": "iid", "device": "cpu"}
    config = resolve({**SMALL, **{k: v for k, v in keys.items() if k != "device"}, "attack": "label-flip"})
    data = load("digits")
    (federation,) = build_module.build([config], data, "cpu").federations
    assert len(federation.attackers) == 1
    part = federation.samples.parts[next(iter(federation.attackers))]
    y = data.y_train.copy()
    y[part] = 9 - y[part]
    attacked = experiment.run(config, device="cpu")
    plain = experiment.run(
        resolve({**config.flat(), "attack": "none", "attackers": None}), data=replace(data, y_train=y)
    )
    assert all(torch.equal(v, plain.models["cloud"][name]) for name, v in attacked.models["cloud"].items())
    assert attacked.accuracy == plain.accuracy


@pytest.mark.parametrize(
    ("share", "clients", "count"), [(0, 10, 0), (0.2, 10, 2), (0.01, 10, 1), (0.25, 4, 1), (1, 7, 7)]
)
def test_so_many_attackers_are_drawn(share, clients, count):
    drawn = Hostile(share).draw(3, clients)
    assert len(drawn) == count
    assert drawn <= set(range(clients))
    assert drawn == Hostile(share).draw(3, clients)


def test_the_seed_decides_who_attacks():
    drawn = [Hostile(0.2).draw(seed, 50) for seed in range(20)]
    assert len(set(drawn)) == 20
    assert len(frozenset().union(*drawn)) > 45
    assert Hostile(0.1).draw(0, 50) < Hostile(0.2).draw(0, 50)
    assert Attack().draw(0, 50) == frozenset()


def test_the_records_say_who_attacked(tmp_path):
    result = fedman.run(**ATTACKED, out=tmp_path)
    theirs = SignFlip(0.25).draw(0, 8)
    assert [set(r["attackers"]) for r in result.rounds] == [theirs & set(r["cohort"]) for r in result.rounds]
    assert any(r["attackers"] for r in result.rounds)
    assert RunFolder(tmp_path).read_rounds() == result.rounds
    assert result.summary["config"]["attack_scale"] == 8.0
    assert all("attackers" not in r for r in fedman.run(**SMALL, device="cpu").rounds)


@pytest.mark.parametrize(("rule", "attack"), [("median", "label-flip"), ("multi-krum", "collusion")])
def test_resume_gives_the_same_bits(tmp_path, rule, attack):
    keys = {**SMALL, "participation": 0.6, "algorithm": "feddc", "aggregation": rule, "attack": attack, "device": "cpu"}
    keys |= {"checkpoint_seconds": 0.0}
    whole = fedman.run(**keys, out=tmp_path / "whole")

    run_killed(3, **keys, out=tmp_path / "stopped")
    again = fedman.run(**keys, out=tmp_path / "stopped", resume=True)
    for model, weights in whole.models.items():
        assert all(torch.equal(v, again.models[model][name]) for name, v in weights.items())
    untimed = [[{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds] for run in (whole, again)]
    assert untimed[0] == untimed[1]


def test_runs_under_attack_stack_where_they_share_the_labels():
    def groups(**keys):
        return sweep.groups([resolve({**SMALL, **keys, **o}) for o in ({}, {"seed": 1}, {"zeta": 0.1})], [True] * 3)

    assert groups(attack="sign-flip") == [[0, 1, 2]]
    assert groups(attack="label-flip") == [[0, 2], [1]]


def test_stacked_runs_under_attack_end_as_they_do_alone():
    keys = {**SMALL, "rounds": 2, "participation": 0.6, "algorithm": "feddc", "precision": "fp64"}
    keys |= {"attack": "collusion", "aggregation": "trimmed-mean"}
    configs, data = [resolve({**keys, "seed": seed}) for seed in (0, 1)], load("digits")
    quiet = [lambda record: None] * 2
    stacked = experiment.run_stacked(configs, data, [None] * 2, False, "cpu", quiet, print)
    for config, result in zip(configs, stacked, strict=True):
        alone = experiment.run(config, data=data, device="cpu")
        assert [r["attackers"] for r in result.rounds] == [r["attackers"] for r in alone.rounds]
        for name, v in alone.models["cloud"].items():
            torch.testing.assert_close(result.models["cloud"][name], v, rtol=1e-9, atol=1e-11)


def test_one_of_four_clients_that_sends_its_update_backwards_eight_times():
    """It ruins the mean; the median, multi-Krum and the trimmed mean stay near the result without it."""
    keys = {
        "clients": 4,
        "participation": 1.0,
        "partition": "iid",
        "rounds": 5,
        "epochs": 1,
        "batch_size": 20,
        "device": "cpu",
    }
    honest = fedman.run(**keys).accuracy
    attacked = {"attack": "sign-flip", "attackers": 0.25, "attack_scale": 8.0}
    assert fedman.run(**keys, **attacked).accuracy < honest - 30
    for rule in (
        {"aggregation": "median"},
        {"aggregation": "multi-krum"},
        {"aggregation": "trimmed-mean", "trim": 0.25},
    ):
        assert fedman.run(**keys, **attacked, **rule).accuracy > honest - 5


@dataclass(frozen=True)
class Zeros(Hostile):
    """Uploads nothing but zeros."""

    title = "zeros"

    def upload(self, own, honest, theta):
        return own * 0


def test_an_attack_of_ones_own():
    attack = resolve({"attack": "tests.training.test_attacks:Zeros", "attackers": 0.5}).make_attack()
    state, _ = play(hostile("fedavg", check_attack(attack)), [COHORT])
    assert not state.clients.last[THEIRS].any()
    assert state.clients.last[[0, 3]].all()


@dataclass(frozen=True)
class Broken(Hostile):
    title = "broken"
    how: str = "raises"

    def upload(self, own, honest, theta):
        return {"nothing": None, "shape": honest}[self.how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"^attack: Broken.upload fails \(KeyError: 'raises'\)$"),
        ("nothing", r"^attack: Broken.upload returns NoneType; \(3, 2\) is wanted here$"),
        ("shape", r"^attack: Broken.upload returns shape \(4, 2\); \(3, 2\) is wanted here$"),
    ],
)
def test_attacks_that_do_not_do_what_they_must(how, message):
    with pytest.raises(UserError, match=message):
        check_attack(Broken(how=how))


def test_labels_that_are_no_classes_cannot_be_flipped():
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    data = from_arrays(x, x[:, :1], x, x[:, :1])
    keys = {"task": "regression", "clients": 2, "rounds": 1, "partition": "iid", "attack": "label-flip"}
    with pytest.raises(UserError, match=r"^attack: label-flip needs labels, one of several classes for every sample"):
        fedman.run(dataset=data, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attack": "signflip"}, "attack: no attack named 'signflip'; did you mean sign-flip?"),
        ({"attackers": 0.2}, "attackers: none has no such hyper-parameter (it has none)"),
        ({"attack": "sign-flip", "attackers": 1.5}, "attackers: should be less than or equal to 1, not 1.5"),
        ({"attack": "sign-flip", "attackers": "x"}, "attackers: should be a number"),
        ({"attack": "sign-flip", "attack_scale": -1}, "attack_scale: should be greater than or equal to 0, not -1"),
        ({"attack": "sign-flip", "attack_scale": "inf"}, "attack_scale: should be a finite number"),
        ({"attack": "label-flip", "attack_scale": 2}, "attack_scale: label-flip has no such hyper-parameter"),
        (
            {"attack": "fedman.algorithms:FedAvg"},
            "attack: fedman.algorithms:FedAvg is the class FedAvg, not a subclass",
        ),
    ],
)
def test_bad_settings(keys, message):
    with pytest.raises(UserError) as error:
        resolve(keys)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
