"""A `ConvNet` for S clients at once, each with its own row of parameters, on the kernels of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedman.kernels import activation, conv, first_stage, gram, head, linear
from fedman.kernels.side_stream import SideStream
from fedman.kernels.stage import STORAGE, Stage
from fedman.models.convnet import ConvNet
from fedman.models.parameters import ParameterLayout


@dataclass(frozen=True)
class Images:
    """A prepared batch and, where GroupNorm follows the first conv, the Gram matrices of its patches: all that does not
    depend on the weights."""

    x: Tensor
    grams: Tensor | None


class StackedConvNet:
    """Losses and gradients of S clients of one `ConvNet` at their flat parameters W [S, P].

    `precision` is that of the products: "bf16", "tf32" or "fp32". Sums, statistics, parameters and
    gradients are always fp32; activations are stored in bf16 or fp32 accordingly. To the MAN terms of the hidden linear
    layers `variance_of` the variance of a feature over the batch, averaged over features, is added.

    >>> net = StackedConvNet(cifar_cnn((3, 32, 32), 100), (3, 32, 32), "bf16")
    >>> x = net.prepare(images)                      # [S, B, 32, 32, 3]
    >>> ce, man, grad = net.gradient(W, x, y, zeta)  # [S], [S, 5], [S, P]; y [S, B]
    """

    def __init__(self, model: ConvNet, shape: tuple[int, ...], precision: str, variance_of: Sequence[int] = ()) -> None:
        self.precision, self.dtype, self.variance_of = precision, STORAGE[precision], variance_of
        layout = ParameterLayout.of(model)
        self.offsets = dict(zip(layout.names, accumulate(layout.sizes, initial=0), strict=False))
        self.padding = model.padding
        self.stages: list[Stage] = []
        channels, height, width = shape
        for out in model.channels:
            stage = Stage(height, width, channels, out, model.kernel, model.padding, model.groups)
            self.stages.append(stage)
            channels, (height, width) = out, (n // 2 for n in stage.map)
        self.stages[0] = first_stage.prepared(self.stages[0])
        self.widths = [layer.out_features for layer in cast("list[nn.Linear]", model.linears)]
        self.layers = len(self.stages) + len(self.widths)

    @staticmethod
    def supports(model: ConvNet, shape: tuple[int, ...], variance_of: Sequence[int] = ()) -> bool:
        """Whether the kernels can run `model`: images with few channels (k·(k + 1)·(C + 1) ≤ 256), convs with 16, 32,
        64 or 128 outputs; with GroupNorm, the first map of even width."""
        kernel, padding, groups, stages = model.kernel, model.padding, model.groups, len(model.channels)
        return (
            stages > 0
            and {*model.channels} <= {16, 32, 64, 128}
            and kernel * (kernel + 1) * first_stage.padded_channels(shape[0]) <= 256
            and padding < kernel
            and (groups == 0 or (shape[2] + 2 * padding - kernel) % 2 == 1)
            and {*variance_of} <= {*range(stages, len(model.relus))}
        )

    def prepare(self, x: Tensor) -> Tensor:
        """Images [..., H, W, C] in the layout of the kernels."""
        return first_stage.prepare(x, self.padding, self.dtype)

    def images(self, x: Tensor | Images) -> Images:
        """Prepared images with all that does not depend on the weights: for a step of several passes."""
        if isinstance(x, Images):
            return x
        x, stage = x.contiguous(), self.stages[0]
        return Images(x, gram.matrices(stage, x, self.precision) if stage.groups else None)

    def losses(self, W: Tensor, x: Tensor | Images, y: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cross-entropy [S] and MAN terms [S, L] (mean squares of hidden ReLU outputs before pooling, and of logits).

        W [S, P], x prepared images or `images`, y [S, B]. Means over the batch are weighted by `weight` [S, B] ≥ 0 if
        given; a client whose weights are all zero has loss zero.
        """
        ce, man, _ = self._forward(W, self.images(x), y, self._share(y, weight))
        return ce, man

    def gradient(
        self, W: Tensor, x: Tensor | Images, y: Tensor, zeta: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy [S], MAN terms [S, L] and the gradient [S, P] of CE + Σ_l ζ·MAN_l.

        `zeta` holds one value, one per client [S, 1], or one per client and layer [S, L].
        """
        share = self._share(y, weight)
        ce, man, saved = self._forward(W, self.images(x), y, share)
        dce = share.new_ones(1).expand(len(W))
        return ce, man, self._backward(saved, dce, zeta.to(torch.float32).expand_as(man))

    def logits(self, W: Tensor, x: Tensor) -> Tensor:
        """The outputs [S, B, K] of S models on their images, without a gradient."""
        y = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        return self._forward(W, self.images(x), y, self._share(y, None))[2].inputs[-1]

    def _share(self, y: Tensor, weight: Tensor | None) -> Tensor:
        """Each sample's weight in its client's batch mean, [S, B]."""
        if weight is None:
            return torch.full(y.shape, 1.0 / y.shape[1], device=y.device)
        return weight / weight.sum(1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)

    def _rows(self, flat: Tensor, name: str) -> Tensor:
        """The rows of parameters (or gradients), starting at parameter `name`."""
        return flat[:, self.offsets[name] :]

    def _norm(self, flat: Tensor, i: int) -> tuple[Tensor, Tensor] | None:
        if not self.stages[i].groups:
            return None
        return self._rows(flat, f"norms.{i}.weight"), self._rows(flat, f"norms.{i}.bias")

    def _strides(self, i: int) -> tuple[int, int]:
        """Strides of pixel and channel after stage i: channels last, but channels first before the linear layers,
        whose weights expect a flattened [C, H, W]."""
        return (self.stages[i].out, 1) if i < len(self.stages) - 1 else (1, self.stages[i].pooled)

    def _parts(self, batch: int) -> tuple[int, ...]:
        """How many partial MAN sums each layer writes per client."""
        convs = [activation.parts(stage, batch) for stage in self.stages]
        convs[0] = first_stage.parts(self.stages[0], batch, self.precision)
        return (*convs, *(linear.blocks(batch, n) for n in self.widths))

    def _forward(self, W: Tensor, images: Images, y: Tensor, share: Tensor) -> tuple[Tensor, Tensor, _Saved]:
        """Losses, and what the backward pass needs."""
        W, y = W.contiguous(), y.contiguous()
        parts = self._parts(y.shape[1])
        partial = share.new_empty(len(W), self.layers, max(parts))
        saved = _Saved(W, y, share, images.grams, [], [])
        a = images.x
        for i in range(len(self.stages)):
            a = self._stage_forward(i, a, saved, partial[:, i])
        for i, width in enumerate(self.widths):
            saved.inputs.append(a)
            rows, man = self._rows(W, f"linears.{i}.weight"), partial[:, len(self.stages) + i]
            a = linear.forward(a, rows, width, i < len(self.widths) - 1, share, man, self.precision)
        saved.inputs.append(a)
        ce, man = head.forward(a, y, share, partial, parts)
        for layer in self.variance_of:
            man[:, layer] += _variance(saved.inputs[layer - len(self.stages) + 1], share)
        return ce, man, saved

    def _stage_forward(self, i: int, x: Tensor, saved: _Saved, man: Tensor) -> Tensor:
        """The pooled output of stage i."""
        stage, share, precision = self.stages[i], saved.share, self.precision
        norm, strides = self._norm(saved.W, i), self._strides(i)
        x = x.view(*share.shape, stage.height, stage.width, stage.channels)
        w = conv.pack(self._rows(saved.W, f"convs.{i}.weight"), stage, precision)
        z = stats = None
        if i == 0:
            if norm:
                stats = gram.statistics(stage, w, norm, saved.grams)
            pooled, place = first_stage.forward(stage, x, w, share, stats, man, strides, precision)
        else:
            z = conv.forward(stage, x, w, self._rows(saved.W, f"convs.{i}.bias"), precision)
            pooled, place, stats = activation.forward(stage, z, norm, share, man, strides)
        saved.stages.append((x, w, z, pooled, place, stats))
        return pooled

    def _backward(self, saved: _Saved, dce: Tensor, dman: Tensor) -> Tensor:
        """The gradient [S, P] for gradients dce [S] and dman [S, L]; each layer writes its own columns."""
        W, share, precision, convs = saved.W, saved.share, self.precision, len(self.stages)
        dW, side = torch.empty_like(W), SideStream(W.device)
        d = head.backward(saved.inputs[-1], saved.y, share, dce, dman[:, -1], self.dtype)
        for i in reversed(range(len(self.widths))):
            name, a = f"linears.{i}.weight", saved.inputs[i]
            with side.work(d):
                linear.weight_gradient(d, a, self._rows(dW, name), precision)
            term = dman[:, convs + i - 1] if i else None
            d = linear.input_gradient(d, self._rows(W, name), a, term, share, precision)
            if convs + i - 1 in self.variance_of:
                d += _variance_gradient(a, share, dman[:, convs + i - 1])
        for i in reversed(range(convs)):
            d = self._stage_backward(i, d, saved, dman[:, i], dW, side)
        side.join()
        return dW

    def _stage_backward(self, i: int, d: Tensor, saved: _Saved, dman: Tensor, dW: Tensor, side: SideStream) -> Tensor:
        """Write the gradient of the stage's parameters and return that of its input (for i > 0), given that of its
        pooled output, d."""
        stage, share, precision = self.stages[i], saved.share, self.precision
        norm, strides, rows = self._norm(saved.W, i), self._strides(i), self._rows(dW, f"convs.{i}.weight")
        x, w, z, pooled, place, stats = saved.stages[i]
        if i == 0:
            part = first_stage.backward(stage, x, w, share, stats, d, place, dman, strides, precision)
            if norm:
                part, npart = gram.gradient(stage, w, norm, stats, saved.grams, part, precision)
            conv.unpack(part, rows, stage)
        else:
            d, bpart, npart = activation.backward(stage, z, norm, share, pooled, d, place, stats, dman, strides)
            with side.work(d, bpart):
                torch.sum(bpart, 1, out=self._rows(dW, f"convs.{i}.bias")[:, : stage.out])
                conv.unpack(conv.weight_gradient(stage, x, d, precision), rows, stage)
            d = conv.input_gradient(stage, d, w, precision)
        if norm:
            with side.work(npart):
                torch.sum(npart.flatten(2), 1, out=self._rows(dW, f"norms.{i}.weight")[:, : 2 * stage.out])
        return d


def _variance(a: Tensor, share: Tensor) -> Tensor:
    """[S], the mean over features of Var(a) = Σ_b share_b·(a_b − mean a)²/(1 − Σ_b share_b²) of a [S, B, n]: unbiased,
    and 0 for one sample."""
    return (share[..., None] * _centred(a, share).square()).sum(1).mean(1) / _others(share)


def _variance_gradient(a: Tensor, share: Tensor, dman: Tensor) -> Tensor:
    """The gradient with respect to z of dman·`_variance`(a), a = relu(z) [S, B, n]:
    2·dman/n·share_b·(a_b − mean a)/(1 − Σ_b share_b²) where a > 0."""
    d = (2.0 / a.shape[2] * dman / _others(share))[:, None, None] * share[..., None] * _centred(a, share)
    return torch.where(a > 0, d, 0.0).to(a.dtype)


def _centred(a: Tensor, share: Tensor) -> Tensor:
    """a − Σ_b share_b·a_b."""
    v = a.float()
    return v - (share[..., None] * v).sum(1, keepdim=True)


def _others(share: Tensor) -> Tensor:
    """1 − Σ_b share_b² [S], not below rounding: of n samples with equal shares 1 − 1/n."""
    return (1.0 - share.square().sum(1)).clamp_min(torch.finfo(share.dtype).eps)


@dataclass
class _Saved:
    """What the backward pass needs of the forward pass."""

    W: Tensor
    y: Tensor
    share: Tensor
    grams: Any
    inputs: list[Tensor]  # of the linear layers, and the logits
    stages: list[Any]  # of each stage: input, packed weights, map (None: recomputed), pooled map, places, statistics
