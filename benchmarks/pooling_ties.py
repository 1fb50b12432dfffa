"""Why fp32 and float64 part in jumps: ReLUs and pooling windows that decide differently.

    python benchmarks/pooling_ties.py [--model cifar tiny] [--steps 40] [--device cuda]

The gradient of a CNN is not continuous where an input of a ReLU is 0, or where the two largest values of a pooling
window are equal: there another path carries the gradient. A client trains in fp32. At every step its gradient is
compared with float64's at the same weights, and with float64's where every ReLU and window decides as it did in fp32.
If decisions are the cause, the first distance jumps in steps in which a decision differs, and the second never does.
The same of the weights after all steps: those of float64 on its own, and of float64 with fp32's decisions.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedman.models.convnet import ConvNet, cifar_cnn, tiny_cnn

MODELS = {"cifar": (cifar_cnn, (3, 32, 32), 100), "tiny": (tiny_cnn, (3, 64, 64), 200)}
BATCH, RATE = 10, 0.1


@dataclass
class Decisions:
    """What every ReLU lets through, and which of its four values every pooling window takes."""

    masks: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)

    def differing(self, other: Decisions) -> tuple[int, int]:
        """How many ReLUs differ, and how many windows with something to take."""
        masks = sum(int((a != b).sum()) for a, b in zip(self.masks, other.masks, strict=True))
        windows = 0
        for a, b, mask in zip(self.places, other.places, self.masks, strict=False):
            windows += int(((a != b) & (F.max_pool2d(mask.float(), 2) > 0)).sum())
        return masks, windows


def loss(
    model: ConvNet, x: Tensor, y: Tensor, zeta: float, forced: Decisions | None = None
) -> tuple[Tensor, Decisions]:
    """Cross-entropy + ζ·MAN, and the decisions taken; or with decisions taken elsewhere."""
    made, terms = Decisions(), []
    for i in range(len(model.relus)):
        stage = i < len(model.convs)
        if i == len(model.convs):
            x = x.flatten(1)
        z = model.norms[i](model.convs[i](x)) if stage else model.linears[i - len(model.convs)](x)
        mask = z > 0 if forced is None else forced.masks[i]
        a = z * mask
        terms.append(a.square().mean())
        if stage:
            places = F.max_pool2d(a, 2, return_indices=True)[1] if forced is None else forced.places[i]
            x = a.flatten(2).gather(2, places.flatten(2)).view_as(places)
            made.places.append(places)
        else:
            x = a
        made.masks.append(mask)
    logits = model.linears[-1](x)
    return F.cross_entropy(logits, y) + zeta * (sum(terms) + logits.square().mean()), made


def gradient(
    model: nn.Module, dtype: torch.dtype, x: Tensor, y: Tensor, zeta: float, forced: Decisions | None = None
) -> tuple[Tensor, Decisions]:
    """The gradient at the model's weights as one vector, computed in a precision."""
    model = model.to(dtype)
    found, made = loss(model, x.to(dtype), y, zeta, forced)
    return torch.cat([g.flatten().double() for g in torch.autograd.grad(found, list(model.parameters()))]), made


@torch.no_grad()
def descend(model: nn.Module, g: Tensor, dtype: torch.dtype) -> None:
    """One step, in this precision."""
    model.to(dtype)
    start = 0
    for p in model.parameters():
        p -= RATE * g[start : start + p.numel()].view_as(p).to(dtype)
        start += p.numel()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["cifar"], choices=MODELS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--zeta", type=float, default=0.15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    for name in options.model:
        build, shape, classes = MODELS[name]
        torch.manual_seed(0)
        single = build(shape, classes).to(options.device)
        double, forced, first = copy.deepcopy(single), copy.deepcopy(single), weights(single)
        steps: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        flips = [0, 0]
        for _ in range(options.steps):
            x = torch.randint(256, (BATCH, *shape), device=options.device).float() / 255 - 0.5
            y = torch.randint(classes, (BATCH,), device=options.device)
            here = copy.deepcopy(single)  # the same point in both precisions
            g32, theirs = gradient(single, torch.float32, x, y, options.zeta)
            g64, ours = gradient(here, torch.float64, x, y, options.zeta)
            as32, _ = gradient(here, torch.float64, x, y, options.zeta, theirs)
            differing = ours.differing(theirs)
            flips = [total + count for total, count in zip(flips, differing, strict=True)]
            steps[any(differing)].append(tuple(float((g32 - g).norm() / g.norm()) for g in (g64, as32)))
            descend(double, gradient(double, torch.float64, x, y, options.zeta)[0], torch.float64)
            descend(forced, gradient(forced, torch.float64, x, y, options.zeta, theirs)[0], torch.float64)
            descend(single, g32, torch.float32)
        print(f"{name}, {options.steps} steps of one client, ζ = {options.zeta:g}")
        for differs, found in steps.items():
            if found:
                apart, same = (sorted(values) for values in zip(*found, strict=True))
                what = f"a decision differs ({flips[0]} ReLUs, {flips[1]} windows)" if differs else "the same decisions"
                print(f"  {len(found)} gradients, {what}: fp32 against float64 {apart[len(apart) // 2]:.1e} (median), "
                      f"{apart[-1]:.1e} (largest); float64 with fp32's decisions {same[-1]:.1e} (largest)")  # fmt: skip
        moved = (weights(double) - first).norm()
        free, held = (float((weights(single) - weights(other)).norm() / moved) for other in (double, forced))
        print(f"  at the end, of the distance moved: fp32 against float64 {free:.1e}; with fp32's decisions {held:.1e}")


if __name__ == "__main__":
    main()
