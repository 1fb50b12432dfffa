"""Small nets, data and dense Hessians that the flatness tests share."""

from __future__ import annotations

import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev


class Matrix:
    """A dense symmetric matrix as an operator that counts its products."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.size = matrix, len(matrix)
        self.dtype, self.device, self.products = matrix.dtype, matrix.device, 0

    def __call__(self, vectors: Tensor) -> Tensor:
        self.products += len(vectors)
        return vectors @ self.matrix


class Transformer(nn.Module):
    """Tokens to classes: embedding, one GELU encoder layer, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def cnn() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))


def rows(n: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def images(n: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def tokens(n: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 11, (n, 4), generator=generator), torch.randint(0, 3, (n,), generator=generator)


def transformer() -> nn.Module:
    torch.manual_seed(5)
    return Transformer()


CASES = {"mlp": (mlp, rows), "cnn": (cnn, images), "transformer": (transformer, tokens)}


def dense(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian of the mean cross-entropy over all samples, by torch.autograd.functional in float64."""
    model = copy.deepcopy(model).double().eval()
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]
    x = x.double() if x.is_floating_point() else x

    def loss(w: Tensor) -> Tensor:
        parts = zip(parameters.items(), w.split(sizes), strict=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.cross_entropy(functional_call(model, {n: t.view_as(p) for (n, p), t in parts}, (x,)), y)

    w = torch.cat([p.flatten() for p in parameters.values()])
    return torch.autograd.functional.hessian(loss, w, vectorize=True)


def gauss_newton(model: nn.Module, x: Tensor) -> Tensor:
    """(1/n) Σ J_iᵀ (diag p_i − p_i p_iᵀ) J_i, the Gauss-Newton matrix of the mean cross-entropy."""
    model = copy.deepcopy(model).double().eval()
    x = x.double() if x.is_floating_point() else x

    def output(parameters: dict[str, Tensor]) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return functional_call(model, parameters, (x,))

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    parts = jacrev(output)(parameters)
    jacobian = torch.cat([parts[name].flatten(2) for name in parameters], -1)  # [n, classes, P]
    p = output(parameters).softmax(-1)
    bend = p.diag_embed() - p[:, :, None] * p[:, None, :]
    return torch.einsum("nap,nab,nbq->pq", jacobian, bend, jacobian) / len(x)


@cache
def dense_case(case: str) -> Tensor:
    """The dense Hessian of a case."""
    model, data = CASES[case]
    return dense(model(), *data())


def random_symmetric(size: int, seed: int, decay: float = 1.0) -> Tensor:
    """Random eigenvectors; eigenvalues that fall as a power, a few of them negative."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    values = 10 * torch.arange(1, size + 1, dtype=torch.float64) ** -decay
    values[::7] *= -0.3
    return basis @ values.diag() @ basis.T
