"""Screening: every hostile reply is refused by name and reason, and no honest one is."""

from __future__ import annotations

import contextlib
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.lib import format as npy_format

from fedman.flower import screen as screening
from fedman.flower.messages import UNREADABLE, Order
from fedman.flower.screen import Expected, Refused, decode, distance, outliers, screen

P = 6
METADATA = Metadata(
    run_id=1, message_id="", src_node_id=7, dst_node_id=1, reply_to_message_id="order", group_id="", created_at=0.0,
    ttl=1.0, message_type="train",
)  # fmt: skip
RUN = "0123456789abcdef" * 2
ORIGIN = np.linspace(-1, 1, P, dtype=np.float32)
EARLIER = np.ones(P, np.float32)
ORDER = Order(RUN, 3, 1, relative_size=1.0, accepted=2, settings="{}", samples="{}")
EXPECTED = Expected(ORDER, arrays=("w", "v"), figures=("loss", "penalty.relu"), theta=ORIGIN, bound=10.0, norm=10.0)


def reply(w: object = None, /, **changed: object) -> Message:
    """An honest reply, but for what is changed: a record by name, None to leave it out."""
    w = ORIGIN + 1 if w is None else w
    records = {
        "reply": ConfigRecord({"run": RUN, "round": 3, "client": 1}),
        "upload": ArrayRecord({"w": w if isinstance(w, Array) else Array(w), "v": Array(EARLIER)}),
        "figures": MetricRecord({"loss": 0.5, "penalty.relu": 2.0}),
        **changed,
    }
    content = RecordDict({name: record for name, record in records.items() if record is not None})
    return make_message(METADATA, content=content)


def w_bytes(data: bytes, **said: object) -> Array:
    return Array(**{"dtype": "float32", "shape": (P,), "stype": "numpy.ndarray", "data": data, **said})


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def with_figures(**figures: object) -> MetricRecord:
    return MetricRecord({"loss": 0.5, "penalty.relu": 2.0, **figures})


def tagged(**fields: object) -> ConfigRecord:
    return ConfigRecord({"run": RUN, "round": 3, "client": 1, **fields})


def spoilt(value: float, dtype: type = np.float32) -> np.ndarray:
    w = (ORIGIN + 1).astype(dtype)
    w[2] = value
    return w


