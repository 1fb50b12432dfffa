"""Every execution gives the gradients of one-by-one, for models of every kind; on a GPU too, twice to the same bits."""

import warnings

import pytest
import torch
from torch import nn

import fedman
from fedman.errors import UserError
from fedman.execution import branches, stackable
from fedman.execution.base import Batch
from fedman.execution.branches import Branches, Stack
from fedman.execution.choice import COMPILE_FROM, _first, choose
from fedman.execution.compiled import trace
from fedman.execution.device import determinism, strictly_deterministic
from fedman.execution.one_by_one import OneByOne
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten, flatten_buffers
from fedman.penalties import MAN
from fedman.tasks import Classification

CLASSES = 4
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


class Convolutional(nn.Module):
    """Convolutions, GroupNorm, pooling, a residual connection."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(16, CLASSES)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.head(nn.functional.avg_pool2d(x + self.second(x), 2).flatten(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, nn.functional.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x.reshape(len(x), -1, 6)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.layers, self.head = kind(48, 5, 2, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x.reshape(len(x), 4, 48))[0][:, -1])


class Branching(nn.Module):
    """Asks the host for a value."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(192, CLASSES), nn.Linear(192, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        return self.a(x).tanh() if x.mean() > 0 else self.b(x).tanh()


class Rounded(torch.autograd.Function):
    """A straight-through estimator: its gradient is not that of its forward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(192, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.b(Rounded.apply(3 * self.a(x.flatten(1)).relu()))


class Tied(nn.Module):
    """One module and one weight, each used twice."""

    def __init__(self):
        super().__init__()
        self.into, self.shared, self.out = nn.Linear(192, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.shared.weight

    def forward(self, x):
        return self.out(self.shared(self.shared(self.into(x.flatten(1)).relu()).relu()))[:, :CLASSES]


class Buffered(nn.Module):
    """Constants of its own, kept with the model and not."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, CLASSES)
        self.register_buffer("table", torch.linspace(-1, 1, 192))
        self.register_buffer("factor", torch.tensor(2.0), persistent=False)

    def forward(self, x):
        return self.head((x.flatten(1) + self.table).relu() * self.factor)


KINDS = {
    "convolutional": Convolutional,
    "attention": Attention,
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "branching": Branching,
    "autograd function": Quantised,
    "tied": Tied,
    "buffers": Buffered,
    "dropout": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    ),
    "batch-norm": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    ),
}
EXECUTIONS = {
    "vmap": Vmapped,
    "branches": Branches,
    "compiled": lambda *parts: Branches(*parts, compiled=True),
    "compiled vmap": lambda *parts: Stack(*parts, compiled=True),
}


@pytest.fixture(autouse=True)
def _blocks_of_two(monkeypatch):
    monkeypatch.setattr(Stack, "sizes", (2, 1))


def case(kind, device="cpu", dtype=torch.float64, clients=3):
    torch.manual_seed(0)
    model = KINDS[kind]().to(dtype)
    w = flatten(model)
    W = w + 0.1 * torch.randn(clients, len(w)).to(dtype)
    x, y = torch.randn(clients, 6, 3, 8, 8).to(dtype), torch.randint(0, CLASSES, (clients, 6))
    x[1] = x[1].abs()
    weight = torch.rand(clients, 6).to(dtype)
    weight[0, 4:] = 0
    buffers = flatten_buffers(model).to(device, dtype).repeat(clients, 1)
    whole = Batch(x.to(device), y.to(device), key=torch.arange(clients, device=device), buffers=buffers)
    return model, W.to(device), [whole, whole._replace(weight=weight.to(device))]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_one_by_one(kind, execution, device, monkeypatch):
    if kind == "branching" and "vmap" in execution:
        pytest.skip("is refused, see below")
    if device == "cpu":  # the graph as it was traced: a C++ compiler would take minutes
        monkeypatch.setattr(branches, "compile_graph", trace)
        if execution == "compiled vmap":
            monkeypatch.setattr(stackable, "applies", lambda W: True)
    model, W, batches = case(kind, device)
    plain, other = (made(model, Classification(), MAN(), "fp64") for made in (OneByOne, EXECUTIONS[execution]))
    each = torch.tensor([0.0, 0.2, 0.4], dtype=W.dtype, device=device)
    with warnings.catch_warnings(record=True) as told:
        for batch, zeta in ((batches[0], 0.0), (batches[1], each)):
            found, expected = (made.gradient(W, batch, zeta) for made in (other, plain))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    fused = kind in ("lstm", "gru") and device != "cpu" and "vmap" not in execution  # by cuDNN, opaque to a compiler
    whole = "compiled" not in execution or (kind != "branching" and not fused)
    title = "compiled branches" if execution == "compiled" else execution
    assert other.title == (title if whole else title.removeprefix("compiled "))
    assert whole or any("not compiled, which is slower: " in str(each.message) for each in told)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "branching"])
