"""Where algorithms must coincide, whatever the data."""

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, vmap

from fedman.algorithms import ALGORITHMS, Local
from fedman.algorithms.fedacg import FedACG
from fedman.algorithms.fedadam import FedAdam
from fedman.algorithms.fedasam import FedASAM
from fedman.algorithms.fedavg import FedAvg
from fedman.algorithms.fedavgm import FedAvgM
from fedman.algorithms.fedcm import FedCM
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.fedgamma import FedGAMMA
from fedman.algorithms.fedgloss import FedGloSS
from fedman.algorithms.fedlesam import FedLESAM
from fedman.algorithms.fedlesamd import FedLESAMD
from fedman.algorithms.fedprox import FedProx
from fedman.algorithms.fedsam import FedSAM
from fedman.algorithms.fedsmoo import FedSMOO
from fedman.algorithms.fedspeed import FedSpeed
from fedman.algorithms.mofedsam import MoFedSAM
from fedman.algorithms.scaffold import Scaffold
from fedman.algorithms.steps import climb, descend, norm
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten
from tests.cases import CASES
from tests.federations import COHORTS, SIZES, TRAINING, forget, network, play, samples, simulation


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Untapped(Vmapped):
    """Gradients of the cross-entropy alone, by torch.func and a module of its own."""

    def gradient(self, W, batch, zeta):
        module = copy.deepcopy(self.model).requires_grad_(False)

        def loss(w, x, y, weight):
            out = functional_call(module, self.parameters.unflatten(w), (x,))
            return (nn.functional.cross_entropy(out, y, reduction="none") * weight).sum()

        W = W.detach().requires_grad_()
        ce = vmap(loss)(W, batch.x, batch.y, batch.weight)
        return torch.autograd.grad(ce.sum(), W)[0], ce.detach(), W.new_empty(len(W), 0)


@pytest.mark.parametrize("case", CASES)
def test_zeta_zero_is_bit_identical_to_plain(case):
    """ζ = 0 has the same bits as gradients of a model that was never tapped."""
    name, hyper = CASES[case]
    plain = replace(TRAINING, zeta=0.0)
    with_taps = play(simulation(name, hyper, training=plain))[0]
    untapped = simulation(name, hyper, training=plain, execution=Untapped)
    assert torch.equal(with_taps.server["w"], play(untapped)[0].server["w"])


@pytest.mark.parametrize("case", CASES)
def test_same_seed_twice_is_bit_identical(case):
    name, hyper = CASES[case]
    a, b = (play(simulation(name, hyper)) for _ in range(2))
    assert torch.equal(a[0].server["w"], b[0].server["w"])
    assert a[1] == b[1]


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedprox", {"mu": 0.0}),
        ("fedsam", {"rho": 0.0}),
        ("fedasam", {"rho": 0.0}),
        ("feddyn", {"alpha": 0.0}),
        ("feddc", {"alpha": 0.0}),
        ("fedspeed", {"alpha": 0.0, "rho": 0.0}),
        ("scaffold", {}),
        ("fedavgm", {}),
        ("fedadam", {}),
        ("fedcm", {"alpha": 1.0}),
        ("mofedsam", {"alpha": 1.0, "rho": 0.0}),
        ("fedgamma", {"rho": 0.0}),
        ("fedsmoo", {"alpha": 0.0, "rho": 0.0}),
        ("fedlesam", {"rho": 0.2}),  # no ascent at a client's first time
        ("fedlesam-d", {"alpha": 0.0, "rho": 0.2}),
        ("fedacg", {"mu": 0.0}),
        ("fedgloss", {"alpha": 0.0, "rho": 0.2, "rho_local": 0.0}),
    ],
)
def test_first_round_local_models_are_fedavgs_when_the_method_is_switched_off(name, hyper):
    x = play(simulation(name, hyper), COHORTS[:1])[0].clients.last
    close(x, play(simulation("fedavg"), COHORTS[:1])[0].clients.last)


