"""Rounds of models with dropout and batch-norm against a plain loop over clients, with PyTorch's own layers, unpadded
batches and masks computed apart; checkpoints, sweeps, quarantine, aggregation rules, Flower, flatness."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedman
from fedman.aggregation.distances import MultiKrum, NormClip
from fedman.config import resolve
from fedman.data import Dataset
from fedman.execution.one_by_one import OneByOne
from fedman.models.parameters import batch_norm_entries, flatten, flatten_buffers
from fedman.runs import experiment
from fedman.runs.build import on_device
from fedman.runs.folder import RunFolder
from fedman.training.check_fit import warn_of_single_samples
from fedman.training.evaluate import Evaluator
from fedman.training.federation import OWN
from fedman.training.settings import BUFFERS
from tests.federations import COHORTS, SIZES, SMALL, TRAINING, Loop, batches, play, samples, simulation, together
from tests.masks import kept, step_key
from tests.runs.killed import run_killed

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
HOW = replace(TRAINING, zeta=0.0, batch_size=7)  # no client has a batch of one sample


ROUNDS = COHORTS[:3]


class Net(nn.Module):
    """Two batch-norms, dropout as a module and as a function; `masks` replace what it draws."""

    def __init__(self, shape=(5,), outputs=4):
        super().__init__()
        features = int(np.prod(shape))
        self.first, self.norm, self.drop = nn.Linear(features, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.second, self.other, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Linear(5, outputs)
        self.register_buffer("constant", torch.tensor([-torch.inf, 1.0]))
        self.masks = None

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x.flatten(1))))
        x = self.drop(x) if self.masks is None else x * self.masks[0] / 0.7
        x = torch.relu(self.other(self.second(x)))
        x = F.dropout(x, 0.5, self.training) if self.masks is None else x * self.masks[1] / 0.5
        return self.head(x)


def net(*_):
    torch.manual_seed(1)
    return Net().double()


def load(model, w, buffers):
    with torch.no_grad():
        for p, part in zip(model.parameters(), w.split([p.numel() for p in model.parameters()]), strict=True):
            p.copy_(part.view_as(p))
        changing = [v for name, v in model.named_buffers() if name != "constant"]
        for v, part in zip(changing, buffers.split([v.numel() for v in changing]), strict=True):
            v.copy_(part.view_as(v))


def gradient(model, w, x, y, key):
    """∇ loss at w, with the masks of the key; the model's statistics are updated."""
    load(model, w, flatten_buffers(model))
    shapes = (len(x), 6), (len(x), 5)
    model.masks = [torch.tensor(kept(key, i + 1, shapes[i], p)) for i, p in enumerate((0.3, 0.5))]
    model.zero_grad()
    F.cross_entropy(model(torch.tensor(x)), torch.tensor(y)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def client(data, t, k, w, buffers, algorithm):
    """The model and the buffers of client k after its local steps."""
    model, theta, lr = net().train(), w, HOW.rate(t)
    for norm in (model.norm, model.other):
        norm.num_batches_tracked = norm.num_batches_tracked.double()  # their mean over clients is not whole
    load(model, w, buffers)
    for j, (x, y) in enumerate(batches(data, HOW)(t, k)):
        key = step_key(HOW.seed, t, k, j)
        g = gradient(model, w, x, y, key)
        if algorithm == "fedsam":
            twin = copy.deepcopy(model)  # whose statistics do not count
            g = gradient(twin, w + 0.2 * g / (g.norm() + 1e-16), x, y, key)
        if algorithm == "fedprox":
            g = g + 0.5 * (w - theta)
        w = w - lr * (g * min(1.0, HOW.clip / (g.norm().item() + 1e-6)) + HOW.weight_decay * w)
    return w, flatten_buffers(model)


def loop(data, algorithm, local=False):
    """θ and its buffers after all rounds, and everyone's last model with its own."""
    model = net()
    theta, buffers, entries = flatten(model), flatten_buffers(model).double(), batch_norm_entries(model)
    last = torch.cat([theta, buffers]).expand(len(SIZES), -1).clone()
    seen, n = set(), torch.tensor(SIZES, dtype=torch.float64)
    for t, cohort in enumerate(ROUNDS):
        for k in cohort:
            start = torch.cat([theta, buffers])
            if local and k in seen:
                start = last[k].where(entries, start)
            last[k] = torch.cat(client(data, t, k, *start.split([len(theta), len(buffers)]), algorithm))
        seen |= set(cohort)
        share = n[cohort] / n[cohort].sum()
        theta, buffers = (share[:, None] * last[cohort]).sum(0).split([len(theta), len(buffers)])
    return theta, buffers, last


ALGORITHMS = {"fedavg": {}, "fedsam": {"rho": 0.2}, "fedprox": {"mu": 0.5}}
EXECUTIONS = {"alone": {"chunk": 1}, "stacked": {"chunk": 100}, "padded": {"chunk": 100, "execution": OneByOne}}


def machine(algorithm="fedavg", data=None, local=False, **how):
    made = simulation(algorithm, ALGORITHMS[algorithm], training=HOW, model=net(), data=data or samples(), **how)
    return replace(made, federation=replace(made.federation, own=batch_norm_entries(net()))) if local else made


@pytest.mark.parametrize(
    ("algorithm", "execution", "local"),
    [
        *(("fedavg", execution, False) for execution in EXECUTIONS),
        *(("fedsam", "stacked", False), ("fedsam", "padded", True)),
        *(("fedavg", "alone", True), ("fedprox", "stacked", True)),
    ],
)
def test_rounds_are_those_of_a_plain_loop(algorithm, execution, local):
    played = machine(algorithm, local=local, **EXECUTIONS[execution])
    state, _ = play(played, ROUNDS)
    theta, buffers, last = loop(samples(), algorithm, local)
    torch.testing.assert_close(state.server["w"], theta, **CLOSE)
    torch.testing.assert_close(state.server[BUFFERS], buffers, **CLOSE)
    torch.testing.assert_close(state.clients.last, last, **CLOSE)
    n = torch.tensor(SIZES, dtype=torch.float64)[:, None]
    models = played.federation.models(state)
    torch.testing.assert_close(models["all"], (n * last).sum(0) / n.sum(), **CLOSE)
    torch.testing.assert_close(models["sel"], torch.cat([theta, buffers]), **CLOSE)
    assert models["cloud"] is models["sel"]  # and so evaluated once
    module = net()
    module.load_state_dict(played.backend.executor.execution.state_dict(models["cloud"]))
    wanted = F.cross_entropy(module.eval()(samples().x_test), samples().y_test).item()
    assert played.evaluate(models["cloud"])[1] == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("local", [False, True])
def test_stacked_runs_are_those_alone(local):
    """Runs with other seeds, also with cohorts of other sizes, which on a GPU are padded with dummy clients."""
    runs = [machine("fedsam", local=local, chunk=100, longest=20) for _ in range(2)]
    runs[1] = replace(runs[1], federation=replace(runs[1].federation, training=replace(HOW, seed=9)))
    states = [run.start() for run in runs]
    for cohorts in ([[0, 2, 5], [1, 2]], [[1, 2, 3, 4], [2, 5]]):
        together(runs, states, cohorts)
    alone = runs[1].start()
    for cohort in ([1, 2], [2, 5]):
        runs[1].round(alone, cohort)
    torch.testing.assert_close(states[1].server, alone.server, **CLOSE)
    torch.testing.assert_close(states[1].clients.memory, alone.clients.memory, equal_nan=True, **CLOSE)
    on_graphs = [machine("fedsam", local=local, chunk=100, longest=20, graphs=Loop()) for _ in range(2)]
    states = [run.start() for run in on_graphs]
    together(on_graphs, states, [[0, 2, 5], [1, 2]])
    again = machine("fedsam", local=local, chunk=100)
    torch.testing.assert_close(states[0].server, play(again, [[0, 2, 5]])[0].server, **CLOSE)


def test_a_diverged_client_does_not_count():
    """Neither its model nor its statistics; it keeps nothing of its own."""
    data = samples()
    data.x[data.parts[2]] = torch.inf
    state, outcomes = play(machine(data=data, local=True, chunk=1), [[0, 2, 5]])
    without, _ = play(machine(data=data, local=True, chunk=1), [[0, 5]])
    assert outcomes[0].quarantined == [2]
    torch.testing.assert_close(state.server, without.server, **CLOSE)
    assert state.clients.memory[OWN][2].isnan().all()
    assert not state.clients.memory[OWN][0].isnan().any()


@pytest.mark.parametrize("rule", [MultiKrum(assumed_attackers=0.3), NormClip(clip_multiple=0.5)])
def test_an_aggregation_rule_sees_the_changes_of_buffers(rule):
    plain = machine(chunk=1)
    state, cohort = plain.start(), [0, 1, 2, 3, 4]
    before = dict(state.server)
    plain.round(state, cohort)
    w, buffers = state.clients.last[cohort].split([len(before["w"]), len(before[BUFFERS])], 1)
    share = plain.federation.relative_size[cohort]
    wanted = rule.aggregate({"w": w, BUFFERS: buffers - before[BUFFERS]}, share, before)[BUFFERS] + before[BUFFERS]
    robust = replace(plain, federation=replace(plain.federation, aggregation=rule))
    found, _ = play(robust, [cohort])
    torch.testing.assert_close(found.server[BUFFERS], (share[:, None] * wanted).sum(0) / share.sum(), **CLOSE)
    torch.testing.assert_close(found.clients.last[cohort, len(before["w"]) :], wanted, **CLOSE)


def test_clients_are_evaluated_with_their_own_batch_norm():
    """On their own test samples, by `all` with what they keep; a client that was never asked has the average."""
    played = machine(local=True, chunk=1)
    state, _ = play(played, [[0, 2, 5]])
    parts = [[0, 1, 2], [3], [], [4, 5], [6], [7, 8]]
    evaluator = Evaluator(played.backend.executor, played.federation.samples, torch.float64, parts=parts)
    everyone = played.federation.models(state)["all"]
    rows = evaluator.personal_scores(partial(played.federation.personal_model, state, everyone)).tolist()
    for k, part in enumerate(parts):
        w = state.clients.last[k].where(batch_norm_entries(net()), everyone) if k in (0, 2, 5) else everyone
        module = net()
        module.load_state_dict(played.backend.executor.execution.state_dict(w))
        out = module.eval()(samples().x_test[part])
        losses = F.cross_entropy(out, samples().y_test[part], reduction="none").tolist()
        assert [rows[i][1] for i in part] == pytest.approx(losses, rel=1e-9)
    assert rows[9] == [0.0, 0.0, 0.0]
    assert len(evaluator.by_client(rows)) == 5


RUN = {**SMALL, "model": f"{__name__}:Net", "batch_size": 22, "algorithm": "feddyn", "zeta": 0.05}


def test_resume_gives_the_same_bits(tmp_path):
    keys = {**RUN, "batch_norm": "local", "checkpoint_seconds": 0.0, "rounds": 3}
    whole = fedman.run(**keys)

    run_killed(2, **keys, out=tmp_path)
    again = fedman.run(**keys, out=tmp_path, resume=True)
    for name, model in whole.models.items():
        assert all(torch.equal(again.models[name][key], v) for key, v in model.items())
        module = Net((1, 8, 8), 10)
        module.load_state_dict(RunFolder(tmp_path).read_models()[name])
        assert module.norm.num_batches_tracked > 0
        assert torch.equal(module.constant, Net().constant)
    assert [r["loss"] for r in again.rounds] == [r["loss"] for r in whole.rounds]
    assert whole.summary["config"]["batch_norm"] == "local"


@pytest.mark.slow
def test_flatness_of_a_finished_run(tmp_path):
    """The model as it was saved, in evaluation mode."""
    from tests.paper.flatness.flatness_calls import flatness, found

    fedman.run(**{**RUN, "rounds": 2}, out=tmp_path)
    flatness(str(tmp_path), "--top", "1", "--tol", "0.1")
    digits = on_device(fedman.data.load("digits"), "cpu", False, False)
    module = Net((1, 8, 8), 10)
    module.load_state_dict(RunFolder(tmp_path).read_models()["all"])
    wanted = F.cross_entropy(module.eval()(digits.inputs(digits.x, torch.float32)), digits.y).item()
    assert found(tmp_path)["loss"]["value"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_runs_of_a_sweep_stacked_end_as_they_do_alone():
    configs = [resolve({**RUN, "rounds": 2, "seed": seed, "batch_norm": "local"}) for seed in (0, 1)]
    quiet = [lambda record: None] * 2
    stacked = experiment.run_stacked(configs, fedman.data.load("digits"), [None] * 2, False, "cpu", quiet, print)
    for config, result in zip(configs, stacked, strict=True):
        alone = experiment.run(config, device="cpu")
        assert result.summary["stacked"] == 2
        for name, v in alone.models["all"].items():
            torch.testing.assert_close(result.models["all"][name], v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "local"), [pytest.param("fedavg", "average", marks=pytest.mark.slow), ("feddyn", "local")]
)
def test_on_flower(algorithm, local, tmp_path, monkeypatch):
    """Statistics travel both ways, or stay on the clients' disks; the models are the simulator's."""
    pytest.importorskip("flwr")
    from tests.flower.local_grid import serve_samples

    data = samples()
    data = replace(data, x=data.x.float().double())
    keys = {
        "algorithm": algorithm,
        "batch_norm": local,
        "rounds": 3,
        "lr": 0.3,
        "batch_size": 7,
        "seed": 3,
        "epochs": 2,
    }
    result = serve_samples(data, net, keys, tmp_path, monkeypatch)
    training = replace(HOW, clip=10.0, lr_decay=0.998, weight_decay=1e-3, rounds=3)
    here = simulation(algorithm, {}, training=training, model=net(), data=data, chunk=1)
    here = replace(
        here, federation=replace(here.federation, own=batch_norm_entries(net()) if local == "local" else None)
    )
    state, _ = play(here, [list(range(len(SIZES)))] * 3)
    execution = here.backend.executor.execution
    for name, w in here.federation.models(state).items():
        for key, v in execution.state_dict(w).items():
            torch.testing.assert_close(result.models[name][key], v, **CLOSE)


def test_what_is_told():
    with pytest.raises(fedman.UserError, match=r"^batch_norm: local, but MLP has no batch-norm layer; use average"):
        fedman.run(**{**SMALL, "batch_norm": "local"})
    with pytest.warns(
        UserWarning, match=r"a batch of one sample, of which the batch-norm layer norm knows no variance"
    ):
        fedman.run(**{**RUN, "rounds": 1, "batch_size": 1, "participation": 0.1, "clients": 100})


def test_a_batch_norm_that_is_called_by_name_is_told_too():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.norm(input=x))

    x, y = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32), np.arange(7) % 2
    own = replace(on_device(Dataset("mine", x, y, x, y, 2), "cpu", False, False), parts=[np.arange(7)])
    with pytest.warns(UserWarning, match=r"^client 0 has a batch of one sample, of which the batch-norm layer norm"):
        warn_of_single_samples(Named(), own, 3)