GOOD = npy(ORIGIN)
HOSTILE = {
    "NaN": (reply(spoilt(math.nan)), "w: 1 of 6 numbers are not finite"),
    "Inf": (reply(spoilt(-math.inf)), "w: 1 of 6 numbers are not finite"),
    "huge norm": (reply(spoilt(1e30)), r"w: lies 1e\+30 from where it started; 10 is the most"),
    "wrong shape": (reply(np.zeros(P + 1, np.float32)), r"w: is float32 \(7,\)"),
    "a shape that broadcasts": (reply(np.zeros(1, np.float32)), r"w: is float32 \(1,\)"),
    "two axes": (reply(np.zeros((1, P), np.float32)), r"w: is float32 \(1, 6\)"),
    "wrong dtype": (reply(np.zeros(P)), r"w: is float64 \(6,\)"),
    "whole numbers": (reply(np.zeros(P, np.int32)), r"w: is int32"),
    "other byte order": (reply(w_bytes(npy(ORIGIN.astype(">f4")))), "says float32"),
    "missing array": (reply(upload=ArrayRecord({"v": Array(EARLIER)})), "upload: has 'v'"),
    "extra array": (
        reply(upload=ArrayRecord({n: Array(ORIGIN) for n in ("w", "v", "x")})),
        "upload: has 'v, w, x'; wanted are 'v, w'",
    ),
    "claimed weight 1e30": (reply(figures=with_figures(**{"num-examples": 1e30})), "figures: has .*num-examples"),
    "claimed weight -5": (reply(figures=with_figures(**{"num-examples": -5})), "figures: has .*num-examples"),
    "claimed weight 0": (reply(figures=with_figures(**{"num-examples": 0})), "figures: has .*num-examples"),
    "garbage bytes": (reply(w_bytes(b"\x00garbage" * 5)), r"w: its bytes are not an array"),
    "no bytes": (reply(w_bytes(b"")), "w: its bytes are not an array"),
    "bytes cut short": (reply(w_bytes(GOOD[:-3])), "w: has 21 bytes of numbers, 24 are wanted"),
    "bytes after the end": (reply(w_bytes(GOOD + b"x")), "w: has 25 bytes of numbers"),
    "other shape in the bytes": (reply(w_bytes(npy(np.zeros(99, np.float32)))), r"but its bytes hold float32 \(99,\)"),
    "pickled objects": (reply(w_bytes(npy(np.array([print] * P, object)))), "but its bytes hold object"),
    "unknown serialisation": (reply(w_bytes(GOOD, stype="pickle")), r"w: is float32 \(6,\) \(pickle\)"),
    "replay of an old round": (reply(reply=tagged(round=2)), r"reply: is not .*\(round 2 for 3\)"),
    "another run's": (reply(reply=tagged(run="f" * 32)), "reply: is not a reply to this round's order"),
    "another client's": (reply(reply=tagged(client=2)), "client 2 for 1"),
    "another round's and client's": (reply(reply=tagged(round=2, client=2)), r"\(round 2 for 3, client 2 for 1\)$"),
    "a tag of another type": (reply(reply=tagged(client=True)), "reply: is not a reply to this round's order"),
    "a tag with more": (reply(reply=tagged(more=1)), "reply: is not a reply to this round's order"),
    "no tag": (reply(reply=None), "reply: has 'figures, upload'"),
    "empty reply": (reply(reply=None, upload=None, figures=None), "reply: has nothing; wanted are"),
    "extra record": (reply(extra=ConfigRecord()), "reply: has 'extra, figures, reply, upload'"),
    "an upload of a wrong kind": (reply(upload=ConfigRecord()), "upload: is not a record of arrays"),
    "figures of a wrong kind": (reply(figures=ConfigRecord()), "figures: is not a record of figures"),
    "loss NaN": (reply(figures=with_figures(loss=math.nan)), "loss: nan is not a finite"),
    "loss whose sum overflows": (reply(figures=with_figures(loss=1.7e308)), "loss: 1.7e\\+308 is not a finite"),
    "loss a list": (reply(figures=with_figures(loss=[1.0, 2.0])), r"loss: \[1.0, 2.0\] is not a finite"),
    "loss that spoils every mean": (reply(figures=with_figures(loss=3e38)), r"loss: 3e\+38 is not .* within ±1e\+12"),
    "control characters in a dtype": (reply(w_bytes(GOOD, dtype="\x1b[2Jfloat32")), r"w: is �\[2Jfloat32 \(6,\)"),
}  # fmt: skip


def test_an_honest_reply_is_read_bit_for_bit():
    found = screen(reply(), EXPECTED)
    assert list(found.arrays) == ["w", "v"]
    assert found.arrays["w"].tobytes() == (ORIGIN + 1).tobytes()
    assert found.arrays["w"].dtype == np.float32
    assert found.figures == {"loss": 0.5, "penalty.relu": 2.0}
    assert found.moved == pytest.approx(P**0.5)
    assert found.shifted == 0.0


def test_without_a_bound_no_distance_is_too_large():
    first = replace(EXPECTED, arrays=("w",), bound=math.inf)
    upload = ArrayRecord({"w": Array(ORIGIN * 1e30)})
    found = screen(reply(upload=upload, figures=with_figures(loss=1e12)), first)
    assert found.moved == pytest.approx(1e30 * distance(ORIGIN, 0))
    assert found.figures["loss"] == 1e12
    upload = ArrayRecord({"w": Array(ORIGIN), "v": Array(np.zeros(0, np.float32))})
    with pytest.raises(Refused, match="upload: has"):
        screen(reply(upload=upload), first)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_reply_is_refused_with_its_reason_on_one_line(kind):
    message, reason = HOSTILE[kind]
    with pytest.raises(Refused, match=reason) as refused:
        screen(message, EXPECTED)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_clients_own_reason_is_passed_on_in_one_short_line():
    failed = make_message(METADATA, error=Error(100, "\x1b[31mout of\nmemory\u202e\ud800 " + "." * 1000))
    with pytest.raises(Refused, match=r"the client says: �\[31mout of memory�� \.\.\.") as refused:
        screen(failed, EXPECTED)
    assert len(str(refused.value)) < 300