@pytest.mark.parametrize(
    ("name", "hyper"), [("fedprox", {"mu": 0.0}), ("fedsam", {"rho": 0.0}), ("fedasam", {"rho": 0.0})]
)
def test_methods_without_memory_stay_fedavg_in_every_round(name, hyper):
    close(play(simulation(name, hyper))[0].server["w"], play(simulation("fedavg"))[0].server["w"])


@dataclass(frozen=True)
class PlainFedAvg(FedAvg):
    weighted = False


@dataclass(frozen=True)
class PlainFedProx(FedProx):
    weighted = False


@dataclass(frozen=True)
class AgreedFedSMOO(FedSMOO):
    """μ_k and s̄ stay at zero."""

    def step(self, w, grad, server, client, hp):
        w, carried = super().step(w, grad, server, client, hp)
        return w, {name: v * 0 for name, v in carried.items()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FedSpeed(alpha=0.3, rho=0.0), FedDyn(alpha=0.3)),
        (FedAvgM(server_momentum=0.0, server_lr=1.0), PlainFedAvg()),
        (FedAdam(beta1=0.0, beta2=1.0, tau=0.3, server_lr=0.6), PlainFedAvg()),  # √v = τ: Δ·η_g/(2τ)
        (FedCM(alpha=1.0), PlainFedAvg()),
        (MoFedSAM(alpha=0.3, rho=0.0), FedCM(alpha=0.3)),
        (FedGAMMA(rho=0.0), Scaffold(decayed=True)),
        (FedGAMMA(rho=0.0, decayed=False), Scaffold()),
        (AgreedFedSMOO(alpha=0.3, rho=0.2), FedSpeed(alpha=0.3, rho=0.2)),
        (FedLESAM(rho=0.0), PlainFedAvg()),
        (FedLESAMD(alpha=0.3, rho=0.0), FedDyn(alpha=0.3)),
        (FedACG(mu=0.3, server_momentum=0.0), PlainFedProx(mu=0.3)),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_method_switched_off_is_the_one_it_extends_in_every_round(one, other):
    a, b = play(simulation(one))[0], play(simulation(other))[0]
    close(a.server["w"], b.server["w"])
    close(a.clients.last, b.clients.last)
    for name in set(a.clients.memory) & set(b.clients.memory):
        close(a.clients.memory[name], b.clients.memory[name])


def test_fedgloss_without_ascents_differs_from_feddyn_in_the_clip_alone():
    """Its quadratic term is inside the clip, FedDyn's αw outside: where the clip never acts they coincide."""
    loose = replace(TRAINING, clip=1e9)
    gloss, dyn = FedGloSS(alpha=0.3, rho=0.0, rho_local=0.0), FedDyn(alpha=0.3)
    a, b = (play(simulation(algorithm, training=loose))[0] for algorithm in (gloss, dyn))
    close(a.server["w"], b.server["w"])
    close(a.server["model"], b.server["w"])
    close(a.clients.memory["h"], b.clients.memory["h"])
    a, b = (play(simulation(algorithm))[0] for algorithm in (gloss, dyn))
    assert (a.server["w"] - b.server["w"]).norm() > 1e-3


def test_fedgloss_sends_a_model_uphill_from_its_own():
    machine = simulation("fedgloss", {"alpha": 0.3, "rho": 0.1, "rho_local": 0.2})
    state = machine.start()
    assert torch.equal(state.server["w"], state.server["model"])
    for cohort in COHORTS:
        sent = state.server["w"]
        machine.round(state, cohort)
        delta = state.clients.last[cohort].mean(0) - sent
        close(state.server["w"] - state.server["model"], -0.1 * delta / delta.norm())
        assert torch.equal(machine.federation.models(state)["cloud"], state.server["model"])


def test_fedacgs_model_is_the_mean_upload_and_the_model_sent_is_ahead_of_it():
    machine = simulation("fedacg", {"mu": 0.3, "server_momentum": 0.6})
    state = machine.start()
    for cohort in COHORTS:
        before = state.server["model"]
        machine.round(state, cohort)
        close(state.server["model"], state.clients.last[cohort].mean(0))
        close(state.server["w"], state.server["model"] + 0.6 * (state.server["model"] - before))


