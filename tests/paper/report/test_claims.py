"""The paper's sentences on flatness against measurements made up so that each holds or fails."""

import pytest

from fedman.paper.report import claims, hessian, narrative
from tests.paper.report.report_rows import eigenvalues, estimate, flatness

METHODS = {"FedAvg": ("fedavg", 0.0), "FedAvg+MAN": ("fedavg", 0.15), "FedSAM": ("fedsam", 0.0)}


def measured(tops, traces, spectra=(), negative=0.0):
    """FedAvg, FedAvg+MAN and FedSAM with these λ_max and traces; of the last two the spectra."""
    records = []
    for (algorithm, zeta), top, trace in zip(METHODS.values(), tops, traces, strict=True):
        record = flatness(algorithm, zeta, top, trace)
        density = {"nodes": [[-1.0, 0.01, 2.0]] * 2, "weights": [[negative, 0.5, 0.5 - negative]] * 2}
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
    assert [c.holds for _, c in found] == [True] * 6
    assert {where for where, _ in found} == {"CIFAR-100, Dirichlet 0.3"}
    here = {c.text: (c.printed, c.here) for _, c in found}
    assert here["MAN lowers λ_max"] == ("−15 %", "−20 %, lower for 1 of 1 algorithms")
    assert here["MAN lowers the trace"] == ("−50 %", "−56 %, lower for 1 of 1 algorithms")
    assert here["λ_max of FedSAM is below that of FedAvg+MAN"] == ("32.46 < 43.80", "70.00 < 80.00")
    assert here["the trace of FedAvg+MAN is below that of FedSAM"] == ("4397 < 4909", "400 < 500")
    rank = here["FedAvg+MAN's eigenvalues are below FedSAM's from some rank on"]
    assert rank == ("“after about 50”", "smaller from rank 22 to 60, seed 0")
    told = narrative.flatness(measured((100.0, 80.0, 70.0), (900.0, 400.0, 500.0), (man, sam)))
    assert told[-1] == "Of the paper's claims on flatness 6 of 6 hold."
    assert told[-2] == (
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
    wrong = [c.text for _, c in claims.claims(made) if not c.holds]
    assert wrong == [failed]
    assert f"not: {failed} (CIFAR-100, Dirichlet 0.3: " in narrative.flatness(made)[-1]


def test_the_negative_share_by_hand():
    """0.1·1 below and 0.4·2 above: an eighth."""
    (claim,) = [
        c for _, c in claims.claims(measured((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), negative=0.1)) if "negative" in c.text
    ]
    assert claim.here == (
        "below −0.02 lies 12 % of the sum above 0.02; the lowest is 50 % of λ_max in size (3 models, 2 starts)"
    )


def test_where_the_models_stand():
    table = claims.losses(measured((100.0, 80.0, 70.0), (900.0, 400.0, 500.0)))
    assert table.rows[1] == ["dir0.3", "FedAvg+MAN", "0", "1.250", "0.50", "80.00", "400"]
