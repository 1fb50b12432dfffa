"""Aggregation rules against plain loops, and what they promise: no order matters, no outlier has great influence."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedman.aggregation import AGGREGATIONS, Aggregation, Krum, Mean, Median, MultiKrum, NormClip, TrimmedMean, base
from fedman.algorithms import ALGORITHMS
from fedman.config import resolve
from fedman.errors import UserError
from fedman.runs.build import stack_key
from fedman.training.aggregate import weighted_sum
from fedman.training.check_parts import check_aggregation
from tests.aggregation.rule_reference import RULES
from tests.cases import CASES
from tests.federations import COHORTS, TRAINING, play, simulation

HYPER = {
    "trimmed-mean": [{}, {"trim": 0.0}, {"trim": 0.25}, {"trim": 0.5}],
    "krum": [{}, {"assumed_attackers": 0.0}, {"assumed_attackers": 0.5}],
    "multi-krum": [{}, {"assumed_attackers": 0.0}, {"assumed_attackers": 0.5}],
    "norm-clip": [{}, {"clip_multiple": 0.3}, {"clip_multiple": 1.7}],
}
KINDS = [(name, hyper) for name in AGGREGATIONS for hyper in HYPER.get(name, [{}])]
SHORT = replace(TRAINING, epochs=1, batch_size=10)
ROBUST = [Median(), TrimmedMean(trim=0.2), Krum(), MultiKrum(), NormClip()]


def uploads(clients, seed=0, dtype=torch.float64):
    """Models and another vector of seven numbers, some of which several clients share."""
    rng = np.random.default_rng([clients, seed])
    made = {name: rng.normal(size=(clients, 7)) for name in ("w", "h")}
    made["h"] = made["h"].round(0)
    return {name: torch.tensor(v, dtype=dtype) for name, v in made.items()}


SHARES = {
    "equal": lambda n: [1.0] * n,
    "whole": lambda n: [float(1 + i * i % 4) for i in range(n)],
    "relative sizes": lambda n: [(3 + 5 * i % 7) * n / sum(3 + 5 * j % 7 for j in range(n)) for i in range(n)],
}


def averaged(rule, upload, share, theta):
    """The mean that the server's step receives."""
    server = dict.fromkeys(upload, theta)
    counted = rule.aggregate(upload, torch.tensor(share, dtype=torch.float64), server)
    assert set(counted) == set(upload)
    return {name: weighted_sum(v.expand_as(upload[name]), share) / sum(share) for name, v in counted.items()}


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize(("name", "hyper"), KINDS, ids=[f"{n} {h}" for n, h in KINDS])
def test_rules_are_the_plain_loops(name, hyper, clients, shares):
    upload, share, theta = uploads(clients), SHARES[shares](clients), torch.linspace(-1, 1, 7).double()
    found = averaged(AGGREGATIONS[name](**hyper), upload, share, theta)
    arrays = {key: v.numpy() for key, v in upload.items()}
    for key, want in RULES[name](arrays, np.array(share), theta.numpy(), **hyper).items():
        np.testing.assert_allclose(found[key].numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "hyper"), KINDS, ids=[f"{n} {h}" for n, h in KINDS])
def test_blocks_of_columns_change_nothing(name, hyper, monkeypatch):
    rule, upload, share, theta = AGGREGATIONS[name](**hyper), uploads(6), SHARES["whole"](6), torch.zeros(7).double()
    whole = averaged(rule, upload, share, theta)
    monkeypatch.setattr(base, "BLOCK", 3)
    torch.testing.assert_close(averaged(rule, upload, share, theta), whole, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.title)
