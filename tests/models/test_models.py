"""The registry of models; the paper's models: parameter counts, shapes, MAN terms."""

import subprocess
import sys

import pytest
import torch

from fedman.errors import UserError
from fedman.execution.base import Batch
from fedman.execution.vmapped import Vmapped
from fedman.models import MODELS, OF_IDS, ManVariant, build, man_variant, takes_ids
from fedman.penalties import MAN
from fedman.penalties.measures import MEASURES
from fedman.tasks import Classification


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("cifar_cnn", (3, 32, 32), 10, 797_962),
        ("cifar_cnn", (3, 32, 32), 100, 815_332),
        ("tiny_cnn", (3, 64, 64), 200, 2_447_688),
        ("lstm", (80,), 65, 815_945),
        ("transformer", (80,), 65, 820_289),
    ],
)
def test_parameter_counts(name, shape, classes, parameters):
    assert sum(p.numel() for p in build(name, shape, classes).parameters()) == parameters


def test_the_registry_imports_without_torch():
    code = "import sys, fedman.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_variants_of_the_man_term_belong_to_a_model():
    assert man_variant("mlp", "formula") == ManVariant()
    variant = man_variant("tiny_cnn", "tiny-code")
    assert not variant.logits
    assert set(variant.layers) <= dict(build("tiny_cnn", (3, 64, 64), 2).named_modules()).keys()
    assert set(variant.layers.values()) <= MEASURES.keys()
    with pytest.raises(UserError, match=r"^man_variant: tiny-code belongs to model tiny_cnn$"):
        man_variant("cifar_cnn", "tiny-code")
    assert man_variant(None, "tiny-code") == variant
    with pytest.raises(UserError, match=r"^man_variant: 'large' is not one of formula, tiny-code$"):
        man_variant("tiny_cnn", "large")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OF_IDS])
def test_every_model_maps_images_to_logits(name):
    shape = (3, 64, 64) if name == "tiny_cnn" else (3, 32, 32)
    assert build(name, shape, 7)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [
        ("cifar_cnn", (3, 32, 32), [(64, 28, 28), (64, 10, 10), (384,), (192,), (100,)]),
        ("tiny_cnn", (3, 64, 64), [(64, 64, 64), (64, 32, 32), (64, 16, 16), (512,), (384,), (100,)]),
    ],
)
def test_man_term_of_the_papers_models(name, shape, layers):
    """R on a fixed batch is the direct formula: unpooled ReLU maps, hidden linear layers, logits."""
    torch.manual_seed(0)
    model = build(name, shape, 100)
    x, y = torch.randn(1, 4, *shape), torch.zeros(1, 4, dtype=torch.long)
    maps = []
    for relu in model.relus:
        relu.register_forward_hook(lambda module, inputs, out: maps.append(out.detach()))
    maps.append(model(x[0]).detach())
    assert [tuple(a.shape[1:]) for a in maps] == layers
    stacked = Vmapped(build(name, shape, 100), Classification(), MAN())
    w = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
    terms = stacked.penalty_terms(w, Batch(x, y))
    torch.testing.assert_close(torch.stack(list(terms.values()))[:, 0], torch.stack([a.square().mean() for a in maps]))


def test_images_too_small_and_rows_are_refused():
    with pytest.raises(UserError, match="too small"):
        build("cifar_cnn", (3, 8, 8), 10)
    with pytest.raises(UserError, match="needs images"):
        build("small_cnn", (30,), 10)
    assert build("mlp", (30,), 10)(torch.randn(2, 30)).shape == (2, 10)


@pytest.mark.parametrize("name", OF_IDS)
def test_models_of_text_see_the_past_alone(name):
    torch.manual_seed(0)
    model = build(name, (6,), 9)
    ids = torch.randint(9, (3, 6))
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] + 1) % 9
    out, other = model(ids), model(changed)
    assert out.shape == (3, 6, 9)
    torch.testing.assert_close(out[:, :4], other[:, :4])
    assert (out[:, 4:] - other[:, 4:]).abs().amax(2).min() > 1e-4
    torch.testing.assert_close(model(ids[:, :4]), out[:, :4])  # shorter texts are fine


@pytest.mark.parametrize("name", MODELS)
def test_which_models_take_ids(name):
    assert takes_ids(build(name, (40,) if name in (*OF_IDS, "mlp") else (3, 32, 32), 5)) == (name in OF_IDS)


OWN = """
import torch
from torch import nn
from fedman.errors import UserError

def small(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], outputs))

class Net(nn.Linear):
    def __init__(self, shape, outputs):
        super().__init__(shape[0], outputs)

def broken(shape, outputs):
    raise ValueError("two\\nlines")

def picky(shape, outputs):
    raise UserError("model: mine wants 3 outputs")

def nothing(shape, outputs):
    pass

rows = [1, 2]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.parametrize("name", ["small", "Net"])
def test_a_model_of_ones_own(own, name):
    assert build(f"own_models:{name}", (7,), 3)(torch.randn(2, 7)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "own_models:rows",
            (7,),
            "model: own_models:rows is a value of type list, not a function of a sample's shape and",
        ),
        ("own_models:broken", (7,), r"model: own_models:broken\(\(7,\), 3\) failed \(ValueError: two\)$"),
        ("own_models:picky", (7,), "model: mine wants 3 outputs$"),
        ("own_models:nothing", (7,), r"model: own_models:nothing returned None, not an nn\.Module$"),
        ("own_models:smal", (7,), r"model: own_models has no smal; did you mean small\?$"),
        ("no_such_module:Net", (7,), r"model: no_such_module:Net cannot be imported \(ModuleNotFoundError"),
        ("mpl", (7,), r"model: no model named 'mpl'; did you mean mlp\?$"),
        ("lstm", (3, 8, 8), r"model: lstm needs samples of ids \[T\], the data has samples of shape \(3, 8, 8\)$"),
        ("transformer", (8, 8), r"model: transformer needs samples of ids \[T\]"),
    ],
)
def test_models_that_are_refused(own, name, shape, message):
    with pytest.raises(UserError, match="^" + message) as error:
        build(name, shape, 3)
    assert "\n" not in str(error.value)
