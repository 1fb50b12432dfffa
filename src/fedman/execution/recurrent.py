"""Recurrent layers written out in matrix products, which `torch.func.vmap` can stack over models.

PyTorch's own LSTM, GRU and RNN are single calls without a batching rule. Written out, the steps of a sequence follow
each other, and each is one product for all models at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedman import kernels
from fedman.execution.stackable import OfAllModels, models_first
from fedman.penalties.autograd import transforms_active

States = tuple[Tensor, ...]


def is_recurrent(model: nn.Module) -> bool:
    """Whether the model has an LSTM, GRU or RNN."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def unroll(model: nn.Module) -> nn.Module:
    """`model`, whose recurrent layers are from now on computed step by step, with the same parameters and results."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.forward = partial(_forward, module)
    return model


def _forward(layer: nn.RNNBase, x: Any, hx: Any = None) -> tuple[Tensor, Any]:
    """What `layer(x, hx)` returns."""
    if not isinstance(x, Tensor):
        raise NotImplementedError("packed sequences cannot be stacked")
    single = x.ndim == 2
    x = x.unsqueeze(0 if layer.batch_first else 1) if single else x
    x = x.transpose(0, 1) if layer.batch_first else x  # [T, B, features]
    starts = _starts(layer, x, hx, single)
    ends: list[States] = []
    for depth in range(layer.num_layers):
        x = _dropped(layer, x) if depth else x
        ways = []
        for way in range(2 if layer.bidirectional else 1):
            weights = _weights(layer, f"l{depth}{'_reverse' if way else ''}")
            out, end = _sequence(layer, x.flip(0) if way else x, starts[len(ends)], weights)
            ways.append(out.flip(0) if way else out)
            ends.append(end)
        x = torch.cat(ways, -1) if len(ways) > 1 else ways[0]
    out = x.transpose(0, 1) if layer.batch_first else x
    last = [torch.stack(each) for each in zip(*ends, strict=True)]
    if single:
        out, last = out.squeeze(0 if layer.batch_first else 1), [each.squeeze(1) for each in last]
    return out, tuple(last) if len(last) > 1 else last[0]


def _dropped(layer: nn.RNNBase, x: Tensor) -> Tensor:
    """The input `[T, B, features]` of a layer above another, dropped as one of the layer's own shape is."""
    order = (0, 1) if layer.batch_first else (0, 0)
    return nn.functional.dropout(x.transpose(*order), layer.dropout, layer.training).transpose(*order)


def _sequence(layer: nn.RNNBase, x: Tensor, start: States, weights: dict[str, Tensor]) -> tuple[Tensor, States]:
    """The outputs `[T, B, H]` of one layer in one direction, and its last states."""
    if _has_kernels(layer, x):
        biases = [weights[name] for name in ("bias_ih", "bias_hh") if name in weights]
        gates = nn.functional.linear(x, weights["ih"], sum(biases[1:], biases[0]) if biases else None)
        if torch.is_autocast_enabled("cuda"):  # under vmap the bias is added in its own precision
            gates = gates.to(torch.get_autocast_dtype("cuda"))
        out, end = _steps(gates, weights["hh"], *start)
        return out, (out[-1], end)
    step = _STEPS[layer.mode]
    projected = nn.functional.linear(x, weights["ih"], weights.get("bias_ih"))  # of all steps at once
    state, outputs = start, []
    for now in projected.unbind(0):
        state = step(now, nn.functional.linear(state[0], weights["hh"], weights.get("bias_hh")), state)
        if "hr" in weights:
            state = nn.functional.linear(state[0], weights["hr"]), *state[1:]
        outputs.append(state[0])
    return torch.stack(outputs), state


def _has_kernels(layer: nn.RNNBase, x: Tensor) -> bool:
    """Whether the GPU kernels take the steps of a layer."""
    return layer.mode == "LSTM" and not layer.proj_size and x.dtype != torch.float64 and kernels.available(x.device)


def _steps(x: Tensor, w: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The steps of one LSTM layer by the kernels: gates of the inputs, recurrent weights, first states ↦ outputs, c."""
    from fedman.kernels.lstm import StackedLSTM

    if transforms_active():
        return _Steps.apply(x, w, h, c)
    out, end = StackedLSTM.apply(x[None], w[None], h[None], c[None])
    return out[0], end[0]


class _Steps(OfAllModels):
    """`_steps` under vmap."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        from fedman.kernels.lstm import StackedLSTM

        stacked = (models_first(v, dim, info.batch_size) for v, dim in zip(inputs, in_dims, strict=True))
        return StackedLSTM.apply(*stacked), (0, 0)


def _lstm(x: Tensor, h: Tensor, state: States) -> States:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, state: States) -> States:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    z = (xz + hz).sigmoid()
    return (n + z * (state[0] - n),)


_STEPS: dict[str, Callable[[Tensor, Tensor, States], States]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda x, h, state: ((x + h).tanh(),),
    "RNN_RELU": lambda x, h, state: ((x + h).relu(),),
}


def _starts(layer: nn.RNNBase, x: Tensor, hx: Any, single: bool) -> list[States]:
    """The first states of every layer and direction; zero where none are given."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if hx is None:
        sizes = [layer.proj_size or layer.hidden_size, *([layer.hidden_size] if layer.mode == "LSTM" else [])]
        return [tuple(x.new_zeros(x.shape[1], size) for size in sizes)] * count
    given = hx if isinstance(hx, tuple) else (hx,)
    given = tuple(each.unsqueeze(1) for each in given) if single else given
    return list(zip(*(each.unbind(0) for each in given), strict=True))


def _weights(layer: nn.RNNBase, suffix: str) -> dict[str, Tensor]:
    """The parameters of one layer in one direction, by what they do."""
    names = {"ih": "weight_ih", "hh": "weight_hh", "hr": "weight_hr", "bias_ih": "bias_ih", "bias_hh": "bias_hh"}
    full = {key: f"{name}_{suffix}" for key, name in names.items()}
    return {key: getattr(layer, name) for key, name in full.items() if hasattr(layer, name)}