def test_twice_the_same_bits(kind, execution, device):
    with determinism(True, device):
        model, W, batches = case(kind, device, torch.float32, clients=20)
        found = [
            EXECUTIONS[execution](model, Classification(), MAN(), "bf16").gradient(W, batches[0], 0.3) for _ in range(2)
        ]
    assert all(map(torch.equal, *found))


def test_a_run_leaves_pytorchs_settings_as_they_were():
    def settings():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    before = settings()
    with strictly_deterministic(True):
        assert settings() == before
    with determinism(True, "cuda"):
        assert settings() == (True, True, True, False)
        with strictly_deterministic(True):
            assert settings() == (True, False, True, False)
        assert settings() == (True, True, True, False)
    with determinism(False, "cuda"):
        assert settings()[0] is False
        assert settings()[2:] == (False, True)
    assert settings() == before


def chosen(kind, wanted="auto", device="cpu", chunk=4, gradients=0):
    model, _, (batch, _) = case(kind, device, torch.float32)
    parts = model, Classification(), MAN(), "fp32", torch.device(device)
    return choose(*parts, chunk, (batch.x[0, :2], batch.y[0, :2]), (), wanted, gradients)


def test_what_vmap_cannot_stack_is_passed_on_with_the_reason():
    with pytest.warns(UserWarning, match="execution: plain, since vmap cannot stack this model: .*data-dependent"):
        assert chosen("branching").title == "plain"
    assert chosen("tied").title == "vmap"
    assert chosen("lstm").title == "plain"
    assert chosen("tied", chunk=1).title == "plain"


@pytest.mark.parametrize(("groups", "title"), [(1, "branches"), (3, "branches"), (0, "compiled vmap")])
def test_a_long_run_stacks_what_the_kernels_serve(groups, title, monkeypatch):
    """Convolutions without kernels, on a CPU all of them, are computed by branches, and a line says so."""
    monkeypatch.setattr(stackable, "applies", lambda W: True)
    conv = [nn.Conv2d(3, 3, 3, groups=groups)] if groups else [nn.AvgPool2d(3, 1)]
    model = nn.Sequential(*conv, nn.Flatten(), nn.Linear(108, CLASSES))
    parts = model, Classification(), MAN(), "fp32"
    made = {"vmap": lambda: Stack(*parts, compiled=True), "branches": lambda: Branches(*parts)}
    example = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    with warnings.catch_warnings(record=True) as told:
        assert _first(["vmap", "branches"], made, example).title == title
        assert _first(["vmap"], made, example).title == "compiled vmap"  # insisted on
    badly = [str(each.message) for each in told if "execution: " in str(each.message)]
    assert badly == ["execution: branches, since vmap stacks a conv2d of this model badly"] * bool(groups)


def test_an_execution_can_be_insisted_on():
    assert [chosen("tied", each).title for each in ("vmap", "branches", "plain")] == ["vmap", "branches", "plain"]
    with pytest.raises(UserError, match=r"execution: vmap cannot serve this model: .*data-dependent"):
        chosen("branching", "vmap")
    with pytest.raises(UserError, match="execution: kernels serve fedman's ConvNets"):
        chosen("tied", "kernels")


@pytest.mark.parametrize("device", [CUDA])
def test_long_runs_are_compiled(device):
    assert chosen("tied", "branches", device, gradients=COMPILE_FROM).title == "compiled branches"
    assert chosen("tied", "branches", device, gradients=COMPILE_FROM - 1).title == "branches"
    assert chosen("tied", device=device).title == "vmap"
    with pytest.warns(UserWarning, match="execution: branches, since vmap cannot stack"):
        assert chosen("branching", device=device).title == "branches"


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_run_goes_on_to_the_same_bits(tmp_path, device):
    keys = {
        "model": "mlp", "clients": 6, "participation": 0.5, "epochs": 1, "execution": "branches", "zeta": 0.1,
        "device": device, "eval_every": 4,
    }  # fmt: skip
    whole = fedman.run(rounds=4, **keys)
    fedman.run(rounds=2, out=tmp_path / "run", **keys)
    resumed = fedman.run(rounds=4, out=tmp_path / "run", resume=True, **keys)
    assert whole.summary["execution"] == resumed.summary["execution"] == "branches"
    assert "branches" in repr(whole)
    for name, w in whole.models["cloud"].items():
        assert torch.equal(w, resumed.models["cloud"][name])