def test_an_error_of_flowers_own_is_not_the_clients():
    failed = make_message(METADATA, error=Error(3, "Error: Message Unavailable"))
    with pytest.raises(Refused, match="Flower says: Error: Message Unavailable"):
        screen(failed, EXPECTED)


def test_a_reply_that_could_not_be_unpacked_is_refused():
    failed = make_message(METADATA, error=Error(UNREADABLE, "its reply cannot be read (ValueError)"))
    with pytest.raises(Refused, match=r"^its reply cannot be read \(ValueError\)"):
        screen(failed, EXPECTED)


def test_names_that_a_stranger_chose_do_not_fill_the_log():
    names = {f"name\n{i}": Array(ORIGIN) for i in range(1000)}
    with pytest.raises(Refused) as refused:
        screen(reply(upload=ArrayRecord(names)), EXPECTED)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_the_bound_is_the_last_distance_that_passes():
    w = ORIGIN.copy()
    w[0] += 4.0
    far = distance(w, ORIGIN)
    assert far == 4.0
    for bound, good in ((4.0, True), (np.nextafter(4.0, 0), False), (math.inf, True)):
        expected = replace(EXPECTED, bound=bound)
        if good:
            screen(reply(w), expected)
        else:
            with pytest.raises(Refused, match="w: lies 4 from"):
                screen(reply(w), expected)


def test_other_arrays_have_a_bound_of_their_own():
    """‖m‖ = 3, whatever the bound on the model's distance."""
    m = np.eye(P, dtype=np.float32)[0] * 3
    answer = reply(upload=ArrayRecord({"w": Array(ORIGIN), "m": Array(m)}))
    expected = replace(EXPECTED, arrays=("w", "m"), bound=1.0)
    assert np.array_equal(screen(answer, replace(expected, norm=3.0)).arrays["m"], m)
    for norm in (np.nextafter(3.0, 0), 0.0):
        with pytest.raises(Refused, match=r"m: lies 3 from where it started; (3|0) is the most it can be"):
            screen(answer, replace(expected, norm=norm))


def test_a_huge_claim_allocates_nothing():
    out = io.BytesIO()
    npy_format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": (10**15,)})
    claim = w_bytes(out.getvalue() + b"1234", shape=(10**15,))
    with pytest.raises(Refused, match="w: has 4 bytes of numbers"):
        decode("w", claim, (10**15,), "float32")


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_no_bytes_do_anything_but_decode_or_be_refused(data):
    for whole in (data, GOOD[:10] + data, GOOD[: len(data)] + data, b"\x93NUMPY\x01\x00" + data):
        with contextlib.suppress(Refused):
            assert decode("w", w_bytes(whole), (P,), "float32").shape == (P,)


@given(arrays(np.float64, (2, 3), elements=st.floats(-1e300, 1e300)), st.sampled_from("CF"))
@settings(max_examples=50, deadline=None)
def test_decode_undoes_flowers_encoding(numbers, order):
    array = np.asarray(numbers, order=order)
    assert (decode("x", Array(array), (2, 3), "float64") == numbers).all()


def test_the_odd_one_out_is_named():
    found = outliers({"a": 1.0, "b": 1.2, "c": 25.0, "d": 0.9}, factor=20)
    assert list(found) == ["c"]
    assert found["c"] == "w: lies 25 from where it started, 25 times the median"


@pytest.mark.parametrize("distances", [[], [1e30], [1.0, 1e30], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 20.0]])
def test_nobody_is_odd_without_a_majority_or_within_the_factor(distances):
    assert outliers(dict(enumerate(distances)), factor=20) == {}


def test_twenty_times_the_median_is_the_most_unless_said():
    assert list(outliers({1: 1.0, 2: 1.0, 3: 20.0, 4: 20.5})) == [4]


