"""What the paper says of flatness, claim by claim, beside what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fedman.flatness.density import Density
from fedman.paper import targets as paper
from fedman.paper.flatness import figures
from fedman.paper.flatness.flatness_json import Measurements
from fedman.paper.report.hessian import Measured, comparable
from fedman.paper.report.series import MAN, method_title
from fedman.paper.report.tables import BLANK, Table, points
from fedman.runs.text_tables import mean_std

NEAR_ZERO = 0.02  # eigenvalues below this size are not resolved by the quadrature's nodes
RANK = 50  # "after about 50 eigenvalues"
FIGURES: tuple[tuple[str, Callable[[Measured], float], Callable[[paper.Sharpness], float], str], ...] = (
    ("λ_max", lambda m: m.top, lambda theirs: theirs.top, ".2f"),
    ("the trace", lambda m: m.trace, lambda theirs: theirs.trace, ".0f"),
)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, its figures, ours, and whether the sentence holds for ours."""

    text: str
    printed: str
    here: str
    holds: bool


def claims(measured: Sequence[Measured]) -> list[tuple[str, Claim]]:
    """The paper's sentences on flatness, with the place of each, on each partition on which they were measured."""
    usual = [m for m in measured if not m.variant and m.papers_method and m.dataset in paper.TABLES]
    found = []
    for (dataset, partition), group in groupby(usual, lambda m: (m.dataset, m.partition)):
        members, where = list(group), f"{paper.title(dataset)}, {paper.partition_title(partition)}"
        every = (*_falls(members), *_sam_and_man(members), *_ranks(members), *_negative(members))
        found += [(where, claim) for claim in every]
    return found


def table(measured: Sequence[Measured]) -> Table:
    """All claims, one on a line."""
    rows = [[where, c.text, c.printed, c.here, "yes" if c.holds else "no"] for where, c in claims(measured)]
    header = ["", "the paper's claim", "its figures", "measured", "holds"]
    return Table("hessian-claims", "What the paper says of flatness", header, rows, words=5)


def sentences(measured: Sequence[Measured]) -> list[str]:
    """How many claims hold, and what was measured where one does not."""
    found = claims(measured)
    failed = [f"{claim.text} ({where}: {claim.here})" for where, claim in found if not claim.holds]
    if not found:
        return []
    text = f"Of the paper's claims on flatness {len(found) - len(failed)} of {len(found)} hold"
    return [f"{text}; not: {'; '.join(failed)}." if failed else f"{text}."]


def losses(measured: Sequence[Measured]) -> Table:
    """Training loss and gradient norm beside λ_max and trace: runs are compared that are not equally far trained."""
    rows = []
    for m in measured:
        loss = m.best.get("loss")
        if loss and loss["value"] is not None:
            norm = loss.get("gradient_norm")
            row = [m.partition, m.label, str(m.seed), f"{loss['value']:.3f}", BLANK if norm is None else f"{norm:.2f}"]
            rows.append([*row, _shown(m.top, ".2f"), _shown(m.trace, ".0f")])
    header = ["partition", "method", "seed", "training loss", "gradient norm", "λ_max", "trace"]
    note = (
        "Of the mean cross-entropy alone: runs with MAN minimise another loss, so their gradient of this one is larger."
    )
    return Table("hessian-losses", "Where the models stand", header, rows, note, 3)


def _falls(members: Sequence[Measured]) -> Iterator[Claim]:
    """MAN lowers λ_max and trace; the paper's figures are those without a doubt."""
    for name, ours, theirs, _ in FIGURES:
        here, printed = [], []
        for algorithm in dict.fromkeys(m.algorithm for m in members):
            if (change := _change(_mean(members, algorithm, "", ours), _mean(members, algorithm, MAN, ours))) is None:
                continue
            here.append(change)
            pair = [paper.sharpness(members[0].dataset, members[0].partition, algorithm, man) for man in (False, True)]
            if pair[0] and pair[1] and not pair[0].doubt:
                printed.append(theirs(pair[1]) / theirs(pair[0]) - 1)
        if here:
            lower = sum(change < 0 for change in here)
            said = f"{_percent(here)}, lower for {lower} of {len(here)} algorithms"
            yield Claim(f"MAN lowers {name}", _percent(printed) if printed else BLANK, said, lower == len(here))


