"""Terms added to a client's loss. MAN, the mean squared activation of every layer, is the one of the paper."""

from fedman.penalties.man import ActivationNorm

__all__ = ["ActivationNorm"]
