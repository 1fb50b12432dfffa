"""What the paper says of flatness, claim by claim, beside what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from fedman.flatness.density import Density
from fedman.paper import targets as paper
from fedman.paper.flatness import figures
from fedman.paper.flatness.flatness_json import Measurements
from fedman.paper.report.hessian import Measured, by_place, comparable
from fedman.paper.report.series import MAN, method_title, seeds_text
from fedman.paper.report.tables import BLANK, Table, points

NEGLIGIBLE = 0.01  # of the positive eigenvalues' sum
RANK = 50  # "after about 50 eigenvalues"
RANKS = "FedAvg+MAN's eigenvalues are below FedSAM's from some rank on"
Figure = TypeVar("Figure", int, float)
SIDES = {False: "plain", True: "with MAN"}
FIGURES: tuple[tuple[str, Callable[[Measured], float], Callable[[paper.Sharpness], float], str], ...] = (
    ("λ_max", lambda m: m.top, lambda theirs: theirs.top, ".2f"),
    ("the trace", lambda m: m.trace, lambda theirs: theirs.trace, ".0f"),
)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, its figures, ours, and whether the sentence holds for ours; None: ours do not decide."""

    text: str
    printed: str
    here: str
    holds: bool | None


def claims(measured: Sequence[Measured]) -> list[tuple[str, Claim]]:
    """The paper's sentences on flatness, with the place of each, on each partition on which they were measured."""
    usual = [m for m in measured if not m.variant and m.papers_method and m.dataset in paper.TABLES]
    found = []
    for members in by_place(usual):
        every = (
            *_falls(members), *_sam_and_man(members), *_ranks(members), *_negative(members), *_clients(members)
        )  # fmt: skip
        found += [(members[0].place, claim) for claim in every]
    return found


def table(measured: Sequence[Measured]) -> Table:
    """All claims, one on a line."""
    words = {True: "yes", False: "no", None: "open"}
    rows = [[where, c.text, c.printed, c.here, words[c.holds]] for where, c in claims(measured)]
    header = ["", "the paper's claim", "its figures", "measured", "holds"]
    return Table("hessian-claims", "What the paper says of flatness", header, rows, words=5)


def sentences(measured: Sequence[Measured]) -> list[str]:
    """How many claims hold wherever they were measured, and what was measured where one does not."""
    found = claims(measured)
    if not found:
        return []
    every: dict[str, list[tuple[str, Claim]]] = {}
    for where, claim in found:
        every.setdefault(claim.text, []).append((where, claim))
    hold = sum(all(claim.holds for _, claim in places) for places in every.values())
    text = f"Of the paper's {len(every)} claims on flatness {hold} hold"
    for outcome, word in ((False, "not"), (None, "open")):
        found_so = {name: [f"{where}: {c.here}" for where, c in v if c.holds is outcome] for name, v in every.items()}
        told = [f"{name} ({'; '.join(here)})" for name, here in found_so.items() if here]
        text += f"; {word}: {'; '.join(told)}" if told else ""
    ranks = [
        f"FedAvg+MAN's eigenvalues against FedSAM's ({where}): {claim.here}; in the paper {claim.printed}."
        for where, claim in every.get(RANKS, ())
        if claim.holds
    ]
    return [f"{text}.", *ranks]


def _falls(members: Sequence[Measured]) -> Iterator[Claim]:
    """MAN lowers λ_max and trace; the paper's figures are those without a doubt."""
    for name, ours, theirs, _ in FIGURES:
        here, printed = [], []
        for algorithm in dict.fromkeys(m.algorithm for m in members):
            before, after = (_mean(members, algorithm, penalty, ours) for penalty in ("", MAN))
            if before is None or after is None or before <= 0:
                continue
            here.append(after / before - 1)
            pair = [paper.sharpness(members[0].dataset, members[0].partition, algorithm, man) for man in (False, True)]
            if pair[0] and pair[1] and not pair[0].doubt:
                printed.append(theirs(pair[1]) / theirs(pair[0]) - 1)
        if here:
            lower = sum(change < 0 for change in here)
            said = f"{percent(here)}, lower for {lower} of {len(here)} algorithms"
            yield Claim(f"MAN lowers {name}", percent(printed) if printed else BLANK, said, lower == len(here))


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
    values = {(m.algorithm, m.penalty, m.seed): found for m, found in shown.items()}
    told: dict[str, list[int]] = {}
    firsts = []
    for seed in sorted({m.seed for m in shown}):
        man, sam = (values.get((*method, seed)) for method in (("fedavg", MAN), ("fedsam", "")))
        if man is None or sam is None:
            continue
        pairs = list(zip(man, sam, strict=False))
        first = max((rank for rank, (a, b) in enumerate(pairs, 1) if a >= b), default=0) + 1
        if len(pairs) >= RANK:
            before = _runs([rank for rank, (a, b) in enumerate(pairs[: first - 1], 1) if a < b])
            also = f" (and at {', '.join(before)})" if before else ""
            below = f"smaller from rank {first} to" if first <= len(pairs) else "not smaller at rank"
            told.setdefault(f"{below} {len(pairs)}{also}", []).append(seed)
            firsts.append(first)
    if firsts:
        here = "; ".join(f"{text}, {seeds_text(seeds)}" for text, seeds in told.items())
        yield Claim(RANKS, f"“after about {RANK}”", f"{here}{_on(count)}", max(firsts) <= RANK)