def test_an_infinite_factor_switches_it_off():
    assert outliers({1: 1.0, 2: 1.0, 3: 1e300}, factor=math.inf) == {}


@given(
    honest=st.lists(st.floats(1.0, 10.0), min_size=2, max_size=8),
    liars=st.lists(st.floats(0, 1e300), max_size=7),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_a_minority_of_liars_can_neither_pass_nor_have_others_refused(honest, liars, order):
    liars = liars[: len(honest) - 1]
    rows = [*((("honest", i), d) for i, d in enumerate(honest)), *((("liar", i), d) for i, d in enumerate(liars))]
    order.shuffle(rows)
    found = outliers(dict(rows), factor=20)
    assert {who for who, _ in rows if who[0] == "honest"}.isdisjoint(found)
    if len(rows) >= 3:
        assert {who for who, far in rows if far > 200} <= set(found)


def test_what_a_reply_holds_in_bytes():
    assert EXPECTED.sizes == [24, 24]
    assert replace(EXPECTED, buffers=np.zeros(2, np.float32)).sizes == [24, 24, 8]


def test_the_bound_of_buffers_is_the_last_distance_that_passes(monkeypatch):
    expected = replace(EXPECTED, buffers=np.zeros(2, np.float32))
    upload = {"w": ORIGIN, "v": EARLIER, "model.buffers": np.float32([3, 4])}
    answer = reply(upload=ArrayRecord({name: Array(v) for name, v in upload.items()}))
    monkeypatch.setattr(screening, "LARGEST_SHIFT", 5.0)
    assert screen(answer, expected).shifted == 5.0
    monkeypatch.setattr(screening, "LARGEST_SHIFT", np.nextafter(5.0, 0))
    with pytest.raises(Refused, match=r"^model.buffers: lies 5 from where it started; 5 is the most it can be"):
        screen(answer, expected)


def test_buffers_are_screened_too():
    """By shape and numbers; their distance is for `outliers`. What a client keeps of its model may lie anywhere."""
    sent = np.zeros(2, np.float32)
    own = np.arange(P) == 2
    expected = replace(EXPECTED, buffers=sent, own=own)

    def with_buffers(values: list[float]) -> Message:
        upload = {"w": spoilt(1e6), "v": EARLIER, "model.buffers": np.array(values, np.float32)}
        return reply(upload=ArrayRecord({name: Array(v) for name, v in upload.items()}))

    good = screen(with_buffers([3.0, 4.0]), expected)
    assert good.shifted == 5.0
    assert good.moved == pytest.approx(math.sqrt(P - 1))
    with pytest.raises(Refused, match=r"^w: lies 1e\+06 from where it started"):
        screen(with_buffers([3.0, 4.0]), replace(expected, own=None))
    with pytest.raises(Refused, match=r"^model.buffers: 1 of 2 numbers are not finite"):
        screen(with_buffers([math.nan, 4.0]), expected)
    with pytest.raises(Refused, match=r"^model.buffers: is float32 \(3,\)"):
        screen(with_buffers([1.0, 2.0, 3.0]), expected)
    with pytest.raises(Refused, match=r"^upload: has 'v, w'; wanted are 'model.buffers, v, w'"):
        screen(reply(), expected)
    with pytest.raises(Refused, match=r"^model.buffers: lies 3e\+38 from where it started; 1e\+12 is the most"):
        screen(with_buffers([3e38, 4.0]), expected)
    screen(with_buffers([0.9e12, 0.1e12]), expected)
    second = replace(expected, variances=np.array([False, True]))
    with pytest.raises(Refused, match=r"^model.buffers: 1 of 1 variances are negative$"):
        screen(with_buffers([-3.0, -1e-30]), second)
    for variance in (0.0, -0.0, 3e38):
        assert screen(with_buffers([-3.0, variance]), second).shifted == distance(np.float32([-3.0, variance]), 0)
    with pytest.raises(Refused, match=r"^model.buffers: lies 2e\+12 from where it started"):
        screen(with_buffers([-2e12, 1.0]), second)
    far = outliers({0: 1.0, 1: 1.0, 2: 90.0}, what="model.buffers")
    assert far[2].startswith("model.buffers: lies 90")
