"""Models as people have them: a client's gradient is that of loss.backward() in a plain loop, or a line says why."""

import copy
import threading
import warnings
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fedman
from fedman.errors import UserError
from fedman.execution import branches, stackable
from fedman.execution.base import Batch
from fedman.execution.branches import Branches, Stack
from fedman.execution.choice import choose
from fedman.execution.compiled import trace
from fedman.execution.one_by_one import OneByOne
from fedman.execution.trial import Trial
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import ParameterLayout, copy_of, flatten, flatten_buffers
from fedman.penalties import MAN
from fedman.tasks import Classification

CLASSES = 3


class Layers(nn.Module):
    """Two layers of which a model of the cases below makes something."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.b(self.hidden(x))

    def hidden(self, x):
        return self.a(x).relu()


def frozen():
    model = Layers()
    model.a.requires_grad_(False)
    return model


class Indexed(Layers):
    """A parameter of whole numbers, which cannot be trained."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.arange(5, -1, -1), requires_grad=False)

    def hidden(self, x):
        return super().hidden(x[:, self.order])


class Tabled(Layers):
    """A constant that is no part of the state_dict, in a product."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mix", torch.randn(6, 6), persistent=False)

    def hidden(self, x):
        return super().hidden(x @ self.mix)


class Tied(Layers):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(6, 6)
        self.c.weight = self.a.weight

    def hidden(self, x):
        return self.c(super().hidden(x)).relu()


class Repeated(Layers):
    """A layer in several places, as in ALBERT; the last is the first's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.a] * 3)
        self.c = nn.Linear(6, 6)
        self.c.bias = self.a.bias
        self.norm = nn.BatchNorm1d(6)
        self.again = self.norm

    def hidden(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.c(self.again(x)).relu()


class Checkpointed(Layers):
    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.part = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def hidden(self, x):
        return checkpoint(self.part, super().hidden(x), use_reentrant=self.reentrant)


class CheckpointedNorm(Layers):
    """What is computed again takes the statistics of the real samples once more."""

    again = True

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(self.a, nn.BatchNorm1d(6), nn.Tanh())

    def hidden(self, x):
        return checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)


class WritesToItsInput(Layers):
    def hidden(self, x):
        x -= x.mean(1, keepdim=True)
        return super().hidden(x)


class Keeping(Layers):
    """Keeps an activation, as for a picture of it."""

    def hidden(self, x):
        self.last = super().hidden(x)
        return self.last


def called():
    model = Keeping()
    model(torch.randn(2, 6))
    return model


def pruned():
    model = Layers()
    prune.l1_unstructured(model.a, "weight", 0.5)
    return model


class Hooked(Layers):
    """The gradient of an activation is changed on its way back, which vmap does not do."""

    def hidden(self, x):
        h = super().hidden(x)
        if h.requires_grad:
            h.register_hook(lambda g: 0.1 * g)
        return h


class Folded(Layers):
    """Takes the parts of a sample for samples."""

    def hidden(self, x):
        return super().hidden(x.unflatten(1, (2, 3)).repeat(1, 1, 2).flatten(0, 1)).unflatten(0, (len(x), 2)).sum(1)


