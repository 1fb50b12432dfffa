"""An algorithm from outside the package that uses all that an algorithm can define, against its own numpy loop.

A memory of clients that changes in every step, a vector carried through the steps and thrown away, one that `begin`
makes, a vector of the server beside the model that is sent, and a model of the server that is not the one sent.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from fedman.algorithms import Algorithm, descend, hyperparameter
from fedman.execution.one_by_one import OneByOne
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten
from fedman.training.check_parts import check_algorithm
from tests.federations import COHORTS, SIZES, TRAINING, batches, network, play, samples, simulation, together
from tests.reference import clip, objective

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
HYPER = {"gamma": 0.6, "pull": 0.2, "ahead": 0.7}


@dataclass(frozen=True)
class Lookahead(Algorithm):
    """Step: m_k ← γm_k + ∇F(w)/p_k; w ← w − η(clip(m_k + α(w − z_k)) + (λ + α/p_k)w), where z_k = z − 0.1·m_k/p_k is
    that of the round's beginning. After: m_k += 0.01·Σ|change of w|.

    Server: z ← (z + mean x_k)/2, its model. It sends a model ahead of z, along the change of z and of the clients.
    """

    title = "Lookahead"
    server = ("w", "z", "m")
    client = ("m",)
    scratch = ("m", "path")
    cloud = "z"

    gamma: float = hyperparameter(0.9, "γ, memory of gradients")
    pull: float = hyperparameter(0.1, "α, towards the server's model")
    ahead: float = hyperparameter(0.5, "β, how far the model sent is ahead")

    def begin(self, server, client, hp):
        return {"target": server["z"] - 0.1 * client["m"] / hp.p}

    def step(self, w, grad, server, client, hp):
        m = self.gamma * client["m"] + grad(w) / hp.p
        new = descend(w, m + self.pull * (w - client["target"]), hp, extra_decay=self.pull / hp.p)
        return new, {"m": m, "path": client["path"] + (new - w).abs()}

    def finish(self, w, server, client, hp):
        moved = (w - server["w"]) / hp.steps
        return {"m": client["m"] + 0.01 * client["path"]}, {"w": w, "m": 0.01 * client["m"], "moved": moved}

    def update(self, server, mean, fraction):
        z = server["z"] + 0.5 * (mean["w"] - server["z"])
        m = server["m"] + fraction * mean["m"]
        return {"w": z + self.ahead * (z - server["z"]) + 0.1 * mean["moved"] - 0.01 * m, "z": z, "m": m}

    def extra_decay(self, p):
        return self.pull / p


def loop(hyper, data, training, cohorts, draw):
    """The same in numpy, a client and a step at a time."""
    gamma, alpha, beta = hyper["gamma"], hyper["pull"], hyper["ahead"]
    N, n = len(SIZES), np.array(SIZES, float)
    p = n * N / n.sum()
    w0 = flatten(network()).numpy()
    theta, z, m_server = w0.copy(), w0.copy(), np.zeros_like(w0)
    m, last = np.zeros((N, len(w0))), np.tile(w0, (N, 1))
    for t, S in enumerate(cohorts):
        eta, sent, moved = training.rate(t), np.zeros_like(w0), np.zeros_like(w0)
        for k in S:
            w, path, target, K = theta.copy(), np.zeros_like(w0), z - 0.1 * m[k] / p[k], 0
            for x, y in draw(t, k):
                m[k] = gamma * m[k] + objective(w, x, y, training.zeta)[1] / p[k]
                direction = clip(m[k] + alpha * (w - target), training.clip)
                new = w - eta * (direction + (training.weight_decay + alpha / p[k]) * w)
                path += np.abs(new - w)
                w = new
                K += 1
            sent += 0.01 * m[k] / len(S)
            moved += (w - theta) / K / len(S)
            m[k] += 0.01 * path
            last[k] = w
        sel, before = last[S].mean(0), z
        z = z + 0.5 * (sel - z)
        m_server = m_server + len(S) / N * sent
        theta = z + beta * (z - before) + 0.1 * moved - 0.01 * m_server
    return {"sel": sel, "all": last.mean(0), "cloud": z, "w": theta, "m": m_server, "memory": m, "last": last}


def check(federation, state, want):
    for model, w in federation.models(state).items():
        np.testing.assert_allclose(w.numpy(), want[model], err_msg=model, **CLOSE)
    for key, value in (("w", "w"), ("z", "cloud"), ("m", "m")):
        np.testing.assert_allclose(state.server[key].numpy(), want[value], err_msg=key, **CLOSE)
    np.testing.assert_allclose(state.clients.memory["m"].numpy(), want["memory"], **CLOSE)
    np.testing.assert_allclose(state.clients.last.numpy(), want["last"], **CLOSE)
    assert set(state.clients.memory) == {"m"}  # the path is not kept


def test_it_keeps_the_contract():
    assert check_algorithm(Lookahead(**HYPER))


def test_what_is_sent_is_not_the_servers_model():
    """The tests below could otherwise pass without `cloud`; and the memory matters."""
    data = samples()
    want = loop(HYPER, data, TRAINING, COHORTS, batches(data, TRAINING))
    assert np.linalg.norm(want["w"] - want["cloud"]) > 1e-2
    assert np.linalg.norm(want["memory"], axis=1).min() > 1e-2
    forgetful = loop({**HYPER, "gamma": 0.0}, data, TRAINING, COHORTS, batches(data, TRAINING))
    assert np.linalg.norm(want["w"] - forgetful["w"]) > 1e-2


@pytest.mark.parametrize("execution", [OneByOne, Vmapped])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_run_alone(chunk, execution):
    data = samples()
    machine = simulation(Lookahead(**HYPER), data=data, chunk=chunk, execution=execution)
    state, outcomes = play(machine)
    check(machine.federation, state, loop(HYPER, data, TRAINING, COHORTS, batches(data, TRAINING)))
    assert [o.quarantined for o in outcomes] == [[]] * len(COHORTS)


@pytest.mark.parametrize("execution", [OneByOne, Vmapped])
def test_a_run_stacked_with_others(execution):
    """Runs that differ in seed, ζ and hyper-parameters, which are columns then."""
    data = samples()
    hypers = [HYPER, {**HYPER, "gamma": 0.3}, {**HYPER, "pull": 0.05, "ahead": 0.2}]
    trainings = [TRAINING, replace(TRAINING, seed=1, zeta=0.0), replace(TRAINING, seed=2)]
    runs = [
        simulation(Lookahead(**hyper), data=data, training=t, longest=20, execution=execution)
        for hyper, t in zip(hypers, trainings, strict=True)
    ]
    states = [run.start() for run in runs]
    for cohort in COHORTS:
        together(runs, states, [cohort] * 3)
    for run, state, hyper, training in zip(runs, states, hypers, trainings, strict=True):
        check(run.federation, state, loop(hyper, data, training, COHORTS, batches(data, training)))


@pytest.mark.parametrize("chunk", [1, 100], ids=["one by one", "vmapped"])
def test_a_run_on_flower(chunk, tmp_path, monkeypatch):
    """By its name, `module:Name`: clients behind real messages, which remember on their own disks."""
    pytest.importorskip("flwr")
    from fedman.flower.exchange import exchange
    from tests.flower.local_grid import serve_samples

    assert (exchange(Lookahead()).down, exchange(Lookahead()).up) == (("w", "z"), ("w", "m"))
    data = samples()
    data = replace(data, x=data.x.float().double())  # files of numbers are float32
    keys = {f.name: getattr(TRAINING, f.name) for f in fields(TRAINING)} | {"rounds": 3, "chunk": chunk}
    name = "tests.backends.test_own_algorithm:Lookahead"
    result = serve_samples(data, network, {"algorithm": name, **HYPER, **keys}, tmp_path, monkeypatch, allow=name)
    assert [r["refused"] for r in result.rounds] == [{}] * 3
    want = loop(HYPER, data, TRAINING, [list(range(len(SIZES)))] * 3, batches(data, TRAINING))
    for model, parameters in result.models.items():
        w = torch.cat([v.flatten() for v in parameters.values()])
        np.testing.assert_allclose(w.numpy(), want[model], err_msg=model, **CLOSE)
