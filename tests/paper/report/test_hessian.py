"""Tables and figures of flatness."""

import json

from fedman.paper.report import hessian, spectra
from tests.paper.report.report_rows import eigenvalues, estimate, flatness, row


def test_hessian_tables_beside_the_papers():
    records = [flatness(), flatness(zeta=0.15, top=44.0, trace=4400.0), flatness("feddc", top=35.0, trace=3600.0),
               flatness(seed=1, top=53.0, trace=8900.0)]  # fmt: skip
    (table,) = hessian.tables(hessian.merge(records))
    assert table.rows == [
        ["FedAvg", "52.00 ± 1.41", "51.49", "1.01", "8800 ± 141", "8744", "1.01", "2"],
        ["FedAvg+MAN", "44.00", "43.80", "1.00", "4400", "4397", "1.00", "1"],
        ["FedDC", "35.00", "35.13*", "–", "3600", "3578*", "–", "1"],
    ]
    assert "copy" in table.note
    assert [(a.seed, b.trace) for a, b in hessian.plain_and_penalised(hessian.merge(records))] == [(0, 4400.0)]


def test_records_of_one_run_are_one_run():
    """λ_max and trace on most samples; figures on the number of samples that most runs have."""

    def on(count, values, algorithm="fedavg"):
        record = flatness(algorithm)
        top, trace = eigenvalues(values, samples=count), estimate(values[0], samples=count)
        record["models"]["all"] = {"top": top, "trace": trace}
        return record

    records = [on(10, [5.0, 4.0]), on(50, [6.0, 5.0]), on(50, [6.0]), on(10, [3.0, 2.0], "fedsam")]
    measured = hessian.merge(records)
    (table,) = hessian.tables(measured)
    assert [(r[0], r[1], r[-1]) for r in table.rows] == [("FedAvg", "6.00", "1"), ("FedSAM", "3.00", "1")]
    assert "on 10 and 50 training samples" in hessian.basis(measured)
    (picture,) = spectra.spectrum(*spectra.by_partition(measured))
    assert [line["y"] for line in json.loads(picture.hover)["lines"]] == [[5.0, 4.0], [3.0, 2.0]]
    rows = hessian.all_measurements(records).rows
    assert [r[6:] for r in rows][:2] == [("trace", "5", "1", "10"), ("trace", "6", "1", "50")]


def test_another_setting_is_a_row_of_its_own():
    """A run that differs from the paper's setting is not taken for one that does not, in tables or figures."""
    plain, stale = flatness("fedspeed", top=13.0), flatness("fedspeed", top=17.0)
    for record, keys in ((plain, {}), (stale, {"stale_ascent": True})):
        record["run"]["config"] = row(50.0, algorithm="fedspeed", zeta=0, **keys)["config"]
    records = [stale, plain, flatness("fedspeed", zeta=0.15, top=9.0)]
    measured = hessian.merge(records)
    (table,) = hessian.tables(measured)
    assert [r[:2] for r in table.rows] == [
        ["FedSpeed", "13.00"],
        ["FedSpeed+MAN", "9.00"],
        ["FedSpeed, stale_ascent=true", "17.00"],
    ]
    assert [(a.top, b.top) for a, b in hessian.plain_and_penalised(measured)] == [(13.0, 9.0)]
    assert {r[3] for r in hessian.all_measurements(records).rows} == {"", "stale_ascent=true"}
    (picture,) = spectra.spectrum(*spectra.by_partition(measured))
    assert [line["y"][0] for line in json.loads(picture.hover)["lines"]] == [13.0, 9.0]


def test_of_many_models_the_landscapes_of_fedavg_are_drawn():
    two, many = (
        hessian.merge([flatness(a, z) for a in names for z in (0.0, 0.15)])
        for names in (("fedavg", "fedsam"), ("fedavg", "fedsam", "feddyn", "feddc"))
    )
    assert len(spectra.landscapes(two)) == 2 * 4
    drawn = [picture.name for picture in spectra.landscapes(many)]
    assert drawn == [f"cifar100-dir0.3-fedavg-{m}-{kind}" for kind in ("surface", "map") for m in ("plain", "man")]


def test_layers_and_clients_of_the_hessian():
    measured = hessian.merge([flatness()])
    assert hessian.layers(measured).rows == [["dir0.3", "FedAvg", "0", "fc", "3.000", "40.00", "2.000"]]
    assert hessian.clients(measured).rows == [["dir0.3", "FedAvg", "0", "4.000", "8.000", "6.000", "10.00"]]


def test_seeds_of_a_setting_are_one_line():
    records = [flatness(seed=seed) for seed in (0, 1, 2)]
    for record, top in zip(records, (3.0, 5.0, None), strict=True):
        record["models"]["all"]["layers"]["blocks"]["fc"]["top"] = top
    measured = hessian.merge(records)
    assert hessian.layers(measured).rows == [
        ["dir0.3", "FedAvg", "0, 1, 2", "fc", "4.000 ± 1.414", "40.00 ± 0.00", "2.000 ± 0.000"]
    ]  # fmt: skip
    assert hessian.clients(measured).rows[0][2:4] == ["0, 1, 2", "4.000 ± 0.000"]
    assert hessian.losses(measured).rows[0][2:4] == ["0, 1, 2", "1.000 ± 0.000"]


def test_seeds_are_those_that_have_the_value():
    """Not the number of files; what has no value has no row."""
    records = [flatness(seed=0), flatness(seed=1), flatness(seed=2), flatness(zeta=0.15), flatness("fedsam")]
    for record, gone in zip(records[1:4], (("trace",), ("top", "trace"), ("top", "trace")), strict=True):
        for name in gone:
            del record["models"]["all"][name]
    (table,) = hessian.tables(hessian.merge(records))
    assert [(r[0], r[-1]) for r in table.rows] == [("FedAvg", "2 / 1"), ("FedSAM", "1")]
    assert table.note == "Seeds: those of λ_max / of the trace."


def test_the_theory_is_a_table():
    assert hessian.theory([]).rows == []
    table = hessian.theory([{"header": ["", "holds"], "rows": [["Lemma 2", "no"]]}])
    assert (table.header, table.rows, table.words) == (["", "holds"], [["Lemma 2", "no"]], 2)