class Differentiating(Layers):
    """The gradient of an energy, computed in the forward pass."""

    def hidden(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return torch.autograd.grad(super().hidden(z).tanh().sum(), z, create_graph=True)[0]


class Words(nn.Module):
    def __init__(self, layer=nn.Embedding, **how):
        super().__init__()
        self.table, self.head = layer(5, 6, **how), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.table(x)
        return self.head((x.mean(1) if x.ndim == 3 else x).tanh())


class CheckpointedWords(Words):
    def forward(self, x):
        return self.head(checkpoint(self.table, x, use_reentrant=False).mean(1).tanh())


class InPlaceDropout(Layers):
    """As MobileNetV3 ends."""

    def hidden(self, x):
        return F.dropout(F.hardswish(self.a(x), inplace=True), 1e-300, self.training, inplace=True)


class Residual(Layers):
    """Adds to an activation in place, as EfficientNetV2 does, and changes parts of it."""

    def hidden(self, x):
        h = F.silu(self.a(x))
        h += x
        h.mul_(2)
        h[:, 0] = 1
        return h


class Overwritten(Layers):
    def hidden(self, x):
        h = F.silu(self.a(x))
        h[0] = 1
        return h


class MadeAnew(Layers):
    """A layer that is made in every call, which nobody trains anywhere."""

    def hidden(self, x):
        return nn.LayerNorm(6, dtype=x.dtype)(super().hidden(x))


class FrozenCheckpointed(Layers):
    """Reentrant checkpointing of what is not trained loses nothing."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6).requires_grad_(False)

    def hidden(self, x):
        return super().hidden(checkpoint(self.first, x, use_reentrant=True))


class Packed(Layers):
    """What autograd saves goes through functions without a name."""

    def hidden(self, x):
        kept = partial(lambda kind, v: v, "as it is")
        with torch.autograd.graph.saved_tensors_hooks(kept, kept):
            return super().hidden(F.embedding(torch.zeros(len(x), dtype=torch.int64), self.a.weight) + x)


class Forgetful(Layers):
    """Drops a mask after its first use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool), persistent=False)

    def hidden(self, x):
        if self.mask is not None and self.training:
            self.mask = None
        return super().hidden(x)


TRAINED = {
    "frozen": frozen,
    "whole numbers": Indexed,
    "constant": Tabled,
    "tied": Tied,
    "repeated": Repeated,
    "checkpointed": Checkpointed,
    "checkpointed batch-norm": CheckpointedNorm,
    "checkpointed words": lambda: CheckpointedWords(padding_idx=1),
    "writes to its input": WritesToItsInput,
    "called before": called,
    "pruned": pruned,
    "hook on an activation": Hooked,
    "folded": Folded,
    "gradient inside": Differentiating,
    "in-place dropout": InPlaceDropout,
    "in-place sum": Residual,
    "in-place part": Overwritten,
    "padding": lambda: Words(padding_idx=1),
    "padding from the end": lambda: Words(padding_idx=-2),
    "sparse": lambda: Words(sparse=True),
    "scaled": lambda: Words(scale_grad_by_freq=True, padding_idx=0),
    "sparse bag": lambda: Words(nn.EmbeddingBag, sparse=True, mode="sum"),
}
ALONE = ("checkpointed", "checkpointed batch-norm", "checkpointed words", "hook on an activation", "gradient inside")
"""What vmap cannot do."""


def batches(model):
    torch.manual_seed(1)
    x = torch.randint(0, 5, (2, 4, 6)) if isinstance(model, Words) else torch.randn(2, 4, 6).double()
    weight = torch.tensor([[0.25] * 4, [1 / 3] * 3 + [0.0]], dtype=torch.float64)
    return Batch(x, torch.randint(0, CLASSES, (2, 4)), weight), (4, 3)


