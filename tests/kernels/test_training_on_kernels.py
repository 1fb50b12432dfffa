"""A federation on the kernels follows the one on the plain module: batches, gradients, updates, evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedman import kernels
from fedman.execution.choice import choose
from fedman.execution.stacked_kernels import StackedKernels
from fedman.execution.vmapped import Vmapped
from fedman.models.convnet import ConvNet
from fedman.models.mlp import MLP
from fedman.penalties import MAN, ActivationL1, HiddenMAN, LogitsMAN
from fedman.penalties.activation_norms import MeanSquares
from fedman.penalties.measures import mean_square, mean_square_and_variance
from fedman.tasks import Classification, MultiLabel
from fedman.training.batches import Samples
from fedman.training.settings import Training
from tests.cases import CASES
from tests.federations import PENALTY, TASK, Simulation, simulation
from tests.kernels.kernel_checks import INTERPRETED, LATER


def machine(
    device: torch.device,
    accelerated: bool,
    monkeypatch: pytest.MonkeyPatch,
    name="fedavg",
    zeta=0.3,
    channels=(16,),
    groups=0,
    precision="fp32",
    batch_size=3,
    **options,
) -> Simulation:
    generator = torch.Generator().manual_seed(0)
    n, size = 11, 4 * len(channels)
    x = torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=generator).to(device)
    y = torch.randint(0, 3, (n,), generator=generator).to(device)
    parts = [part.numpy() for part in torch.arange(n).split([4, 3, 4])]
    samples = Samples(x, y, x, y, parts, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), True)
    monkeypatch.setattr(kernels, "available", lambda device: accelerated)
    torch.manual_seed(0)
    hidden = (8,) * (3 - len(channels))
    model = ConvNet((3, size, size), 3, channels, kernel=3, padding=1, hidden=hidden, groups=groups)
    model = model.double() if precision == "fp64" else model
    training = Training(zeta=zeta, lr=0.05, clip=0.5, epochs=1, batch_size=batch_size, seed=1)
    built = simulation(
        name, training=training, chunk=3, model=model, data=samples, precision=precision, device=device, **options
    )
    assert isinstance(built.backend.executor.execution, StackedKernels) == accelerated
    if device.type == "cpu":  # the interpreter wants one thread, as a GPU has
        monkeypatch.setattr(built.backend.executor, "map", lambda function, items: [function(item) for item in items])
    return built


@pytest.mark.parametrize(
    ("name", "groups", "channels", "cohorts"),
    [
        ("fedavg", 4, (16,), [[1]]),
        pytest.param("fedavg", 4, (16, 16), [[0, 1], [1]], marks=LATER),
        pytest.param("feddc", 0, (16, 16), [[0, 1], [1]], marks=LATER),
    ],
)
def test_follows_the_plain_module(name, groups, channels, cohorts, device, monkeypatch):
    results = []
    for accelerated in (False, True):
        built = machine(device, accelerated, monkeypatch, name, groups=groups, channels=channels)
        state = built.start()
        outcomes = [built.round(state, cohort) for cohort in cohorts]
        moved = state.server["w"] - built.start().server["w"]
        results.append((moved, outcomes[-1], built.evaluate(state.sel["w"])))
    plain, fast = results
    assert (plain[0] - fast[0]).norm() / plain[0].norm() < 1e-3
    assert fast[1].loss == pytest.approx(plain[1].loss, rel=1e-4)
    assert fast[1].penalty == pytest.approx(plain[1].penalty, rel=1e-3)
    assert list(fast[1].penalty) == list(plain[1].penalty) == ["relus.0", "relus.1", "relus.2", "output"]
    assert fast[2][1] == pytest.approx(plain[2][1], rel=1e-4)


EVERY_WAY = ("fedavg", "fedasam", "feddc", "fedspeed", "fedsmoo")
"""Cases that call the kernels in every way there is: with and without ascent, its scale, extra decay, carried vectors.
Triton's interpreter takes seconds for each; a GPU has all."""

