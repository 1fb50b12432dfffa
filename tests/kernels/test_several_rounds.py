"""Several rounds on the kernels in fp32 against float64, with bounds that no near-tie can break.

Where an input of a ReLU is nearly 0, or the two largest values of a pooling window are nearly equal, fp32 and float64
can decide differently; the gradient jumps, and the two part by percents (docs/reliability.md). So float64 is given the
kernels' gradients: it must then come to the same models, whatever the algorithm does with them. And each of these
gradients is compared with float64's own at the same weights, where no decision is close.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import max_pool2d

from fedman import kernels
from fedman.execution.one_by_one import OneByOne
from fedman.execution.stacked_kernels import StackedKernels
from fedman.models.convnet import ConvNet, cifar_cnn, tiny_cnn
from fedman.training.batches import Samples
from fedman.training.settings import Training
from tests.cases import CASES
from tests.federations import Loop, simulation
from tests.kernels.kernel_checks import INTERPRETED, relative

MODELS = {
    "cifar": (cifar_cnn, (3, 32, 32), 20),
    "tiny": (tiny_cnn, (3, 64, 64), 20),
    "small": (lambda shape, classes: ConvNet(shape, classes, (16, 16), 3, 1, 4, (8,)), (3, 8, 8), 3),
}
CLOSE = 2e-6  # of a layer's root mean square: nearer decisions may differ in fp32
COHORTS, BATCH = ([[0], [0, 1]], 4) if INTERPRETED else ([[0, 1], [1, 2], [0, 2]], 2)
SMALL = [("small", "feddc", 0.3, False)]
ALL = [
    (model, case, zeta, augment)
    for model in ("cifar", "tiny")
    for case in CASES
    for zeta in (0.0, 0.15)
    for augment in (False, True)
]


class Led(OneByOne):
    """Float64 that takes the steps of given gradients, and compares each with its own where no decision is close."""

    given: list[Tensor]
    errors: list[float]
    close: int

    def copy(self) -> Led:
        return self

    def gradient(self, W, batch, zeta):
        mine, *others = super().gradient(W, batch, zeta)
        given = self.given.pop(0).double()
        for i in range(len(W)):
            used = slice(None) if batch.weight is None else batch.weight[i] > 0
            if not len(batch.y[i][used]):
                continue
            if margin(self._plain, self.parameters.unflatten(W[i]), batch.x[i][used]) > CLOSE:
                self.errors.append(relative(given[i], mine[i]))
            else:
                self.close += 1
        return given, *others


@torch.no_grad()
def margin(model: ConvNet, parameters: dict[str, Tensor], x: Tensor) -> float:
    """How close the closest decision is: of ReLUs |z|, of windows with something to take the lead of the largest of the
    four values over the second, both relative to the root mean square of the layer."""
    seen: list[Tensor] = []
    hooks = [relu.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for relu in model.relus]
    functional_call(model, parameters, (x,))
    for hook in hooks:
        hook.remove()
    found = []
    for z in seen:
        scale = z.square().mean().sqrt()
        found.append(z.abs().min() / scale)
        if z.ndim == 4:
            values = z.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).sort(-1, descending=True).values
            lead = (values[..., 0] - values[..., 1])[values[..., 0] > 0]
            found += [lead.min() / scale] if len(lead) else []
    return float(torch.stack(found).min())


def test_the_margin_by_hand() -> None:
    model = ConvNet((1, 2, 2), 2, (1,), kernel=1, hidden=())
    weight = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    weight["convs.0.weight"] += 1
    x = torch.tensor([[3.0, -1.0], [2.5, 1.0]])[None, None]
    assert margin(model, weight, x) == pytest.approx(0.5 / (17.25 / 4) ** 0.5)  # 3 leads 2.5
    assert margin(model, weight, x - 1.1) == pytest.approx(0.1 / ((1.9**2 + 2.1**2 + 1.4**2 + 0.1**2) / 4) ** 0.5)
    assert margin(model, weight, x - 4) == pytest.approx(1 / ((1 + 25 + 2.25 + 9) / 4) ** 0.5)  # nothing to take
    assert max_pool2d(x, 2).item() == 3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "case", "zeta", "augment"), SMALL if INTERPRETED else [*SMALL, *ALL])
def test_the_kernels_follow_float64_over_rounds(model, case, zeta, augment, device, monkeypatch):
    """Gradients are compared without augmentation: windows in the constant border of a shifted image are ties."""
    build, shape, classes = MODELS[model]
    name, hyper = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (11, *shape[1:], shape[0]), dtype=torch.uint8, generator=generator).to(device)
    y = torch.randint(0, classes, (11,), generator=generator).to(device)
    parts = [p.numpy() for p in torch.arange(11).split([4, 3, 4])]
    data = Samples(x, y, x, y, parts, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), augment)
    training = Training(zeta=zeta, lr=0.05, clip=0.5, epochs=1, batch_size=BATCH, seed=1)

    def made(accelerated: bool, **options):
        monkeypatch.setattr(kernels, "available", lambda device: accelerated)
        torch.manual_seed(0)
        net = build(shape, classes)
        net = net if accelerated else net.double()
        shared = {"training": training, "chunk": 3, "data": data, "device": device, "hyper": hyper, "graphs": Loop()}
        return simulation(name, model=net, precision="fp32" if accelerated else "fp64", **shared, **options)

    fast = made(True)
    execution = fast.backend.executor.execution
    assert isinstance(execution, StackedKernels)
    given: list[Tensor] = []
    real = execution.gradient

    def noted(*arguments):
        found = real(*arguments)
        given.append(found[0].detach().clone())
        return found

    monkeypatch.setattr(execution, "gradient", noted)
    led = made(False, execution=Led)
    follower = led.backend.executor.execution
    assert isinstance(follower, Led)
    follower.given, follower.errors, follower.close = given, [], 0
    states = []
    for built in (fast, led):
        monkeypatch.setattr(built.backend.executor, "map", lambda function, items: [function(item) for item in items])
        state = built.start()
        path = [state.server["w"].double()]
        for cohort in COHORTS:
            built.round(state, cohort)
            path.append(state.server["w"].double())
        states.append(path)
    assert not given
    start = states[1][0]
    # fp32 rounds a round's change to some 3e-5; one server divides by its size, the other adds up the last ones
    bound = 2e-4 if name in ("fedadam", "fedgloss") else 5e-5
    for other, end in zip(states[0][1:], states[1][1:], strict=True):
        assert relative(other - start, end - start) < bound
    assert augment or len(follower.errors) > follower.close / 10
    assert max(follower.errors, default=0.0) < 5e-5
