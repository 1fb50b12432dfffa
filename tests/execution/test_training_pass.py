"""Forward passes in training: random numbers from a key, batch statistics of the real samples."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedman.errors import UserError
from fedman.execution.base import Batch, check_model
from fedman.execution.hashing import positions
from fedman.execution.one_by_one import OneByOne
from fedman.execution.training_pass import TrainingPass
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten, flatten_buffers
from fedman.penalties import MAN
from fedman.tasks import Classification
from tests.masks import kept, mixed

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
REAL = [6, 4, 2]  # samples of each model's batch


class Recurrent(nn.Module):
    """Layers of an LSTM and a GRU with dropout between them, whose samples are the first and the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, 2, dropout=0.4, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(6, 4, 3, dropout=0.3)
        self.drop = nn.Dropout1d(0.2)

    def forward(self, x):
        out, (h, c) = self.lstm(x)
        out, _ = self.gru(out.transpose(0, 1))
        return self.drop(out.transpose(0, 1)).mean(1) + (h + c).sum(0)[:, :1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.cross = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.p = 0.4

    def forward(self, x):
        x = self.layer(x)
        x = x + self.cross(x, x, x)[0] + self.cross(x, x, x, need_weights=False)[0]
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, mask, dropout_p=self.p if self.training else 0.0).mean(1)


class Convolutional(nn.Module):
    """Batch-norm before and after pooling, dropout of channels and of entries, other random numbers, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.3)
        self.last, self.alpha = nn.BatchNorm1d(4, affine=False), nn.AlphaDropout(0.2)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("barred", torch.tensor([-torch.inf, 0.0]))

    def forward(self, x):
        x = F.rrelu(self.drop(self.norm(self.conv(x[:, None]))), training=self.training, inplace=True)
        x = self.instance(x.flatten(2)).mean(2) + x.mean((2, 3))
        x = F.dropout(self.last(self.alpha(x)), 0.5, self.training, inplace=True)
        if self.training:
            x = x * (1 + 0.1 * torch.randn_like(x)) * x.new_empty(4).bernoulli_(0.8) + torch.rand(1, 4, dtype=x.dtype)
        return x


MODELS = {"recurrent": Recurrent, "attention": Attention, "convolutional": Convolutional}


@pytest.mark.parametrize("zeta", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_alone_stacked_and_padded(name, zeta):
    """The same masks and statistics: one by one, by vmap, and alone without the samples of padding."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    W = flatten(model) + 0.1 * torch.randn(3, len(flatten(model))).double()
    Q = flatten_buffers(model) + torch.rand(3, len(flatten_buffers(model))).double()
    x, y = torch.randn(3, 6, 5, 4).double(), torch.randint(0, 4, (3, 6))
    weight = torch.tensor([[1 / n] * n + [0.0] * (6 - n) for n in REAL], dtype=torch.float64)
    batch = Batch(x, y, weight, torch.tensor([5, -77, 1 << 60]), Q)
    one, stacked = (kind(model, Classification(), MAN(), "fp64") for kind in (OneByOne, Vmapped))
    found = one.gradient(W, batch, zeta)
    for a, b in zip(stacked.gradient(W, batch, zeta), found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    for i, n in enumerate(REAL):
        alone = Batch(x[i : i + 1, :n], y[i : i + 1, :n], None, batch.key[i : i + 1], Q[i : i + 1])
        for a, b in zip(one.gradient(W[i : i + 1], alone, zeta), found, strict=True):
            torch.testing.assert_close(a[0], b[i], **CLOSE)
    other = one.gradient(W, batch._replace(key=batch.key + 1), zeta)
    assert ((other[1] - found[1]).abs() > 1e-6).all()


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_is_the_module_in_evaluation_mode(name):
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), torch.randn(6, 5, 4).double()
    w = torch.cat([flatten(model) + 0.1, flatten_buffers(model) + 0.5])
    for kind in (OneByOne, Vmapped):
        execution = kind(model, Classification(), MAN(), "fp64")
        module = MODELS[name]().double()
        module.load_state_dict(execution.state_dict(w))
        with torch.no_grad():
            torch.testing.assert_close(execution.outputs(w, x), module.eval()(x), **CLOSE)


def shrunk(module: nn.Module) -> nn.Module:
    """The module with a dropout that drops nothing, but is not zero."""
    for each in module.modules():
        for field in ("p", "dropout"):
            if isinstance(getattr(each, field, None), float):
                setattr(each, field, 1e-300)
    return module


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_what_is_replaced_computes_the_same(name):
    """With a dropout that drops nothing: PyTorch's own functions in evaluation mode."""
    torch.manual_seed(0)
    model, x = shrunk(MODELS[name]().double()), torch.randn(6, 5, 4).double()
    with TrainingPass(None, None) as forward:
        found = model(x)
    assert forward.needed
    torch.testing.assert_close(found, model.eval()(x), **CLOSE)


