"""Partitions: sizes, balance and heterogeneity; the fast Dirichlet against the literal procedure."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedman.data import partition
from fedman.errors import UserError


def balanced(n: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), n // classes))


def used(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts)


CIFAR100, CIFAR10, TINY = balanced(50_000, 100), balanced(50_000, 10), balanced(100_000, 200)


# --- the strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("iid", ("iid",)),
        ("dir0.3", ("dir", 0.3)),
        ("dir1", ("dir", 1.0)),
        ("dir.5", ("dir", 0.5)),
        ("dir10.", ("dir", 10.0)),
        ("path2", ("path", 2.0)),
        ("natural", ("natural",)),
        ("file:a b.json", ("file", 0.0, "a b.json")),
        ("file:x:y", ("file", 0.0, "x:y")),
        ("my_package.parts:by_writer", ("module", 0.0, "my_package.parts:by_writer")),
        ("custom-0123456789ab", ("custom", 0.0, "0123456789ab")),
    ],
)
def test_parse(spec: str, rule: tuple) -> None:
    assert partition.parse(spec) == partition.Rule(*rule)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "IID", "iid ", "iid0.3", "non-iid", "dir", "dir0", "dir0.0", "dir-1", "dir1e3", "dirnan", "dirinf"),
        *("dir0,3", "dir٣", "dir0.3\n", "dirichlet0.3", f"dir{'9' * 400}"),
        *("path", "path0", "path-1", "path1.5", "path two"),
        *("natural ", "Natural", "file:", "file", "module:", ":function", "a b:c", "a:b c", "custom-", "custom-12"),
    ],
)
def test_parse_refuses(spec: str) -> None:
    with pytest.raises(UserError, match=r"^partition: .* is not allowed; allowed are iid, dirX .* pathC") as error:
        partition.parse(spec)
    assert "\n" not in str(error.value)


# --- the paper's numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "classes", "spec", "present", "perplexity"),
    [
        (CIFAR100, 100, "dir0.3", 59, 34),
        (CIFAR100, 100, "dir0.6", 74, 49),
        (CIFAR10, 10, "dir0.3", 8.2, 4.6),
        (CIFAR10, 10, "dir0.6", 9.4, 6.1),
        (TINY, 200, "dir0.3", 116, 67),
        (TINY, 200, "dir0.6", 148, 97),
    ],
)
def test_dirichlet_of_the_paper(labels: np.ndarray, classes: int, spec: str, present: float, perplexity: float) -> None:
    start = time.process_time()
    parts = partition.split(labels, spec, 100, classes=classes)
    assert time.process_time() - start < 5
    assert {len(part) for part in parts} == {len(labels) // 100}
    assert np.array_equal(np.sort(used(parts)), np.arange(len(labels)))
    found = partition.heterogeneity(labels, parts, classes)
    assert found["classes"] == pytest.approx(present, rel=0.03)
    assert found["perplexity"] == pytest.approx(perplexity, rel=0.07)
    assert found["clients"] == 100
    assert found["smallest"] == found["largest"] == len(labels) // 100


def test_cifar100_iid_has_five_of_each_class() -> None:
    parts = partition.split(CIFAR100, "iid", 100, classes=100, iid="balanced")
    assert (partition.table(CIFAR100, parts, 100) == 5).all()
    for i in (0, 17, 99):
        expected = np.concatenate([np.flatnonzero(np.equal(CIFAR100, c))[5 * i : 5 * i + 5] for c in range(100)])
        assert np.array_equal(parts[i], np.sort(expected))


def test_cifar10_iid_is_cut_as_stored() -> None:
    parts = partition.split(CIFAR10, "iid", 100, classes=10, iid="stored", seed=5)
    for i, part in enumerate(parts):
        assert np.array_equal(part, np.arange(500 * i, 500 * i + 500))


def test_other_iid_is_permuted() -> None:
    a, b = (partition.split(TINY, "iid", 100, classes=200, seed=s) for s in (0, 1))
    assert np.array_equal(np.sort(used(a)), np.arange(100_000))
    assert {len(part) for part in a} == {1000}
    assert not np.array_equal(a[0], b[0])
    found = partition.heterogeneity(TINY, a, 200)
    assert 195 < found["classes"] < 200, "iid but not class-balanced"


@pytest.mark.parametrize(("clients", "per_client"), [(100, 2), (100, 5), (10, 1), (50, 10)])
def test_pathological_on_balanced_classes_is_exact(clients: int, per_client: int) -> None:
    parts = partition.split(CIFAR10, f"path{per_client}", clients, classes=10)
    counts = partition.table(CIFAR10, parts, 10)
    assert ((counts > 0).sum(1) == per_client).all()
    assert (counts.sum(1) == 50_000 // clients).all()
    assert np.array_equal(np.sort(used(parts)), np.arange(50_000))
    assert per_client == 10 or len({tuple(row) for row in counts > 0}) > 5, "clients differ"


def test_pathological_on_uneven_classes_keeps_the_classes() -> None:
    labels = np.repeat(np.arange(4), [500, 300, 150, 50])
    parts = partition.split(labels, "path2", 20, classes=4)
    counts = partition.table(labels, parts, 4)
    assert ((counts > 0).sum(1) == 2).all()
    assert counts.sum() == 1000
    assert counts.sum(1).max() <= 60


# --- the fast form of the Dirichlet rule -------------------------------------------------------------------


def literal_dirichlet(labels: np.ndarray, clients: int, classes: int, delta: float, seed: int) -> list[list[int]]:
    """FedDyn's procedure as published, with redraws."""
    rng = np.random.default_rng(seed)
    prior = rng.dirichlet([delta] * classes, clients).cumsum(1)
    pools = [list(np.flatnonzero(labels == c)) for c in range(classes)]
    quota = [len(labels) // clients] * clients
    parts: list[list[int]] = [[] for _ in range(clients)]
    while any(quota):
        k = rng.integers(clients)
        if not quota[k]:
            continue
        quota[k] -= 1
        while not pools[c := min(int(np.searchsorted(prior[k], rng.random(), "right")), classes - 1)]:
            pass
        parts[k].append(pools[c].pop())
    return parts


def test_fast_dirichlet_has_the_distribution_of_the_literal_one() -> None:
    """What partitions look like on average, over 400 of each: equal within 4 standard errors."""
    labels = np.repeat(np.arange(3), [8, 8, 4])

    def features(parts: list) -> list[float]:
        counts = np.stack([np.bincount(labels[part], minlength=3) for part in parts])
        return [*counts[0], *(counts**2).sum(0), (counts == 0).sum(), counts.max(), counts[0, 0] * counts[1, 0]]

    fast = np.array([features(partition.split(labels, "dir1", 4, classes=3, seed=s)) for s in range(400)])
    slow = np.array([features(literal_dirichlet(labels, 4, 3, 1.0, s)) for s in range(400)])
    error = np.sqrt((fast.var(0) + slow.var(0)) / 400)
    assert (np.abs(fast.mean(0) - slow.mean(0)) < 4 * error).all()


def test_dirichlet_takes_from_the_end_of_a_pool() -> None:
    parts = partition.split(np.zeros(10, int), "dir1", 3, classes=2)
    assert sorted(used(parts).tolist()) == list(range(1, 10))


def test_a_client_whose_mass_is_gone_draws_uniformly() -> None:
    """δ so small that π_k is one class in float: what is left must still be dealt out."""
    labels = balanced(1000, 10)
    parts = partition.split(labels, "dir0.0001", 10, classes=10)
    assert np.array_equal(np.sort(used(parts)), np.arange(1000))


def test_classes_without_samples_are_never_drawn() -> None:
    labels = balanced(100, 4) * 2
    for spec in ("dir0.3", "iid", "path2"):
        parts = partition.split(labels, spec, 5, classes=9, iid="balanced")
        assert np.array_equal(np.sort(used(parts)), np.arange(100))


# --- for all inputs ----------------------------------------------------------------------------------------


@given(
    spec=st.sampled_from(["iid", "dir0.1", "dir0.6", "dir100", "path1", "path2", "path3"]),
    counts=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    sigma=st.sampled_from([0.0, 0.3, 2.0]),
    iid=st.sampled_from(["shuffled", "stored", "balanced"]),
)
@settings(max_examples=300, deadline=None)
def test_every_partition(spec: str, counts: list[int], clients: int, seed: int, sigma: float, iid: str) -> None:
    """Each index at most once, each client served, sizes as asked; or one line that says why not."""
    classes = len(counts)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), counts))
    arguments = {"classes": classes, "seed": seed, "sigma": sigma, "iid": iid}
    try:
        parts = partition.split(labels, spec, clients, **arguments)
    except UserError:
        present, per_client = int((np.array(counts) > 0).sum()), int(spec[4:]) if spec[:4] == "path" else 0
        possible = clients * per_client <= np.minimum(counts, clients).sum() and per_client <= present
        assert len(labels) < clients or (per_client and (clients * per_client < present or not possible))
        return
    indices = used(parts)
    assert len(parts) == clients
    assert len(np.unique(indices)) == len(indices)
    assert min(len(part) for part in parts) >= 1
    assert all(part.dtype == np.int64 and np.array_equal(part, np.sort(part)) for part in parts)
    if spec.startswith("path"):
        assert ((partition.table(labels, parts, classes) > 0).sum(1) == int(spec[4:])).all()
        assert len(indices) == len(labels)
    elif sigma == 0:
        assert {len(part) for part in parts} == {len(labels) // clients}
    else:
        assert len(indices) == len(labels)
    again = partition.split(labels, spec, clients, **arguments)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_log_normal_sizes() -> None:
    """Sizes follow the log-normal; those of equal seed do not depend on the rule."""
    parts = partition.split(CIFAR10, "dir0.6", 100, classes=10, sigma=0.5, seed=3)
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == 50_000
    assert np.log(sizes).std() == pytest.approx(0.5, rel=0.2)
    assert sizes.tolist() == [len(p) for p in partition.split(CIFAR10, "iid", 100, classes=10, sigma=0.5, seed=3)]
    path = [len(p) for p in partition.split(CIFAR10, "path2", 100, classes=10, sigma=0.5, seed=3)]
    assert np.corrcoef(sizes, path)[0, 1] > 0.9


def test_the_rounding_difference_goes_to_the_first_and_nobody_is_left_empty() -> None:
    assert partition._share(10, np.array([1.0, 1, 1])).tolist() == [4, 3, 3]
    assert partition._share(5, np.array([1e-9, 1.0, 1e-9])).tolist() == [1, 3, 1]


def test_the_seed_matters_and_the_global_generator_does_not() -> None:
    np.random.seed(1)  # noqa: NPY002
    a = partition.split(CIFAR10, "dir0.3", 10, classes=10, seed=0)
    np.random.seed(2)  # noqa: NPY002
    b = partition.split(CIFAR10, "dir0.3", 10, classes=10, seed=0)
    c = partition.split(CIFAR10, "dir0.3", 10, classes=10, seed=1)
    assert np.array_equal(a[0], b[0])
    assert not np.array_equal(a[0], c[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clients": 0}, "clients: 0"),
        ({"clients": 101}, "clients: 101"),
        ({"sigma": -0.1}, "sigma: -0.1"),
        ({"sigma": float("nan")}, "sigma: nan"),
        ({"sigma": 50.0}, "sigma: 50"),
        ({"spec": "path5"}, "path5 with 10 clients is not possible for 4 classes"),
        ({"spec": "path2", "clients": 100}, "each client needs 2 different classes and a sample of each"),
        ({"spec": "path2", "clients": 1}, r"path2 with 1 clients .* \(clients >= 2\)"),
        ({"spec": "path4", "clients": 100}, "path4 with 100 clients is not possible"),
        ({"labels": np.arange(0)}, "clients: 10"),
    ],
)
def test_what_cannot_be(changes: dict, says: str) -> None:
    arguments = {"labels": balanced(100, 4), "spec": "iid", "clients": 10, "classes": 4} | changes
    with pytest.raises(UserError, match=says) as error:
        partition.split(arguments.pop("labels"), arguments.pop("spec"), arguments.pop("clients"), **arguments)
    assert "\n" not in str(error.value)


# --- description -------------------------------------------------------------------------------------------


def test_heterogeneity_by_hand() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    found = partition.heterogeneity(labels, [np.array([0, 1]), np.array([2, 3, 4, 5])], 3)
    mixed = np.exp(0.25 * np.log(4) * 2 + 0.5 * np.log(2))
    assert found == {
        "clients": 2,
        "classes": 2.0,
        "perplexity": pytest.approx((1 + mixed) / 2),
        "smallest": 2,
        "largest": 4,
    }
