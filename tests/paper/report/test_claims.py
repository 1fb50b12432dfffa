"""The paper's sentences on flatness against measurements made up so that each holds or fails."""

import pytest
import torch

from fedman.flatness import density
from fedman.paper.report import claims, hessian, narrative
from tests.flatness.flat_cases import Matrix
from tests.paper.report.report_rows import eigenvalues, estimate, flatness

METHODS = {"FedAvg": ("fedavg", 0.0), "FedAvg+MAN": ("fedavg", 0.15), "FedSAM": ("fedsam", 0.0)}


def measured(tops, traces, spectra=(), negative=0.0):
    """FedAvg, FedAvg+MAN and FedSAM with these λ_max and traces; of the last two the spectra."""
    records = []
    for (algorithm, zeta), top, trace in zip(METHODS.values(), tops, traces, strict=True):
        record = flatness(algorithm, zeta, top, trace)
        density = {"nodes": [[-3.0, -1.0, 2.0]] * 2, "weights": [[negative, 0.0, 1 - negative]] * 2}
        record["models"]["all"] = {
            "loss": {"value": 1.25, "gradient_norm": 0.5},
            "top": eigenvalues([top]),
            "trace": estimate(trace),
            "density": density,
        }
        records.append(record)
    for record, values in zip(records[1:], spectra, strict=False):
        record["models"]["all"]["top"] = eigenvalues(values)
    return hessian.merge(records)


def test_all_hold():
    sam = [70.0 - i for i in range(60)]
    man = [80.0 - 1.5 * i for i in range(60)]  # below from rank 22 on: 80 − 1.5·21 = 48.5 < 49
    found = claims.claims(measured((100.0, 80.0, 70.0), (900.0, 400.0, 500.0), (man, sam)))
    assert [c.holds for _, c in found] == [True] * 5 + [None], "a lower bound does not confirm the last"
    assert {where for where, _ in found} == {"CIFAR-100, Dirichlet 0.3"}
    here = {c.text: (c.printed, c.here) for _, c in found}
    assert here["MAN lowers λ_max"] == ("−15 %", "−20 %, lower for 1 of 1 algorithms")
    assert here["MAN lowers the trace"] == ("−50 %", "−56 %, lower for 1 of 1 algorithms")
    assert here["λ_max of FedSAM is below that of FedAvg+MAN"] == ("32.46 < 43.80", "70.00 < 80.00")
    assert here["the trace of FedAvg+MAN is below that of FedSAM"] == ("4397 < 4909", "400 < 500")
    rank = here["FedAvg+MAN's eigenvalues are below FedSAM's from some rank on"]
    assert rank == ("“after about 50”", "smaller from rank 22 to 60, seed 0")
    told = narrative.flatness(measured((100.0, 80.0, 70.0), (900.0, 400.0, 500.0), (man, sam)))
    assert told[-2] == (
        "Of the paper's 6 claims on flatness 5 hold; open: negative eigenvalues are negligible (CIFAR-100, Dirichlet "
        "0.3: their sum as a share of the positive ones': at least 0 % (3 models, 2 starts; lowest −3.00 plain, −3.00 "
        "with MAN); the quadrature does not resolve more)."
    )
    assert told[-1] == (
        "FedAvg+MAN's eigenvalues against FedSAM's (CIFAR-100, Dirichlet 0.3): smaller from rank 22 to 60, seed 0; in "
        "the paper “after about 50”."
    )
    assert told[2] == (
        "Sizes do not agree: the largest eigenvalue is 1.83 to 2.16 of the paper's (3 models), "
        "the trace is 0.09 to 0.10 of the paper's (3 models)."
    )


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"tops": (100.0, 110.0, 70.0)}, "MAN lowers λ_max"),
        ({"traces": (900.0, 950.0, 990.0)}, "MAN lowers the trace"),
        ({"tops": (100.0, 80.0, 81.0)}, "λ_max of FedSAM is below that of FedAvg+MAN"),
        ({"traces": (900.0, 500.0, 400.0)}, "the trace of FedAvg+MAN is below that of FedSAM"),
        ({"spectra": ([9.0] * 60, [8.5] * 60)}, "FedAvg+MAN's eigenvalues are below FedSAM's from some rank on"),
        ({"negative": 0.1}, "negative eigenvalues are negligible"),
    ],
)
def test_each_can_fail(change, failed):
    made = measured(**({"tops": (100.0, 80.0, 70.0), "traces": (900.0, 400.0, 500.0)} | change))
    wrong = [c.text for _, c in claims.claims(made) if c.holds is False]
    assert wrong == [failed]
    assert any(f"not: {failed} (CIFAR-100, Dirichlet 0.3: " in text for text in narrative.flatness(made))


def test_a_claim_counts_once_and_holds_where_it_holds_everywhere():
    """Two partitions; FedSAM's λ_max is above FedAvg+MAN's in one of them."""
    good, bad = (
        [
            flatness(a, z, top, trace, partition=partition)
            for (a, z), top, trace in zip(METHODS.values(), tops, (9, 4, 5), strict=True)
        ]
        for partition, tops in (("dir0.3", (100.0, 80.0, 70.0)), ("dir0.6", (100.0, 80.0, 81.0)))
    )
    (text,) = claims.sentences(hessian.merge([*good, *bad]))
    assert text.startswith(
        "Of the paper's 6 claims on flatness 4 hold; not: λ_max of FedSAM is below that of FedAvg+MAN ("
    )
    assert "(CIFAR-100, Dirichlet 0.6: 81.00 ≥ 80.00); open: negative" in text


