"""Screening of clients' replies before they are averaged: nothing that a client sends is trusted.

A reply is used only if it is tagged with this run, round and client; if it holds exactly the arrays and figures asked
for, by name, shape and dtype; if every number in it is finite; and if its arrays are not too far away, by two measures:
an absolute bound (the distance that an honest client can move), and a multiple of the round's median distance
(`outliers`). How far an honest client can move a model's buffers is not known; their absolute bound is what keeps a
model finite. A client's weight is known to the server and never read from a reply. The bytes of an array are checked
before memory is allocated for it.

These are pure functions: whether a reply is accepted does not depend on the order of arrival, and a refused reply does
not influence what is computed from the others.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedman.data.npz import HEADERS
from fedman.errors import UserError, one_line
from fedman.flower.messages import FIGURES, FORGOTTEN, REFUSED, REPLY, UNREADABLE, UPLOAD, Order
from fedman.training.settings import BUFFERS

if TYPE_CHECKING:
    from flwr.app import Array, Message, RecordDict

FACTOR = 20.0
"""The largest distance of a reply, in medians of the round.

The largest distance of honest clients, measured in medians, by the clients' sizes: below 6 for equal sizes (from IID to
one class per client, four algorithms), below 8 for log-normal sizes with σ = 1 (1 to 454 samples), below 19 with σ = 2.
"""

VARIANCE = "running_var"  # the end of the names of buffers that are never negative
LARGEST = float(np.finfo(np.float32).max)  # of a metric in any Flower app
LARGEST_FIGURE = 1e12  # of a loss or a MAN term: honest ones are far below, and means of them stay readable
LARGEST_SHIFT = 1e12  # of buffers other than variances: honest ones are far below, and models with them stay finite

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""By name of array: its shape and dtype, ((10, 5), "float32")."""