def test_fedlesams_clients_ascend_from_their_second_time_on():
    """Cohorts {0, 2, 5} and {1, 2, 3, 4}: in the second round only client 2 has been sent a model before."""
    plain = play(simulation(PlainFedAvg()), COHORTS[:2])[0].clients.last
    for last_round, ascend in ((False, {2}), (True, {1, 2, 3, 4})):
        found = play(simulation(FedLESAM(rho=0.2, last_round=last_round)), COHORTS[:2])[0].clients.last
        assert set(((found - plain).norm(dim=-1) > 1e-3).nonzero().flatten().tolist()) == ascend


def test_fedsmoos_ascents():
    """Every step changes μ_k by e − s̄, with ‖e‖ = ρ; ‖s̄‖ = ρ from where ascents before a round's last one show."""
    machine = simulation("fedsmoo", {"alpha": 0.3, "rho": 0.2}, training=replace(TRAINING, epochs=1, batch_size=100))
    state, _ = play(machine, COHORTS[:1])
    mu = state.clients.memory["mu"]
    assert mu.norm(dim=-1).tolist() == pytest.approx([0.2 * (k in COHORTS[0]) for k in range(6)], rel=1e-5)
    assert state.server["s"].norm() == 0  # of one step: m = mean (μ_k − e) = 0
    machine.round(state, COHORTS[1])
    assert state.server["s"].norm().item() == pytest.approx(0.2, rel=1e-5)


def test_fedcms_direction_is_the_last_rounds_change_a_step():
    """Clients of equal size: d = (θ − mean x_k)/(K·η)."""
    data = samples(sizes=[12] * 6)
    machine = simulation("fedcm", {"alpha": 0.3}, data=data)
    state = machine.start()
    for t, cohort in enumerate(COHORTS):
        sent = state.server["w"]
        machine.round(state, cohort)
        close(state.server["d"], (sent - state.server["w"]) / (4 * TRAINING.rate(t)))


def test_asam_with_unit_scaling_is_sam():
    """T ≡ 1: no entry counts as a weight."""
    torch.manual_seed(0)
    w = torch.randn(3, 20, dtype=torch.float64)
    A = torch.randn(20, 20, dtype=torch.float64)
    one = torch.ones(3, 1, dtype=torch.float64)
    hp = Local(torch.tensor(0.1, dtype=torch.float64), 0.1, 0.01, 0.5, one, one, torch.zeros(20, dtype=torch.bool))
    args = (lambda v: (v @ A).sin(), {"w": w[0]}, {}, hp)
    close(FedASAM(rho=0.3, eta=0.2).step(w, *args), FedSAM(rho=0.3).step(w, *args))
    weights = replace(hp, is_weight=torch.ones(20, dtype=torch.bool))
    assert not torch.allclose(FedASAM(rho=0.3, eta=0.2).step(w, *args[:-1], weights), FedSAM(rho=0.3).step(w, *args))


def test_feddc_with_gradient_states_at_zero_is_feddyn_while_the_clip_is_off():
    loose = replace(TRAINING, clip=1e9)
    dc = simulation("feddc", {"alpha": 0.3}, training=loose)
    state = dc.start()
    for cohort in COHORTS:
        dc.round(state, cohort)
        forget(state, cohort, "g")
        state.server["g"].zero_()
    close(state.server["w"], play(simulation("feddyn", {"alpha": 0.3}, training=loose))[0].server["w"])


@pytest.mark.parametrize("name", ["feddyn", "feddc", "fedspeed", "fedsmoo", "fedlesam-d", "fedgloss"])
def test_drift_is_the_sum_of_a_clients_moves(name):
    machine = simulation(name, {"alpha": 0.3})
    state = machine.start()
    moves = torch.zeros_like(state.clients.last)
    for cohort in COHORTS:
        theta = state.server["w"]
        machine.round(state, cohort)
        moves[cohort] += state.clients.last[cohort] - theta
    close(state.clients.memory["h"], moves)


