"""fedman with what released code does and fedman does not, each as its docstring says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from setting import CLIENTS, network
from torch import Tensor

from fedman.algorithms import FedAdam, FedGloSS, FedLESAM, FedLESAMD, FedProx, FedSAM, Grad, Local, State, descend
from fedman.algorithms.steps import climb


@dataclass(frozen=True)
class Offset(FedSAM):
    """1e-7 is added to the norm, not 1e-16"""

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(climb(w, grad(w), self.rho, hp, eps=1e-7)), hp)


@dataclass(frozen=True)
class FromZero(FedAdam):
    """v starts at 0"""

    def update(self, server: State, mean: State, fraction: float) -> State:
        new = super().update({**server, "u": server["u"] - self.tau**2}, mean, fraction)
        return {**new, "u": new["u"] + self.tau**2}


@dataclass(frozen=True)
class Outside(FedProx):
    """μw is weight decay, outside the clip"""

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(w) - self.mu * server["w"], hp, extra_decay=self.mu)


@dataclass(frozen=True)
class TwiceDivided(FedGloSS):
    """state_scale is 1/|S| of each round"""

    def update(self, server: State, mean: State, fraction: float) -> State:
        return FedGloSS.update(replace(self, state_scale=1 / (fraction * CLIENTS)), server, mean, fraction)


class Indexed:
    """the i-th entry of the last step is used for all of the i-th tensor"""

    def begin(self, server: State, client: State, hp: Local) -> State:
        counts = torch.tensor([p.numel() for p in network().parameters()])
        way = ((server["before"] - server["w"]) * (server["before"] != 0).any())[..., : len(counts)]
        e = self.rho * way / (way.abs().sum(-1, keepdim=True) + 1e-7)
        return super().begin(server, client, hp) | {"e": e.repeat_interleave(counts, -1).expand(len(hp.p), -1)}


@dataclass(frozen=True)
class IndexedLESAM(Indexed, FedLESAM):
    __doc__ = Indexed.__doc__


@dataclass(frozen=True)
class IndexedLESAMD(Indexed, FedLESAMD):
    __doc__ = Indexed.__doc__


def pooled(a: Tensor) -> Tensor:
    """the third convolution is measured after pooling"""
    return F.max_pool2d(a, 2).square().mean((1, 2, 3))
