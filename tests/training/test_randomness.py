"""Random choices: the paper's schedule, fresh permutations, uniform draws, independence of chunk and order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedman.execution.hashing import bits
from fedman.training.randomness import batch_counts, cohort, plan

CPU = torch.device("cpu")


def test_the_papers_schedule():
    assert cohort(0, 100, 0.1) == [14, 15, 16, 34, 43, 67, 69, 75, 82, 87, 97, 99]
    assert cohort(1, 100, 0.1) == [2, 5, 14, 26, 27, 30, 38, 50, 55, 64, 98]
    assert cohort(2, 100, 0.1) == [1, 19, 21, 23, 51, 55, 57, 67, 77, 81, 91]
    sizes = [len(cohort(t, 100, 0.1)) for t in range(500)]
    assert (sum(sizes), min(sizes), max(sizes)) == (5070, 2, 22)


def test_an_empty_draw_is_repeated_with_the_next_seed():
    empty = next(t for t in range(1000) if cohort(t, 3, 0.05, seed=0) == cohort(t + 1, 3, 0.05, seed=0))
    assert cohort(empty, 3, 0.05) == cohort(empty, 3, 0.05, seed=1) != []


def test_fixed_cohorts():
    drawn = [cohort(t, 20, 0.25, "fixed") for t in range(200)]
    assert all(len(set(c)) == 5 and c == sorted(c) for c in drawn)
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=20)
    assert counts.min() > 25
    assert counts.max() < 80
    assert cohort(0, 10, 0.01, "fixed") == cohort(0, 10, 0.1, "fixed")


def test_bits_are_uniform_and_independent():
    drawn = bits(7, torch.arange(1 << 16))
    assert drawn.min() >= 0
    assert len(drawn.unique()) == 1 << 16
    shares = torch.stack([((drawn >> i) & 1).double().mean() for i in range(63)])
    assert (shares - 0.5).abs().max() < 0.01  # five standard deviations
    other = bits(8, torch.arange(1 << 16))
    agree = torch.stack([(~((drawn ^ other) >> i) & 1).double().mean() for i in range(63)])
    assert (agree - 0.5).abs().max() < 0.01


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    epochs=st.integers(1, 3),
    batch=st.integers(1, 12),
    t=st.integers(0, 1000),
    seed=st.integers(0, 2**31 - 1),
)
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation_cut_into_batches(sizes, epochs, batch, t, seed):
    drawn = plan(seed, t, range(len(sizes)), sizes, epochs, batch, CPU, pad=4)
    for s, n in enumerate(sizes):
        counts = batch_counts(n, epochs, batch)
        assert drawn.steps[s] == len(counts) == epochs * -(-n // batch)
        seen = torch.cat([drawn.sample[s, j, :c] for j, c in enumerate(counts)]).view(epochs, n)
        assert torch.equal(seen.sort(-1).values, torch.arange(n).expand(epochs, n))
        for j in range(drawn.sample.shape[1]):
            c = drawn.counts[s][j]
            if drawn.weight is None:
                assert c == drawn.sample.shape[2]
            else:
                want = torch.tensor([1 / c if i < c else 0.0 for i in range(drawn.sample.shape[2])]).double()
                torch.testing.assert_close(drawn.weight[s, j], want)
    alone = plan(seed, t, [len(sizes) - 1], sizes[-1:], epochs, batch, CPU, pad=4)
    for j, c in enumerate(alone.counts[0]):
        assert torch.equal(alone.sample[0, j, :c], drawn.sample[-1, j, :c])
        assert torch.equal(alone.window[:, 0, j, :c], drawn.window[:, -1, j, :c])


def test_epochs_rounds_clients_and_seeds_differ():
    first = plan(0, 0, [3], [50], 2, 50, CPU).sample
    assert not torch.equal(first[0, 0], first[0, 1])
    for other in (
        plan(0, 1, [3], [50], 2, 50, CPU),
        plan(0, 0, [4], [50], 2, 50, CPU),
        plan(1, 0, [3], [50], 2, 50, CPU),
    ):
        assert not torch.equal(first, other.sample)


def test_augmentation_draws():
    """Mirror with probability ½; crop with ½, offsets uniform on 0..8, the centre (4) otherwise; all independent."""
    window = plan(0, 0, range(100), [500] * 100, 2, 50, CPU, pad=4).window.flatten(1).double()
    assert window[0].mean() == pytest.approx(0.5, abs=0.01)
    for offsets in window[1:]:
        shares = torch.bincount(offsets.long(), minlength=9) / offsets.numel()
        want = torch.tensor([1 / 18] * 9) + torch.tensor([0, 0, 0, 0, 0.5, 0, 0, 0, 0])
        assert (shares - want).abs().max() < 0.005
    assert (torch.corrcoef(window) - torch.eye(3)).abs().max() < 0.02
    assert plan(0, 0, [0], [9], 1, 3, CPU).window.unique().tolist() == [0]


class Launches(TorchDispatchMode):
    """Counts operations on the device "meta", which stands for a GPU: views cost nothing, the rest is a launch each."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        self.count += isinstance(first, torch.Tensor) and first.is_meta and not operation.is_view
        return out


def test_a_draw_leaves_room_in_a_gpus_queue():
    """About 1,000 launches fit into it; a host that finds it full waits. A dozen stacked runs draw at a time."""
    draw = (0, 3, range(10), [500] * 10, 5, 50, torch.device("meta"))
    plan(*draw, pad=4, longest=500)
    with Launches() as launches:
        plan(*draw, pad=4, longest=500)
    assert launches.count <= 50