def test_masks_are_the_hash_of_key_call_and_coordinates():
    """Against 64-bit integers in numpy."""
    x, key = torch.ones(3, 4, 5, dtype=torch.float64), -123456789
    with TrainingPass(torch.tensor(key), None):
        first, channels = F.dropout(x, 0.25), F.dropout2d(x, 0.4)
    np.testing.assert_allclose(first.numpy(), kept(key, 1, (3, 4, 5), 0.25) / 0.75)
    np.testing.assert_allclose(channels.numpy(), np.broadcast_to(kept(key, 2, (3, 4, 1), 0.4) / 0.6, (3, 4, 5)))
    larger = positions((7, 6, 5), torch.device("cpu"))
    assert torch.equal(larger[:3, :4], positions((3, 4, 5), torch.device("cpu")))
    assert len(larger.unique()) == larger.numel()
    assert int(mixed(0, 7)) >= 0


def test_numbers_have_their_distributions():
    with TrainingPass(torch.tensor(3), None):
        kept, again = (F.dropout(torch.ones(100_000), 0.3) for _ in range(2))
        uniform, normal = torch.rand(100_000), torch.randn(2, 50_000)
        alpha = F.alpha_dropout(torch.randn(100_000), 0.3, True)
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (kept > 0).float().mean() == pytest.approx(0.7, abs=0.01)
    assert ((kept > 0) & (again > 0)).float().mean() == pytest.approx(0.49, abs=0.01)
    assert (uniform.mean(), uniform.std()) == (pytest.approx(0.5, abs=0.01), pytest.approx(12**-0.5, abs=0.01))
    assert (normal.mean(), normal.std()) == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.02))
    assert (alpha.mean(), alpha.std()) == (pytest.approx(0, abs=0.03), pytest.approx(1, abs=0.03))


def test_random_numbers_that_cannot_be_replaced_are_told():
    with TrainingPass(None, None), pytest.warns(UserWarning, match=r"^the model calls randperm, whose random numbers"):
        torch.randperm(3)
    with TrainingPass(None, None), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.rand(3)


def test_random_numbers_under_gradient_checkpointing_are_refused():
    """The recomputation in the backward pass would draw others."""
    x = torch.ones(3, requires_grad=True)
    with TrainingPass(None, None):
        checkpoint(F.relu, x, use_reentrant=False)
        with pytest.raises(UserError, match=r"^model: it draws random numbers under torch.utils.checkpoint"):
            checkpoint(F.dropout, x, use_reentrant=False)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)])
def test_batch_norm_over_real_samples_is_torchs_own(norm, momentum):
    norm = copy.deepcopy(norm)
    norm.momentum = momentum
    model = nn.Sequential(nn.Linear(5, 4), norm, nn.ReLU(), nn.Linear(4, 3)).double()
    execution = OneByOne(model, Classification(), MAN(), "fp64")
    x, y, n = torch.randn(1, 6, 5).double(), torch.randint(0, 3, (1, 6)), 4
    buffers = flatten_buffers(model)[None].double()
    weight = torch.tensor([[0.25] * n + [0.0] * 2], dtype=torch.float64)
    for step in range(2):
        gradient, loss, buffers = execution.gradient(
            flatten(model)[None], Batch(x + step, y, weight, None, buffers), 0.0
        )
        model.train().zero_grad()
        wanted = F.cross_entropy(model((x + step)[0, :n]), y[0, :n])
        wanted.backward()
        torch.testing.assert_close(loss[0], wanted.detach(), **CLOSE)
        torch.testing.assert_close(gradient[0], torch.cat([p.grad.flatten() for p in model.parameters()]), **CLOSE)
        torch.testing.assert_close(buffers[0], flatten_buffers(model).double(), **CLOSE)


def test_batch_norm_of_a_single_value_returns_its_bias():
    """Alone and in a padded batch; the running statistics stay."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    nn.init.normal_(model[1].bias)
    execution = OneByOne(model, Classification(), MAN(), "fp64")
    x, y = torch.randn(1, 2, 5).double(), torch.zeros(1, 2, dtype=torch.long)
    wanted = F.cross_entropy(model[2](model[1].bias)[None], y[0, :1]).detach()
    for batch in (Batch(x[:, :1], y[:, :1]), Batch(x, y, torch.tensor([[1.0, 0.0]]).double())):
        _, loss, buffers = execution.gradient(flatten(model)[None], batch, 0.0)
        torch.testing.assert_close(loss[0], wanted, **CLOSE)
        assert torch.equal(buffers[0, :8], flatten_buffers(model)[:8])


def test_a_model_without_parameters_is_refused():
    with pytest.raises(UserError, match=r"^model: Dropout has no parameters to train"):
        check_model(nn.Dropout())