def test_feddcs_gradient_state_after_round_one():
    """g = −(1/N) Σ_S p_k·Δ_k/(K_k·η_0): with g = g_k = 0 before, p_k(g_k⁺ − g_k) = −p_k·Δ_k/(K_k·η_0)."""
    machine = simulation("feddc", {"alpha": 0.3})
    theta = machine.start().server["w"]
    state, _ = play(machine, COHORTS[:1])
    want = torch.zeros_like(theta)
    for k in COHORTS[0]:
        steps = TRAINING.epochs * -(-SIZES[k] // TRAINING.batch_size)
        want -= (
            machine.federation.relative_size[k] * (state.clients.last[k] - theta) / (steps * TRAINING.lr) / len(SIZES)
        )
    close(state.server["g"], want)


@given(scale=st.floats(1e-3, 1e3), decay=st.floats(0, 1), extra=st.floats(0, 1), bound=st.floats(0.01, 10))
@settings(max_examples=50, deadline=None)
def test_the_clip_bounds_the_gradient_and_never_the_decay(scale, decay, extra, bound):
    torch.manual_seed(0)
    w, g = torch.randn(2, 4, 9, dtype=torch.float64)
    g = scale * g
    one = torch.ones(4, 1, dtype=torch.float64)
    hp = Local(torch.tensor(0.1, dtype=torch.float64), 0.1, decay, bound, one, one, one > 0)
    move = (w - descend(w, g, hp, extra)) / 0.1 - (decay + extra) * w
    norms = g.norm(dim=-1)
    torch.testing.assert_close(move.norm(dim=-1), norms.minimum(bound * norms / (norms + 1e-6)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cosine_similarity(move, g), torch.ones(4).double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_permuted_cohort_gives_the_same_models(case):
    """A client's work depends on the client alone; only the order of the server's sum changes."""
    name, hyper = CASES[case]
    a = play(simulation(name, hyper))[0]
    b = play(simulation(name, hyper), [cohort[::-1] for cohort in COHORTS])[0]
    close(a.server["w"], b.server["w"])
    close(a.clients.last, b.clients.last)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_pure_and_keeps_its_dtype(case):
    name, hyper = CASES[case]
    algorithm = ALGORITHMS[name](**hyper)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        w = torch.randn(3, 8, dtype=dtype)
        one = torch.ones(3, 1, dtype=dtype)
        server = {key: torch.randn(8, dtype=dtype) for key in algorithm.server}
        client = {key: torch.randn(3, 8, dtype=dtype) for key in (*algorithm.client, *algorithm.scratch)}
        inputs = [w, *server.values(), *client.values()]
        before = [v.clone() for v in inputs]
        hp = Local(torch.tensor(0.1, dtype=dtype), 0.1, 0.01, 0.5, one, one, torch.ones(8, dtype=torch.bool))
        fixed = algorithm.begin(server, client, hp)
        after = algorithm.step(w, lambda v: v * 2, server, {**client, **fixed}, hp)
        after = after[0] if isinstance(after, tuple) else after
        memory, upload = algorithm.finish(after, server, client, hp)
        updated = algorithm.update(server, {key: v[0] for key, v in upload.items()}, 0.5)
        assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
        assert {v.dtype for v in (after, *memory.values(), *upload.values(), *updated.values())} == {dtype}
        assert set(memory) == set(algorithm.client)
        assert set(updated) == set(algorithm.server)


def test_common_start_comes_from_the_module():
    assert torch.equal(simulation().start().server["w"], flatten(network()))
    assert samples().sizes(range(6)) == SIZES


def test_norms_run_over_the_last_axis():
    g = torch.randn(2, 3, 5)
    torch.testing.assert_close(norm(g), g.square().sum(-1, keepdim=True).sqrt())


def test_fused_kernels_take_the_place_of_the_formulas():
    one = torch.ones(2, 1)
    fused = SimpleNamespace(clip_update=lambda w, g, *rest: w + g, climb=lambda w, s, rho, *rest: w + rho * s)
    hp = Local(torch.tensor(0.1), 0.1, 0.01, 0.5, one, one, one > 0, fused=fused)
    assert torch.equal(descend(one, 2 * one, hp), 3 * one)
    assert torch.equal(climb(one, 2 * one, 5.0, hp), 11 * one)