def test_ranks_below_before_the_last_crossing_are_named():
    sam = [60.0 - i for i in range(60)]
    man = [v + (1 if i in (2, 6, 7) else -1) for i, v in enumerate(sam)]
    found = claims.claims(measured((100.0, 80.0, 70.0), (900.0, 400.0, 500.0), (man, sam)))
    (claim,) = [c for _, c in found if "rank" in c.text]
    assert claim.here == "smaller from rank 9 to 60 (and at 1 to 2, 4 to 6), seed 0"


def test_eigenvalues_that_are_never_smaller():
    found = claims.claims(measured((100.0, 80.0, 70.0), (900.0, 400.0, 500.0), ([3.0] * 60, [2.0] * 60)))
    (claim,) = [c for _, c in found if "rank" in c.text]
    assert (claim.here, claim.holds) == ("not smaller at rank 60, seed 0", False)


def test_the_seeds_of_a_partition_are_one_claim():
    """Below from rank 1 on with two seeds, not below with the third."""
    records = []
    for seed, man in enumerate(([1.0] * 60, [9.0] * 60, [1.0] * 60)):
        for (algorithm, zeta), values in zip((("fedavg", 0.15), ("fedsam", 0.0)), (man, [2.0] * 60), strict=True):
            record = flatness(algorithm, zeta, seed=seed)
            record["models"]["all"] = {"top": eigenvalues(values, samples=50)}
            records.append(record)
    (claim,) = [c for _, c in claims.claims(hessian.merge(records)) if "rank" in c.text]
    assert claim.here == "smaller from rank 1 to 60, seeds 0, 2; not smaller at rank 60, seed 1, 50 images"
    assert claim.holds is False
    (claim,) = [c for _, c in claims.claims(hessian.merge(records[:2] + records[4:])) if "rank" in c.text]
    assert claim.holds is True


def test_the_clients_lambda_max():
    records = [flatness(seed=seed) for seed in (0, 1)]
    records[1]["models"]["all"]["clients"]["top"] = 8.1
    for found, here, holds in (
        (records[:1], "0.50 of that mean (1 model)", True), (records, "0.50 to 1.01 of that mean (2 models)", False)
    ):  # fmt: skip
        (claim,) = [c for _, c in claims.claims(hessian.merge(found)) if "clients" in c.text]
        assert (claim.here, claim.holds) == (here, holds)


def test_the_negative_share_by_hand():
    """A tenth of the weight at −3 counts at −1: 0.1 below. The trace is −0.3 + 1.8: 1.6 above, and 0.1/1.6 is 6.2 %."""
    (claim,) = [
        c for _, c in claims.claims(measured((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), negative=0.1)) if "negative" in c.text
    ]
    assert claim.here == (
        "their sum as a share of the positive ones': at least 6.2 % (3 models, 2 starts; lowest −3.00 plain, −3.00 "
        "with MAN); the quadrature does not resolve more"
    )
    assert claim.holds is False


def test_densities_on_more_images_are_told_apart():
    records = [flatness(), flatness()]
    for record, count in zip(records, (50_000, 10_000), strict=True):
        record["models"]["all"]["density"] = {"nodes": [[-1.0, 2.0]], "weights": [[0.5, 0.5]], "samples": count}
    (here,) = [c.here for _, c in claims.claims(hessian.merge(records)) if "negative" in c.text]
    first, second = (f"at least 0 % (FedAvg, {n} images, 1 start; lowest −1.00 plain)" for n in (10_000, 50_000))
    assert f": {first}, {second}; the quad" in here


@pytest.mark.parametrize(("steps", "reached"), [(5, 0.0), (10, 0.15), (20, 0.4), (40, 0.6), (80, 0.8), (200, 0.9)])
def test_the_negative_share_is_a_lower_bound(steps, reached):
    """Of a diagonal matrix, most of whose entries are near zero: every start has the measure of its entries."""
    values = torch.linspace(-1, 2, 200, dtype=torch.float64) ** 3
    exact = float(-values[values < 0].sum() / values[values > 0].sum())
    bound = claims.negative_share(density(Matrix(torch.diag(values)), starts=2, steps=steps))
    assert reached * exact <= bound <= exact


def test_the_negative_share_of_other_signs():
    assert claims.negative_share(density(Matrix(torch.eye(5).double()), starts=1)) == 0
    assert claims.negative_share(density(Matrix(torch.zeros(5, 5).double()), starts=1)) == 0
    assert claims.negative_share(density(Matrix(-torch.arange(1.0, 6).diag().double()), starts=1)) == 1


def test_where_the_models_stand():
    table = hessian.losses(measured((100.0, 80.0, 70.0), (900.0, 400.0, 500.0)))
    assert table.rows[1] == ["dir0.3", "FedAvg+MAN", "0", "1.250", "0.50", "80.00", "400"]