def test_the_order_of_clients_does_not_matter(rule, shares):
    upload, share, theta = uploads(9), SHARES[shares](9), torch.zeros(7).double()
    order = np.random.default_rng(1).permutation(9)
    moved = averaged(rule, {name: v[order] for name, v in upload.items()}, [share[i] for i in order], theta)
    torch.testing.assert_close(moved, averaged(rule, upload, share, theta), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("value", [1e30, -1e30, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clients", [3, 5, 10])
@pytest.mark.parametrize(
    "rule", [Median(), TrimmedMean(0.34), Krum(0.34), MultiKrum(0.34)], ids=lambda rule: rule.title
)
def test_one_huge_upload_leaves_the_result_among_the_others(rule, clients, dtype, value):
    upload, theta = uploads(clients, dtype=dtype), torch.zeros(7, dtype=dtype)
    honest = {name: v[1:] for name, v in upload.items()}
    hostile = {name: torch.cat([torch.full_like(v[:1], value), v[1:]]) for name, v in upload.items()}
    for name, v in averaged(rule, hostile, [1.0] * clients, theta).items():
        low, high = honest[name].min(0).values - 1e-6, honest[name].max(0).values + 1e-6
        assert ((low <= v) & (v <= high)).all()


@pytest.mark.parametrize("value", [1e30, 1e300])
def test_a_clipped_upload_moves_the_mean_no_further_than_its_share_of_the_bound(value):
    upload, theta = uploads(5), torch.ones(7).double()
    upload["w"][2] = upload["h"][2] = value
    found = averaged(NormClip(2.0), upload, [1.0] * 5, theta)
    bound = 2 * (upload["w"] - theta).norm(dim=-1).sort().values[2]
    assert (found["w"] - theta).norm() <= bound
    assert found["h"].isfinite().all()
    counted = NormClip(2.0).aggregate(upload, torch.ones(5).double(), {"w": theta})
    assert (counted["w"][2] - theta).norm() <= bound * (1 + 1e-12)
    assert torch.equal(counted["w"][0], upload["w"][0])


def test_uploads_that_are_all_the_same_stay_so():
    upload = {name: v[:1].repeat(4, 1) for name, v in uploads(4).items()}
    for name in AGGREGATIONS:
        for theta in (upload["w"][0], torch.zeros(7).double()):
            found = averaged(AGGREGATIONS[name](), upload, [1.0, 2.0, 1.0, 0.5], theta)
            torch.testing.assert_close(found, {key: v[0] for key, v in upload.items()}, rtol=1e-14, atol=1e-14)


def test_krum_takes_the_lower_number_of_equally_good_clients():
    rows = torch.tensor([[0.0], [9.0], [1.0], [10.0]]).double()
    found = Krum(0.25).aggregate({"w": rows, "h": rows + 1}, torch.ones(4).double(), {})
    assert found["w"].tolist() == [[0.0]] * 4
    assert found["h"].tolist() == [[1.0]] * 4


def test_those_not_chosen_count_as_the_mean_of_the_others():
    rows = torch.tensor([[0.0], [1.0], [50.0], [2.0]]).double()
    found = MultiKrum(0.25).aggregate({"w": rows}, torch.tensor([1.0, 1.0, 7.0, 2.0]).double(), {})
    assert found["w"].tolist() == [[0.0], [1.0], [1.25], [2.0]]


@dataclass(frozen=True)
class Spied(Aggregation):
    """A rule whose inputs are kept."""

    title = "spied"
    rule: Aggregation
    seen: list

    def aggregate(self, upload, share, server):
        self.seen.append(({k: v.clone() for k, v in upload.items()}, share, {k: v.clone() for k, v in server.items()}))
        return self.rule.aggregate(upload, share, server)


def with_rule(machine, rule):
    return replace(machine, federation=replace(machine.federation, aggregation=rule))


@pytest.mark.parametrize("name", [name for name in AGGREGATIONS if name != "mean"])
@pytest.mark.parametrize("case", ALGORITHMS)
def test_every_algorithm_takes_its_step_from_the_rules_mean(case, name):
    """The server's vectors, `sel` and `all` after every round, from the uploads and the plain loops."""
    seen = []
    machine = with_rule(simulation(*CASES[case], training=SHORT), Spied(AGGREGATIONS[name](), seen))
    federation, state = machine.federation, machine.start()
    last = federation.initial.expand(6, -1).clone()
    share = torch.tensor(federation.share, dtype=torch.float64)
    for cohort in COHORTS[:2]:
        machine.round(state, cohort)
        upload, weights, before = seen[-1]
        assert torch.equal(weights, share[cohort])
        arrays = {key: v.numpy() for key, v in upload.items()}
        want = RULES[name](arrays, weights.numpy(), before["w"].numpy())
        mean = {key: torch.tensor(v) for key, v in want.items()}
        torch.testing.assert_close(state.sel["w"], mean["w"], rtol=1e-12, atol=1e-12)
        after = dict(federation.algorithm.update(before, mean, len(cohort) / 6))
        torch.testing.assert_close(state.server, after, rtol=1e-11, atol=1e-12)
        if name in ("median", "trimmed-mean", "krum"):
            last[cohort] = mean["w"]
            everyone = (share[:, None] * last).sum(0) / share.sum()
            torch.testing.assert_close(federation.models(state)["all"], everyone, rtol=1e-11, atol=1e-12)
    table = state.clients.last
    everyone = (share[:, None] * table).sum(0) / share.sum()
    torch.testing.assert_close(federation.models(state)["all"], everyone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", [TrimmedMean(0.0), MultiKrum(0.0), NormClip(1e9)], ids=lambda rule: rule.title)
@pytest.mark.parametrize("case", ["fedavg", "feddc", "scaffold"])
def test_rules_that_leave_nothing_out_are_the_mean(case, rule):
    plain, _ = play(simulation(*CASES[case], training=SHORT))
    other, _ = play(with_rule(simulation(*CASES[case], training=SHORT), rule))
    torch.testing.assert_close(other.server, plain.server, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other.clients.memory, plain.clients.memory, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Threads(Aggregation):
    """Notes the number of threads."""

    title = "threads"
    seen: list

    def aggregate(self, upload, share, server):
        self.seen.append(torch.get_num_threads())
        return upload


def test_rules_work_on_one_thread_so_that_bits_do_not_depend_on_cores():
    seen, before = [], torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        play(with_rule(simulation(training=SHORT), Threads(seen)), COHORTS[:1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_runs_of_other_rules_are_not_stacked():
    keys = [
        {},
        {"aggregation": "median"},
        {"aggregation": "trimmed-mean"},
        {"aggregation": "trimmed-mean", "trim": 0.3},
    ]
    kinds = [stack_key(resolve(each)) for each in keys]
    assert len(set(kinds)) == 4
    assert stack_key(resolve({"aggregation": "median", "seed": 1, "zeta": 0.1})) == kinds[1]


def test_the_mean_is_left_unsaid_and_other_rules_are_said():
    assert not {"aggregation", "attack"} & resolve({"aggregation": "mean", "attack": "none"}).flat().keys()
    flat = resolve({"aggregation": "trimmed-mean", "trim": "0.30"}).flat()
    assert (flat["aggregation"], flat["trim"]) == ("trimmed-mean", 0.3)
    assert resolve(flat).make_aggregation() == TrimmedMean(0.3)
    assert resolve({}).make_aggregation() == Mean()


@dataclass(frozen=True)
class First(Aggregation):
    """Believes the first client."""

    title = "first"

    def aggregate(self, upload, share, server):
        return {name: v[0] for name, v in upload.items()}


def test_a_rule_of_ones_own():
    config = resolve({"aggregation": "tests.aggregation.test_rules:First"})
    machine = with_rule(simulation("feddc"), config.make_aggregation())
    state, _ = play(machine, [[1, 2]])
    alone, _ = play(simulation("feddc"), [[1]])
    torch.testing.assert_close(state.sel["w"], alone.sel["w"], rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Broken(Aggregation):
    title = "broken"
    how: str = "raises"

    def aggregate(self, upload, share, server):
        if self.how == "writes":
            upload["w"][0] = 0
        found = {
            "nothing": None,
            "names": {"w": upload["w"]},
            "shape": {**upload, "h": upload["h"][:2]},
            "number": {**upload, "h": 1.0},
            "writes": upload,
        }
        return found[self.how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"^aggregation: Broken.aggregate fails \(KeyError: 'raises'\)$"),
        ("nothing", "^aggregation: Broken returns NoneType for uploads of w, h; the same names are wanted$"),
        ("names", "^aggregation: Broken returns w for uploads of w, h; the same names are wanted$"),
        ("shape", r"^aggregation: Broken returns h with shape \(2, 2\); \(2,\) or \(3, 2\) is wanted here$"),
        ("number", r"^aggregation: Broken returns h with float; \(2,\) or \(3, 2\) is wanted here$"),
        ("writes", r"^aggregation: Broken writes to its input upload\['w'\]; a rule must return new tensors$"),
    ],
)
def test_rules_that_do_not_do_what_they_must(how, message):
    with pytest.raises(UserError, match=message):
        check_aggregation(Broken(how))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"aggregation": "medain"}, "aggregation: no aggregation named 'medain'; did you mean median?"),
        ({"aggregation": "os:getcwd"}, "aggregation: os:getcwd is a builtin_function_or_method, not a subclass of"),
        ({"aggregation": "nowhere:Rule"}, "aggregation: nowhere:Rule cannot be imported"),
        ({"trim": 0.1}, "trim: mean has no such hyper-parameter"),
        ({"aggregation": "trimmed-mean", "trim": 0.6}, "trim: should be less than or equal to 0.5, not 0.6"),
        ({"aggregation": "trimmed-mean", "trim": "nan"}, "trim: should be "),
        ({"aggregation": "krum", "assumed_attackers": 0.7}, "assumed_attackers: should be less than or equal to 0.5"),
        ({"aggregation": "norm-clip", "clip_multiple": -1}, "clip_multiple: should be greater than or equal to 0"),
        ({"aggregation": "median", "trim": 0.1}, "trim: median has no such hyper-parameter"),
    ],
)
def test_bad_settings(keys, message):
    with pytest.raises(UserError) as error:
        resolve(keys)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