class Refused(UserError):
    """A message that must not be used; one line that says why.

    The line may quote the sender. It ends up in records and on terminals, so control characters are replaced.
    """

    def __init__(self, why: str) -> None:
        super().__init__("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in why))


@dataclass(frozen=True)
class Expected:
    """An order, and what the reply to it must be."""

    order: Order
    arrays: tuple[str, ...]  # the names in the upload
    figures: tuple[str, ...]
    theta: np.ndarray  # [P], the model that was sent: arrays have its shape and dtype
    bound: float  # on the distance of the client's model from θ
    norm: float  # the largest norm of every other array
    buffers: np.ndarray | None = None  # [Q], those that were sent; None: the model has none
    variances: np.ndarray | None = None  # [Q]: entries of the buffers that are never negative; None: none
    own: np.ndarray | None = None  # [P]: entries that the client keeps, which lie anywhere; None: none

    @property
    def sizes(self) -> list[int]:
        """The bytes of each array in the upload."""
        return [self.theta.nbytes] * len(self.arrays) + ([] if self.buffers is None else [self.buffers.nbytes])


@dataclass(frozen=True)
class Reply:
    """A reply that passed."""

    arrays: Mapping[str, np.ndarray]
    figures: Mapping[str, float]
    moved: float  # distance of the client's model from θ
    shifted: float = 0.0  # distance of its buffers from those that were sent


def screen(answer: Message, expected: Expected) -> Reply:
    """What a good reply holds; `Refused` for any other."""
    content, tag, theta = contents(answer), expected.order.tag, expected.theta
    _exactly("reply", content, (REPLY, UPLOAD, FIGURES))
    said = dict(content.config_records.get(REPLY, {}))
    if said != tag or any(type(said[name]) is not type(tag[name]) for name in tag):
        wrong = ", ".join(f"{k} {said.get(k)!r:.40} for {v!r}" for k, v in tag.items() if said.get(k) != v)
        raise Refused(f"{REPLY}: is not a reply to this round's order ({wrong or _names(said)})")
    sent = {BUFFERS: expected.buffers} if expected.buffers is not None else {}
    shapes = {name: (sent.get(name, theta).shape, str(theta.dtype)) for name in (*expected.arrays, *sent)}
    arrays = read_arrays(content, UPLOAD, shapes)
    figures = _read_figures(content, expected.figures)
    shared = slice(None) if expected.own is None else ~expected.own
    moved = {"w": distance(arrays["w"][shared], theta[shared])}
    moved |= {name: distance(v, 0) for name, v in arrays.items() if name not in ("w", *sent)}
    for name, far in moved.items():
        most = expected.bound if name == "w" else expected.norm
        if far > most:
            raise Refused(f"{name}: lies {far:.3g} from where it started; {most:.3g} is the most it can be")
    shifted = _shift(arrays[BUFFERS], expected) if sent else 0.0
    return Reply(arrays, figures, moved["w"], shifted)


def _shift(buffers: np.ndarray, expected: Expected) -> float:
    """The distance of a client's buffers from those that were sent. A model whose variances are negative or whose
    means are huge is not finite, and nor is the mean of all models; with few replies nothing else tells."""
    assert expected.buffers is not None
    variances = np.zeros(len(buffers), bool) if expected.variances is None else expected.variances
    refuse_negative(BUFFERS, buffers[variances])
    far = distance(buffers[~variances], expected.buffers[~variances])
    if far > LARGEST_SHIFT:
        raise Refused(f"{BUFFERS}: lies {far:.3g} from where it started; {LARGEST_SHIFT:.3g} is the most it can be")
    return distance(buffers, expected.buffers)


def outliers(distances: Mapping[int, float], factor: float = FACTOR, what: str = "w") -> dict[int, str]:
    """The clients further away than `factor` times the median of a round, with the reason.

    Fewer than three replies have no outliers: a single hostile client could choose their median. The median of an even
    number of distances is the lower middle one.
    """
    if len(distances) < 3 or not factor < math.inf:
        return {}
    median = sorted(distances.values())[(len(distances) - 1) // 2]
    return {
        client: f"{what}: lies {far:.3g} from where it started, {far / median if median else math.inf:.3g} times the "
        "median"
        for client, far in distances.items()
        if far > factor * median
    }


def distance(array: np.ndarray, centre: np.ndarray | float) -> float:
    """‖array − centre‖₂ in float64, of complex numbers in complex128."""
    return float(np.linalg.norm(np.subtract(array, centre, dtype=np.result_type(array, np.float64)).ravel()))


def refuse_negative(what: str, variances: np.ndarray) -> None:
    """Refuse variances of which some are negative."""
    if (negative := np.sum(variances < 0)) > 0:
        raise Refused(f"{what}: {negative} of {variances.size} variances are negative")


def contents(answer: Message) -> RecordDict:
    """The records of a reply that is no error."""
    if answer.has_error():
        who = {UNREADABLE: "", REFUSED: "the client says: ", FORGOTTEN: "the client says: "}
        raise Refused(f"{who.get(answer.error.code, 'Flower says: ')}{one_line(answer.error.reason)}")
    if not answer.has_content():
        raise Refused("reply: has nothing")
    return answer.content


def read_arrays(content: RecordDict, record: str, shapes: Shapes) -> dict[str, np.ndarray]:
    """The arrays of a record: exactly the names, shapes and dtypes given, every number finite."""
    if record not in content.array_records:
        raise Refused(f"{record}: is not a record of arrays")
    arrays = content.array_records[record]
    _exactly(record, arrays, shapes)
    found = {name: decode(name, arrays[name], *shapes[name]) for name in shapes}
    for name, array in found.items():
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise Refused(f"{name}: {np.sum(~np.isfinite(array))} of {array.size} numbers are not finite")
    return found


def _read_figures(content: RecordDict, names: tuple[str, ...]) -> dict[str, float]:
    """The figures of a reply: exactly the names given, of a size that honest figures have."""
    if FIGURES not in content.metric_records:
        raise Refused(f"{FIGURES}: is not a record of figures")
    _exactly(FIGURES, content.metric_records[FIGURES], names)
    figures: dict[str, float] = {}
    for name, figure in content.metric_records[FIGURES].items():
        if not isinstance(figure, float) or not abs(figure) <= LARGEST_FIGURE:
            raise Refused(f"{name}: {figure!r:.40} is not a finite floating-point number within ±{LARGEST_FIGURE:.3g}")
        figures[name] = figure
    return figures


def decode(name: str, array: Array, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The numbers of an array, whose bytes must be exactly one `.npy` array of this shape and dtype."""
    said = (array.stype, tuple(array.shape), array.dtype)
    if said != ("numpy.ndarray", shape, dtype):
        raise Refused(f"{name}: is {said[2]!s:.20} {said[1]!s:.60} ({said[0]!s:.20}); wanted is {dtype} {shape}")
    stream, wanted = io.BytesIO(array.data), np.dtype(dtype)
    try:
        header = HEADERS[np.lib.format.read_magic(stream)](stream)
    except Exception as error:  # numpy may raise anything for arbitrary bytes
        raise Refused(f"{name}: its bytes are not an array ({type(error).__name__})") from None
    if (header[0], header[2]) != (shape, wanted):
        raise Refused(f"{name}: says {dtype} {shape} but its bytes hold {header[2]!s:.20} {header[0]!s:.60}")
    body = memoryview(array.data)[stream.tell() :]
    if len(body) != math.prod(shape) * wanted.itemsize:
        raise Refused(f"{name}: has {len(body)} bytes of numbers, {math.prod(shape) * wanted.itemsize} are wanted")
    return np.frombuffer(body, wanted).reshape(shape, order="F" if header[1] else "C").copy()


def _exactly(what: str, found: Mapping[str, object], wanted: Mapping[str, object] | tuple[str, ...]) -> None:
    if set(found) != set(wanted):
        raise Refused(f"{what}: has {_names(found)}; wanted are {_names(dict.fromkeys(wanted))}")


def _names(found: Mapping[str, object]) -> str:
    """Names from a reply, shortened to fit on a line."""
    return f"{', '.join(sorted(map(str, found)))!r:.120}" if found else "nothing"
