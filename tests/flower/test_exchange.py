"""Which vectors each algorithm sends."""

from fedman.algorithms import ALGORITHMS
from fedman.flower.exchange import exchange


def test_only_what_the_other_side_cannot_compute_is_sent():
    """θ (and g or c) down, the client's model up."""
    names = {name: exchange(kind()) for name, kind in ALGORITHMS.items()}
    more = {name: e.down for name, e in names.items() if e.down != ("w",)}
    assert more == {"feddc": ("w", "g"), "scaffold": ("w", "c")}
    assert {e.up for e in names.values()} == {("w",)}