def _runs(ranks: Sequence[int]) -> list[str]:
    """Consecutive numbers by their ends.

    >>> _runs([1, 2, 3, 7, 9, 10])
    ['1 to 3', '7', '9 to 10']
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    return [" to ".join(dict.fromkeys((str(run[0]), str(run[-1])))) for run in runs]


def _negative(members: Sequence[Measured]) -> Iterator[Claim]:
    """The negative part of the spectrum is negligible: a lower bound can refute that, but not confirm it."""
    found: dict[int, dict[Measured, Density]] = {}
    for m in members:
        for file in m.files:
            if (density := figures.density(file)) is not None:
                found.setdefault(file["density"].get("samples", 0), {})[m] = density
    told, bounds = [], []
    for count, shown in sorted(found.items()):
        shares = [negative_share(density) for density in shown.values()]
        who = f"{len(shown)} models" if len(shown) > 1 else next(iter(shown)).method
        starts = between([len(density.nodes) for density in shown.values()], str)
        of = f"{who}{_on(count)}, {starts} {'start' if starts == '1' else 'starts'}; lowest {_lowest(shown)}"
        told.append(f"at least {between(shares, _share)} % ({of})")
        bounds += shares
    if bounds:
        here = f"their sum as a share of the positive ones': {', '.join(told)}; the quadrature does not resolve more"
        yield Claim("negative eigenvalues are negligible", BLANK, here, False if max(bounds) >= NEGLIGIBLE else None)


def _clients(members: Sequence[Measured]) -> Iterator[Claim]:
    """λ_max of the mean loss is at most the mean of the clients' λ_max."""
    found = [m.best["clients"] for m in members if "clients" in m.best]
    shares = [entry["top"] / entry["mean"] for entry in found if entry["mean"] > 0]
    if shares:
        here = f"{between(shares, lambda v: f'{v:.2f}')} of that mean ({counted(shares, 'model')})"
        yield Claim("λ_max is at most the mean of the clients' λ_max", BLANK, here, max(shares) <= 1)


def negative_share(found: Density) -> float:
    """A lower bound of Σ|λ| over λ < 0 as a share of Σλ over λ > 0.

    Let a start's spectral measure μ have the quadrature θ_1 < … < θ_m with weights w_i. The inequality of Chebyshev,
    Markov and Stieltjes, Σ_{i<k} w_i ≤ μ((−∞, θ_k)) for each k, gives

        N = ∫ max(0, −λ) dμ = ∫_{−∞}^0 μ((−∞, x]) dx ≥ Σ_i w_i max(0, −θ_{i+1}):

    each weight is counted at the next node. T = ∫ λ dμ = Σ_i w_i θ_i is exact, the positive part is N + T, and for
    T ≥ 0 the share N / (N + T) grows with N. N and T are means over the starts. Counting each weight at the node before
    would bound N from above; but most weight is at the node next to zero, so that the share's bound is near 1.
    """
    pairs = list(zip(found.nodes, found.weights, strict=True))
    negative = statistics.fmean(float((w[:-1] * (-t[1:]).clamp(min=0)).sum()) for t, w in pairs)
    positive = negative + max(0.0, statistics.fmean(float((w * t).sum()) for t, w in pairs))
    return negative / positive if positive > 0 else 0.0


def _lowest(shown: Mapping[Measured, Density]) -> str:
    """The lowest nodes, which are not below the lowest eigenvalues."""
    ends = {words: [d.span[0] for m, d in shown.items() if bool(m.penalty) is man] for man, words in SIDES.items()}
    return ", ".join(f"{between(low, lambda v: points(v, '.2f'))} {words}" for words, low in ends.items() if low)


def _mean(members: Sequence[Measured], algorithm: str, penalty: str, ours: Callable[[Measured], float]) -> float | None:
    """The mean over the seeds of a method; None where it was not measured."""
    values = [ours(m) for m in members if (m.algorithm, m.penalty) == (algorithm, penalty)]
    finite = [value for value in values if not math.isnan(value)]
    return statistics.fmean(finite) if finite else None


def _eigenvalues(m: Measurements) -> list[float]:
    return [value for value in m["top"]["values"] if value is not None] if len(m["top"]["values"]) > 1 else []


def _order(left: float, right: float, form: str) -> str:
    return f"{left:{form}} {'<' if left < right else '≥'} {right:{form}}"


def percent(changes: Sequence[float]) -> str:
    """The ends of these relative changes, the highest first."""
    ends = dict.fromkeys(points(100 * change, ".0f") for change in (max(changes), min(changes)))
    return f"{' to '.join(ends)} %"


def between(values: Sequence[Figure], text: Callable[[Figure], str]) -> str:
    """The smallest and the largest, or the one text that both have."""
    return " to ".join(dict.fromkeys(map(text, (min(values), max(values)))))


def counted(found: Collection[object], noun: str) -> str:
    """1 model; 2 models."""
    return f"{len(found)} {noun}{'' if len(found) == 1 else 's'}"


def _share(value: float) -> str:
    return f"{100 * value:.2g}"


def _on(count: int) -> str:
    return f", {count} images" if count else ""