def _sam_and_man(members: Sequence[Measured]) -> Iterator[Claim]:
    """FedSAM has the lower λ_max, FedAvg+MAN the lower trace."""
    for (name, ours, theirs, form), lower in zip(FIGURES, (("fedsam", ""), ("fedavg", MAN)), strict=True):
        higher = ("fedavg", MAN) if lower == ("fedsam", "") else ("fedsam", "")
        left, right = (_mean(members, *method, ours) for method in (lower, higher))
        printed = [paper.sharpness(members[0].dataset, members[0].partition, a, bool(p)) for a, p in (lower, higher)]
        if left is None or right is None:
            continue
        text = f"{name} of {method_title(*lower)} is below that of {method_title(*higher)}"
        said = _order(theirs(printed[0]), theirs(printed[1]), form) if printed[0] and printed[1] else BLANK
        yield Claim(text, said, _order(left, right, form), left < right)


def _ranks(members: Sequence[Measured]) -> Iterator[Claim]:
    """From about the 50th on, FedAvg+MAN's eigenvalues are smaller than FedSAM's."""
    shown, count = comparable(members, "top", _eigenvalues)
    for seed in sorted({m.seed for m in shown}):
        man, sam = (_of(shown, method, seed) for method in (("fedavg", MAN), ("fedsam", "")))
        if man is None or sam is None:
            continue
        pairs = list(zip(man, sam, strict=False))
        first = max((rank for rank, (a, b) in enumerate(pairs, 1) if a >= b), default=0) + 1
        if len(pairs) >= RANK:
            here = f"smaller from rank {first} to {len(pairs)}{_on(count)}, seed {seed}"
            said = f"“after about {RANK}”"
            yield Claim("FedAvg+MAN's eigenvalues are below FedSAM's from some rank on", said, here, first <= RANK)


def _negative(members: Sequence[Measured]) -> Iterator[Claim]:
    """The negative part of the spectrum is negligible."""
    shown, count = comparable(members, "density", lambda m: [d] if (d := figures.density(m)) else [])
    shares, lowest = [], []
    for found in (found for (found,) in shown.values()):
        shares.append(statistics.fmean(_negative_shares(found)))
        lowest.append(-found.span[0] / found.span[1])
    if shares:
        starts = {len(found.nodes) for (found,) in shown.values()}
        here = (
            f"below −{NEAR_ZERO} lies {_range(shares)} of the sum above {NEAR_ZERO}; the lowest is {_range(lowest)} of "
            f"λ_max in size ({len(shown)} models, {_range(starts, 1, '')} starts{_on(count)})"
        )
        yield Claim("negative eigenvalues are negligible", BLANK, here, max(shares) < 0.01)


def _negative_shares(found: Density) -> list[float]:
    """Σ|λ| over λ < −0.02 as a share of Σλ over λ > 0.02, for each start."""
    sums = [
        [float((w * t)[side].sum().abs()) for side in (t < -NEAR_ZERO, t > NEAR_ZERO)]
        for t, w in zip(found.nodes, found.weights, strict=True)
    ]
    return [below / above for below, above in sums if above > 0]


def _mean(members: Sequence[Measured], algorithm: str, penalty: str, ours: Callable[[Measured], float]) -> float | None:
    """The mean over the seeds of a method; None where it was not measured."""
    values = [ours(m) for m in members if (m.algorithm, m.penalty) == (algorithm, penalty)]
    finite = [value for value in values if not math.isnan(value)]
    return statistics.fmean(finite) if finite else None


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or before <= 0 else after / before - 1


def _of(shown: dict[Measured, list[float]], method: tuple[str, str], seed: int) -> list[float] | None:
    return next((v for m, v in shown.items() if (m.algorithm, m.penalty, m.seed) == (*method, seed)), None)


def _eigenvalues(m: Measurements) -> list[float]:
    return [value for value in m["top"]["values"] if value is not None] if len(m["top"]["values"]) > 1 else []


def _order(left: float, right: float, form: str) -> str:
    return f"{left:{form}} {'<' if left < right else '≥'} {right:{form}}"


def _percent(changes: Sequence[float]) -> str:
    ends = dict.fromkeys(points(100 * change, ".0f") for change in (max(changes), min(changes)))
    return f"{' to '.join(ends)} %"


def _range(values: Sequence[float] | set[int], scale: float = 100, unit: str = " %") -> str:
    ends = dict.fromkeys(f"{scale * value:.0f}" for value in (min(values), max(values)))
    return f"{' to '.join(ends)}{unit}"


def _on(count: int) -> str:
    return f", {count} images" if count else ""


def _shown(value: float, form: str) -> str:
    return BLANK if math.isnan(value) else mean_std([value], form)
