"""The registry of models; the paper's models: parameter counts, shapes, MAN terms."""

import subprocess
import sys

import pytest
import torch

from fedman.errors import UserError
from fedman.models import MODELS, ManVariant, build, man_variant
from fedman.penalties.man import MEASURES, ActivationNorm


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("cifar_cnn", (3, 32, 32), 10, 797_962),
        ("cifar_cnn", (3, 32, 32), 100, 815_332),
        ("tiny_cnn", (3, 64, 64), 200, 2_447_688),
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
    with pytest.raises(UserError, match=r"^man_variant: there is no variant 'large'$"):
        man_variant("tiny_cnn", "large")


@pytest.mark.parametrize("name", MODELS)
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
    x, maps = torch.randn(4, *shape), []
    for relu in model.relus:
        relu.register_forward_hook(lambda module, inputs, out: maps.append(out.detach()))
    maps.append(model(x).detach())
    assert [tuple(a.shape[1:]) for a in maps] == layers
    expected = [a.square().mean() for a in maps]
    man = ActivationNorm(model)
    model(x)
    torch.testing.assert_close(list(man.terms().values()), expected)


def test_images_too_small_and_rows_are_refused():
    with pytest.raises(UserError, match="too small"):
        build("cifar_cnn", (3, 8, 8), 10)
    with pytest.raises(UserError, match="needs images"):
        build("small_cnn", (30,), 10)
    assert build("mlp", (30,), 10)(torch.randn(2, 30)).shape == (2, 10)