def expected(model, x, y, zeta):
    """The gradient of a plain step, in float64, as a vector of what is trained."""
    model = copy_of(model).double().train()
    man = fedman.ActivationNorm(model) if zeta else lambda: 0.0
    loss = F.cross_entropy(model(x.clone()), y) + zeta * man()
    loss.backward()
    return torch.cat([p.grad.to_dense().flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("zeta", [0.0, 0.3])
@pytest.mark.parametrize("kind", TRAINED)
def test_gradients_are_those_of_pytorch(kind, zeta):
    """The gradient at the second of two points: nothing is left over from the first. Stacked and padded, or alone."""
    torch.manual_seed(0)
    model = TRAINED[kind]()
    batch, sizes = batches(model)
    moved, layout = copy_of(model).double(), ParameterLayout.of(model)
    W = flatten(model).double() + torch.tensor([[0.5], [-0.5]]) * torch.arange(layout.size).cos()
    buffers = flatten_buffers(model).double().expand(2, -1)
    before = batch.x.clone()
    for execution in [OneByOne] if kind in ALONE else [OneByOne, Vmapped]:
        made = execution(model, Classification(), MAN(), "fp64")
        for weights in (W + 1, W):
            found, _, _ = made.gradient(weights, batch._replace(buffers=buffers), zeta)
        assert torch.equal(batch.x, before)
        for i, n in enumerate(sizes):
            for name, v in layout.unflatten(W[i]).items():
                moved.get_parameter(name).data.copy_(v)
            wanted = expected(moved, batch.x[i, :n], batch.y[i, :n], zeta)
            torch.testing.assert_close(found[i], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("zeta", [0.0, 0.3])
def test_checkpointing_changes_no_bit_of_a_batch_of_one_sample(zeta):
    torch.manual_seed(0)
    execution, (batch, _) = OneByOne(CheckpointedNorm(), Classification(), MAN(), "fp64"), batches(None)
    W, single = flatten(execution.model).double().expand(2, -1), Batch(batch.x[:, :1], batch.y[:, :1])
    found = execution.gradient(W, single, zeta)
    CheckpointedNorm.again = False
    try:
        expected = execution.gradient(W, single, zeta)
    finally:
        CheckpointedNorm.again = True
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


class InPlace(Layers):
    """Draws in place on an activation, and ends in it."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        h = F.gelu(super().forward(x))
        self.draw(h)
        return h


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: F.dropout(h, 0.5, True, True),
        lambda h: F.alpha_dropout(h, training=True, inplace=True),
        lambda h: F.rrelu(h, training=True, inplace=True),
        lambda h: h.uniform_(),
    ],
)
@pytest.mark.parametrize("kind", [OneByOne, Vmapped])
def test_random_numbers_on_a_measured_activation_are_those_on_any(kind, draw):
    """And the terms are the same in training, in the records and in a traced step."""
    torch.manual_seed(0)
    execution, (batch, _) = kind(InPlace(draw), Classification(), MAN(), "fp64"), batches(None)
    W = flatten(execution.model).double().expand(2, -1).requires_grad_()
    plain, _, _ = execution.losses(W, batch, penalised=False)
    measured, terms, _ = execution.losses(W, batch, penalised=True)
    assert torch.equal(plain, measured)
    torch.testing.assert_close(execution.penalty_terms(W, batch), dict(zip(execution.terms, terms.mT, strict=True)))
    (traced,) = trace(lambda w: execution.losses(w, batch, penalised=True)[1:2], [W])(W)
    torch.testing.assert_close(traced, terms)


@pytest.mark.parametrize("kind", [OneByOne, Vmapped])
def test_a_flattened_activation_drops_in_place(kind):
    torch.manual_seed(0)
    parts = nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.SiLU(), nn.Flatten(), nn.Dropout(0.5, inplace=True)
    execution, (batch, _) = (
        kind(nn.Sequential(*parts, nn.Linear(6, CLASSES)), Classification(), MAN(), "fp64"),
        batches(None),
    )
    W = flatten(execution.model).double().expand(2, -1)
    assert torch.equal(execution.losses(W, batch, False)[0], execution.losses(W.requires_grad_(), batch, True)[0])


def _drop(h):
    return F.dropout(h, 0.5, True, True)


CHANGED = {
    "all of it": lambda h: (_drop(h), h)[1],
    "while a view is in use": lambda h: (v := h.view(-1, 2, 3), _drop(h), v.flatten(1))[2],
    "through a view": lambda h: (_drop(h.view(-1, 2, 3)), h)[1],
    "through one of two": lambda h: (v := h.view(-1, 2, 3), _drop(h.view(-1, 3, 2)), v.flatten(1) + h)[2],
    "a sum through a view": lambda h: (h.view(-1, 2, 3).add_(1), h)[1],
    "random numbers": lambda h: h.uniform_(),
}
PARTS = {
    "numbers": lambda h: (h[:, :3].normal_(), h)[1],
    "dropout": lambda h: (_drop(h[:, :3]), h)[1],
}


class Changing(Layers):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def hidden(self, x):
        return self.change(F.gelu(self.a(x)))


@pytest.mark.filterwarnings("ignore:execution", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", [MadeAnew, FrozenCheckpointed, Packed, Forgetful])
def test_what_only_looks_as_if_it_could_not_be_trained(kind):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)).astype(np.float32), np.arange(8) % CLASSES
    model = kind()
    keys = {
        "partition": "iid",
        "clients": 1,
        "participation": 1.0,
        "rounds": 1,
        "epochs": 1,
        "batch_size": 8,
        "clip": 1e9,
    }
    result = fedman.run(dataset=(x, y, x, y), model=model, lr=0.1, weight_decay=0.0, precision="fp64", **keys)
    gradient = expected(model, torch.tensor(x).double(), torch.tensor(y), 0.0)
    stepped = {n: result.models["cloud"][n] for n, p in model.named_parameters() if p.requires_grad}
    moved = torch.cat([(stepped[n] - p.double()).flatten() for n, p in model.named_parameters() if p.requires_grad])
    torch.testing.assert_close(moved, -0.1 * gradient)


@pytest.mark.parametrize("kind", [OneByOne, Vmapped])
@pytest.mark.parametrize("change", CHANGED)
def test_an_activation_that_is_changed_in_place_is_that_without_a_penalty(kind, change):
    torch.manual_seed(0)
    execution, (batch, _) = kind(Changing(CHANGED[change]), Classification(), MAN(), "fp64"), batches(None)
    W = flatten(execution.model).double().expand(2, -1).clone().requires_grad_()
    plain, penalised = (execution.losses(W, batch, with_penalty)[0] for with_penalty in (False, True))
    assert torch.equal(plain, penalised)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), W)[0] for each in (plain, penalised)))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_an_activation_is_not_changed_in_place(part):
    execution, (batch, _) = OneByOne(Changing(PARTS[part]), Classification(), MAN(), "fp64"), batches(None)
    W = flatten(execution.model).double().expand(2, -1).clone().requires_grad_()
    with pytest.raises(UserError, match=r"^ActivationNorm: an activation is changed in place through a view"):
        execution.losses(W, batch, True)


class Scaled(nn.Parameter):
    """Whole numbers and a scale, as quantised weights have."""

    def __new__(cls, data, scale):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = scale
        return made

    def __deepcopy__(self, memo):
        return Scaled(self.data.clone(), self.scale)


class Quantised(Layers):
    def __init__(self):
        super().__init__()
        self.w = Scaled(torch.arange(36, dtype=torch.int8).view(6, 6), 0.1)

    def hidden(self, x):
        return super().hidden(x @ (self.w.data.to(x.dtype) * self.w.scale))


def test_frozen_parameters_of_a_kind_of_their_own_stay_what_they_are():
    model = Quantised()
    batch, _ = batches(None)
    W = flatten(model).double().expand(2, -1)
    gradient = OneByOne(model, Classification(), MAN(), "fp64").gradient(W, batch._replace(weight=None), 0.3)[0]
    torch.testing.assert_close(gradient[0], expected(model, batch.x[0], batch.y[0], 0.3))


@pytest.mark.parametrize("training", [True, False])
def test_inputs_stay_where_a_model_writes_in_one_mode_alone(training):
    class Noisy(Layers):
        def hidden(self, x):
            if self.training == training:
                x += 1
            return super().hidden(x)

    model = Noisy()
    execution, batch = OneByOne(model, Classification(), MAN()), batches(model)[0]
    batch = Batch(batch.x.float(), batch.y)
    before = batch.x.clone()
    for _ in range(2):
        execution.scores(flatten(model), batch.x[0], batch.y[0])
        execution.gradient(flatten(model).expand(2, -1), batch, 0.0)
    assert torch.equal(batch.x, before)


@pytest.mark.parametrize("execution", [Branches, Stack])
@pytest.mark.parametrize("kind", TRAINED)
def test_what_is_compiled_computes_the_same(kind, execution, monkeypatch):
    """The graph as it was traced: a C++ compiler would take minutes."""
    if kind in ALONE and execution is Stack:
        pytest.skip("is refused, see below")
    monkeypatch.setattr(branches, "compile_graph", trace)
    monkeypatch.setattr(stackable, "applies", lambda W: True)
    monkeypatch.setattr(Stack, "sizes", (2, 1))
    torch.manual_seed(0)
    model = TRAINED[kind]()
    W = flatten(model).double() + torch.tensor([[0.5], [-0.5]]) * torch.arange(len(flatten(model))).cos()
    batch = batches(model)[0]._replace(buffers=flatten_buffers(model).double().expand(2, -1), key=torch.arange(2))
    parts = model, Classification(), MAN(), "fp64"
    plain, compiled = OneByOne(*parts), execution(*parts, compiled=True)
    for weights in (W + 1, W):
        found, expected = (made.gradient(weights, batch, 0.3) for made in (compiled, plain))
    assert compiled.compiled
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", TRAINED)
def test_what_a_model_is_stored_as_can_be_loaded(kind):
    torch.manual_seed(0)
    model = TRAINED[kind]()
    w = torch.cat([flatten(model) + 1, flatten_buffers(model)])
    other = copy_of(model)
    other.load_state_dict(OneByOne(model, Classification(), MAN()).state_dict(w))
    torch.testing.assert_close(flatten(other), flatten(model) + 1)
    for (name, p), before in zip(other.named_parameters(), model.parameters(), strict=True):
        assert p.requires_grad or torch.equal(p, before), name


@pytest.mark.parametrize("execution", [OneByOne, Vmapped])
def test_a_module_in_several_places_is_left_as_it_was(execution):
    made = execution(Repeated(), Classification(), MAN())
    names = dict(made._plain.named_parameters(remove_duplicate=False))
    W, batch = flatten(made.model).expand(2, -1), batches(None)[0]
    made.gradient(W, batch._replace(x=batch.x.float()), 0.0)
    for name, p in made._plain.named_parameters(remove_duplicate=False):
        assert p is names[name]


def test_a_stored_model_is_contiguous_and_its_counters_are_whole():
    """Frozen, of several names, in whatever order in memory."""
    model = Repeated()
    model.frozen = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last).requires_grad_(False)
    model.register_buffer("table", torch.ones(2, 3, dtype=torch.int64).t())
    found = OneByOne(model, Classification(), MAN()).state_dict(
        torch.cat([flatten(model), flatten_buffers(model) + 0.6])
    )
    assert all(v.is_contiguous() for v in found.values())
    assert [found[f"{name}.num_batches_tracked"].item() for name in ("norm", "again")] == [1, 1]
    assert found["norm.num_batches_tracked"].dtype == found["again.num_batches_tracked"].dtype == torch.int64


class Graph(Layers):
    """A sparse constant."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("edges", torch.eye(6).to_sparse(), persistent=persistent)

    def hidden(self, x):
        return super().hidden((self.edges @ x.T).T)


class Clamped(Layers):
    def hidden(self, x):
        self.a.weight.data.clamp_(-0.1, 0.1)
        return super().hidden(x)


class Listed(Layers):
    def __init__(self):
        super().__init__()
        self.kept = [self.a.weight]

    def hidden(self, x):
        return F.linear(x, self.kept[0]).relu()


class Enclosed(Layers):
    def __init__(self):
        super().__init__()
        self.layer = lambda x: self.a(x).relu()

    def hidden(self, x):
        return self.layer(x)


class Loose(Layers):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(6, requires_grad=True)

    def hidden(self, x):
        return super().hidden(x) * self.scale


class Complex(Layers):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def hidden(self, x):
        return torch.fft.irfft(torch.fft.rfft(super().hidden(x)) * self.filter, n=6)


class Locked(Layers):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Unregistered(Layers):
    """A layer that the module does not know of."""

    def __init__(self):
        super().__init__()
        self.more = [nn.Linear(6, 6)]

    def hidden(self, x):
        return self.more[0](super().hidden(x))


class CheckpointedFirst(Layers):
    """Its inputs require no gradient, so that nothing in it gets one."""

    def hidden(self, x):
        return checkpoint(self.a, x, use_reentrant=True).relu()


class Counting(Layers):
    """A buffer of whole numbers that grows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def hidden(self, x):
        self.steps += 1
        return super().hidden(x)


class Auxiliary(Layers):
    """Has a second output in training, as GoogLeNet."""

    def forward(self, x):
        h = self.hidden(x)
        return (self.b(h), h) if self.training else self.b(h)


class OnlyFloat(Layers):
    def hidden(self, x):
        return super().hidden(x.float())


def hooked():
    model = Layers()
    model.a.weight.register_hook(lambda g: g * 0)
    return model


def all_frozen():
    return Layers().requires_grad_(False)


REFUSED = {
    "clamped": (Clamped, "Clamped's forward pass changes its parameter a.weight; let it compute with a copy"),
    "in a list": (Listed, "Listed reaches its parameter a.weight through a list"),
    "a layer in a list": (
        Unregistered,
        r"Unregistered uses a parameter of shape \((6, 6|6,)\) that is none of its own",
    ),
    "reentrant at first": (CheckpointedFirst, "CheckpointedFirst checkpoints a part with use_reentrant=True, which is"),
    "in a function": (Enclosed, r"Enclosed reaches its parameter a\.(weight|bias) through a list, a function"),
    "no parameter": (Loose, "Loose's scale requires a gradient; make it an nn.Parameter to train it"),
    "complex": (Complex, "filter is complex; keep its two parts"),
    "a lock": (Locked, r"Locked cannot be copied \(TypeError: cannot pickle '_thread.lock'"),
    "sparse": (Graph, "edges is sparse, which model.safetensors cannot hold; register it with persistent=False"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet; call Sequential on a batch first"),
    "hook on a parameter": (hooked, "a.weight has a hook on its gradient, which no client would call"),
    "TorchScript": (lambda: torch.jit.script(nn.Linear(6, 3)), "is or has a TorchScript module"),
    "DataParallel": (
        lambda: nn.DataParallel(Layers()),
        "DataParallel spreads batches over GPUs; give the module in it",
    ),
    "tuple in training": (Auxiliary, "Auxiliary returns tuple in training mode; a tensor is wanted"),
    "not in fp64": (OnlyFloat, r"a step of OnlyFloat fails \(RuntimeError: mat1 and mat2 must have the same dtype"),
    "reentrant": (lambda: Checkpointed(True), "a step of Checkpointed fails .*When use_reentrant=True"),
    "all frozen": (all_frozen, "Layers has no parameters to train"),
    "max_norm": (lambda: Words(max_norm=1.0), "an embedding with max_norm changes its weights in the forward pass"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_one_line(kind):
    make, message = REFUSED[kind]
    rng, words = np.random.default_rng(0), kind == "max_norm"
    x = rng.integers(0, 5, (8, 6)) if words else rng.normal(size=(8, 6)).astype(np.float32)
    y = np.arange(8) % CLASSES
    keys = {"partition": "iid", "clients": 2, "rounds": 1, "precision": "fp64", "device": "cpu"}
    with pytest.raises(UserError, match=rf"^model: .*{message}") as told:
        fedman.run(dataset=(x, y, x, y), model=make(), **keys)
    assert "\n" not in str(told.value)


def test_a_counter_that_stays_is_named():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)).astype(np.float32), np.arange(8) % CLASSES
    with pytest.warns(UserWarning, match="Counting changes its buffer steps, which is of whole numbers and stays"):
        fedman.run(dataset=(x, y, x, y), model=Counting(), partition="iid", clients=2, rounds=1, device="cpu")


class Averaging(Layers):
    """A buffer follows the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def hidden(self, x):
        h = super().hidden(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class OnlyFloatHooked(OnlyFloat, Hooked):
    pass


class OnlyFloatAveraging(OnlyFloat, Averaging):
    pass


class Stateful(Layers):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def hidden(self, x):
        self.calls += 1
        return super().hidden(x) * self.calls


class Deep(Layers):
    """Drops a layer or not, by a random number that is asked for."""

    def hidden(self, x):
        h = super().hidden(x)
        return h if not self.training or torch.rand(()).item() < 0.5 else h + self.a(h)


ODD = {
    "averaging, padded": (Averaging, True, "plain", "execution: plain, since vmap pads clients of unequal sizes"),
    "averaging, full": (Averaging, False, "vmap", None),
    "hook": (Hooked, True, "plain", "execution: plain, since vmap gives other gradients of this model than PyTorch"),
    "hook, in float32": (OnlyFloatHooked, True, "plain", "execution: plain, since vmap gives other gradients"),
    "averaging, in float32": (OnlyFloatAveraging, True, "plain", "execution: plain, since vmap pads clients"),
    "stateful": (Stateful, True, "vmap", "the model keeps something from one call to the next, or draws random"),
    "random depth": (Deep, True, "plain", r"execution: plain, since vmap cannot stack this model: .*item\(\)"),
    "simple": (Layers, True, "vmap", None),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_vmap_would_compute_otherwise_is_passed_on(kind):
    make, padded, title, message = ODD[kind]
    torch.manual_seed(0)
    parts = make(), Classification(), MAN(), "fp32", torch.device("cpu")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = choose(*parts, 8, (torch.randn(2, 6), torch.tensor([0, 2])), (), padded=padded)
    assert made.title == title
    assert len(told) == (message is not None)
    if message:
        with pytest.warns(UserWarning, match=message):
            warnings.warn(told[0].message, stacklevel=1)


def test_a_model_that_does_not_take_float64_is_compared_in_float32():
    torch.manual_seed(0)
    trial = Trial(OnlyFloat(), Classification(), MAN(), (torch.randn(2, 6), torch.tensor([0, 2])), 1.0, True)
    assert trial.expected is not None
    assert trial.expected.dtype == torch.float32
    assert trial.repeats
    assert trial.agrees(Vmapped)
    assert trial.ignores_padding()


class Large(Layers):
    """Has not the memory for steps in some precisions."""

    lacking: ClassVar = {torch.float64}

    def hidden(self, x):
        if x.dtype in self.lacking:
            raise torch.OutOfMemoryError
        return super().hidden(x)


@pytest.mark.parametrize("lacking", [{torch.float64}, {torch.float64, torch.float32}])
def test_steps_for_which_memory_does_not_suffice_are_not_compared(lacking, monkeypatch):
    monkeypatch.setattr(Large, "lacking", lacking)
    trial = Trial(Large(), Classification(), MAN(), (torch.randn(2, 6), torch.tensor([0, 2])), 1.0, True)
    assert trial.expected is None or trial.expected.dtype == torch.float32
    assert (trial.expected is None) == (torch.float32 in lacking)
    monkeypatch.setattr(Large, "lacking", {torch.float32})
    assert trial.repeats
    assert trial.agrees(Vmapped)
    assert trial.ignores_padding()


def test_stacked_attention_changes_no_setting_of_other_threads():
    class Attentive(Layers):
        def hidden(self, x):
            set_now.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
            x = super().hidden(x)[:, :, None]
            mask = torch.ones(6, 6, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(x, x, x, mask)[..., 0]

    torch.manual_seed(0)
    set_now, model = [], Attentive()
    W, batch = flatten(model).double().expand(2, -1), batches(None)[0]
    found, expected = (
        made(model, Classification(), MAN(), "fp64").gradient(W, batch, 0.3) for made in (Vmapped, OneByOne)
    )
    assert set(set_now) == {(True, True)}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_rounding_that_a_model_enlarges_is_no_other_computation():
    torch.manual_seed(0)
    trial = Trial(Layers(), Classification(), MAN(), (torch.randn(2, 6), torch.tensor([0, 2])), 1.0, True)
    exact = trial.expected
    for off, agrees in ((5e-5, True), (5e-4, False)):
        trial.expected = exact * (1 + off)
        assert trial.agrees(Vmapped) is agrees


@pytest.mark.filterwarnings("error")
def test_what_vmap_takes_row_by_row_is_no_news():
    model = Words(nn.EmbeddingBag, mode="sum")
    W = flatten(model).double().expand(2, -1)
    Vmapped(model, Classification(), MAN(), "fp64").gradient(W, batches(model)[0], 0.0)


def test_a_dropout_that_begins_later_is_the_runs_own():
    """A rate of zero in the first step does not mean that there are no masks to come."""

    class Growing(Layers):
        rate = 0.0

        def hidden(self, x):
            return F.dropout(super().hidden(x), type(self).rate, self.training)

    torch.manual_seed(0)
    execution, (batch, _) = OneByOne(Growing(), Classification(), MAN(), "fp64"), batches(None)
    W = flatten(execution.model).double().expand(2, -1)
    execution.gradient(W, batch, 0.0)
    Growing.rate = 0.5
    first, second = (execution.gradient(W, batch, 0.0)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_constants_alone_are_brought_where_models_are_evaluated():
    execution = OneByOne(frozen(), Classification(), MAN(), "fp64")
    W, batch = flatten(execution.model).double().expand(2, -1), batches(None)[0]
    execution.gradient(W, batch, 0.0)
    assert {name: p.dtype for name, p in execution._plain.named_parameters()} == {
        **dict.fromkeys(("a.weight", "a.bias"), torch.float64),
        **dict.fromkeys(("b.weight", "b.bias"), torch.float32),
    }


def test_the_copies_of_a_model_take_the_memory_of_its_frozen_parameters_once():
    model = frozen()
    execution = OneByOne(model, Classification(), MAN())
    copies = execution._plain, execution._tapped, execution._evaluated
    for name, p in model.named_parameters():
        (where,) = {each.get_parameter(name).data_ptr() for each in copies}
        assert (where == p.data_ptr()) == p.requires_grad
        assert not any(each.get_parameter(name).requires_grad for each in copies)


def test_a_copy_shares_nothing():
    model = called()
    other = copy_of(model)
    assert torch.equal(other.last, model.last)
    assert other.last.grad_fn is None
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)


@pytest.mark.parametrize("make", [Repeated, lambda: Graph(persistent=False)])
def test_runs_of_models_that_could_not_be_trained(make, tmp_path):
    x, y = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32), np.arange(9) % CLASSES
    keys = {"partition": "iid", "clients": 2, "rounds": 1, "device": "cpu", "batch_size": 3}
    result = fedman.run(dataset=(x, y, x, y), model=make(), out=tmp_path / "out", **keys)
    make().load_state_dict(result.models["cloud"])


def test_a_gradient_inside_a_model_is_no_tensor_to_train():
    x, y = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), np.arange(8) % CLASSES
    keys = {"partition": "iid", "clients": 2, "rounds": 1, "device": "cpu", "execution": "plain"}
    assert fedman.run(dataset=(x, y, x, y), model=Differentiating(), **keys).summary["execution"] == "plain"