FEW_PASSES = ("fedavg", "feddc")
"""Those of them with one gradient a step."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in FEW_PASSES else LATER) for case in (EVERY_WAY if INTERPRETED else CASES)],
)
def test_every_algorithm_follows_float64(case, device, monkeypatch):
    """The kernels beside the other executions: a step of ragged clients, against one by one in float64."""
    name, hyper = CASES[case]
    moved = []
    for accelerated, precision in ((False, "fp64"), (True, "fp32")):
        built = machine(device, accelerated, monkeypatch, name, precision=precision, hyper=hyper, batch_size=4)
        state = built.start()
        built.round(state, [1, 2])
        moved.append((state.server["w"] - built.federation.initial).double())
    assert (moved[0] - moved[1]).norm() / moved[0].norm() < 1e-4


def test_without_logits_and_without_man(device, monkeypatch):
    """ζ = 0 and man_logits = false reach the kernels."""
    moves = []
    for accelerated in (False, True):
        for zeta, penalty in ((0.0, MAN()), (0.3, MAN(man_logits=False))):
            built = machine(device, accelerated, monkeypatch, zeta=zeta, penalty=penalty)
            state = built.start()
            built.round(state, [1])
            moves.append(state.server["w"] - built.start().server["w"])
    for plain, fast in zip(moves[:2], moves[2:], strict=True):
        assert (plain - fast).norm() / plain.norm() < 1e-3
    assert (moves[0] - moves[1]).norm() / moves[0].norm() > 1e-2


@dataclass(frozen=True)
class Chosen(MeanSquares):
    """The authors' Tiny-ImageNet term in small: a layer left out, the variance of another added, no logits."""

    title = "chosen"

    def measured(self):
        return {"relus.0": mean_square, "relus.2": mean_square_and_variance}, False


@dataclass(frozen=True)
class Absolute(MeanSquares):
    """A measure that the kernels do not know."""

    title = "absolute"

    def measured(self):
        return {"relus.0": lambda a: a.flatten(1).abs().mean(1)}, True


@dataclass(frozen=True)
class Own(Classification):
    """A task of a user, which may do anything."""


def test_measures_of_chosen_layers(device, monkeypatch):
    results = []
    for accelerated in (False, True):
        built = machine(device, accelerated, monkeypatch, penalty=Chosen())
        state = built.start()
        outcome = built.round(state, [1])
        results.append((state.server["w"] - built.start().server["w"], outcome.penalty))
    (plain, terms), (fast, fast_terms) = results
    assert (plain - fast).norm() / plain.norm() < 1e-3
    assert list(fast_terms) == list(terms) == ["relus.0", "relus.2"]
    assert fast_terms == pytest.approx(terms, rel=1e-3)


def test_what_else_is_left_to_the_plain_module(device, monkeypatch):
    """Models, tasks, penalties and precisions that the kernels do not serve."""
    monkeypatch.setattr(kernels, "available", lambda device: True)
    model = ConvNet((3, 8, 8), 3, (16, 16), kernel=3, padding=1, hidden=(8,)).to(device)
    example = torch.rand(2, 3, 8, 8, device=device), torch.tensor([0, 2], device=device)

    def chosen(model=model, task=TASK, penalty=PENALTY, precision="fp32", example=example):
        return type(choose(model, task, penalty, precision, device, 3, example, (3, 8, 8)))

    for penalty in (MAN(), MAN(man_logits=False), HiddenMAN(), LogitsMAN(), Chosen()):
        assert chosen(penalty=penalty) is StackedKernels
    assert chosen(penalty=Absolute()) is Vmapped
    assert chosen(penalty=ActivationL1()) is Vmapped
    assert chosen(task=Own()) is Vmapped
    assert chosen(task=MultiLabel(), example=(example[0], torch.ones(2, 3, device=device))) is Vmapped
    assert chosen(model=MLP((3, 8, 8), 3).to(device)) is Vmapped
    assert chosen(model=model.double(), precision="fp64", example=(example[0].double(), example[1])) is Vmapped
