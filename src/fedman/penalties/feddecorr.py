"""FedDecorr. Shi et al., 'Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning', ICLR 2023."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedman.errors import UserError
from fedman.penalties.base import Penalty, Terms

if TYPE_CHECKING:
    from torch import Tensor, nn

EPSILON = 1e-8  # added to variances


@dataclass(frozen=True)
class FedDecorr(Penalty):
    """(1/d²)·‖corr(z) without its diagonal‖_F², where z [B, d] are the features before the last linear layer.

        m_j  = Σ_b p_b z_bj                   p_b: sample b's share in the batch's mean, 1/B without weights
        v_j  = Σ_b p_b (z_bj − m_j)²
        C_ij = Σ_b p_b (z_bi − m_i)(z_bj − m_j) / √((v_i + 1e-8)(v_j + 1e-8))

    A feature that is constant over the batch has standard deviation zero: its correlations count as zero and the
    gradient is finite, thanks to the 1e-8. Of features [B, ..., d], a sequence's for example, every position is a row,
    and a sample's share is spread evenly over its positions.

    The released code does not divide the correlations by the batch size: its term is (B−1)²/B·d/(d−1) times this one,
    so that its coefficient 0.1 with batches of 64 is ζ = 6.2 here.
    """

    title = "FedDecorr"

    def attach(self, model: nn.Module) -> Terms:
        return _Correlation(model)


class _Correlation:
    """Keeps the input of the linear layer that is called last in a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        from torch import nn

        self._features: Tensor | None = None
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not linears:
            raise UserError(f"penalty: FedDecorr needs an nn.Linear, and {type(model).__name__} has none")
        for linear in linears:
            linear.register_forward_pre_hook(self._keep)

    def _keep(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        self._features = args[0]

    def terms(self, weight: Tensor | None = None) -> Mapping[str, Tensor]:
        z, self._features = self._features, None
        if z is None:
            raise UserError("penalty: FedDecorr has no forward pass to measure; call the model before")
        if weight is not None and weight.shape != z.shape[:1]:
            raise UserError(f"weight: shape {tuple(weight.shape)} does not fit features with {z.shape[0]} samples")
        d, positions = z.shape[-1], z.shape[1:-1].numel()
        rows = (z.float() if z.itemsize == 2 else z).reshape(-1, d)  # half precision is summed in float32
        if weight is None:
            share = rows.new_full((len(rows), 1), 1 / len(rows))
        else:
            share = (weight / positions).repeat_interleave(positions).unsqueeze(1)
        centred = rows - (share * rows).sum(0)
        scaled = centred / ((share * centred.square()).sum(0) + EPSILON).sqrt()
        correlation = (share * scaled).T @ scaled
        return {"correlation": (correlation - correlation.diagonal().diag_embed()).square().sum() / d**2}
