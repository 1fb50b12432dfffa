"""What follows from the field's tables, in sentences: as much as was measured, and where MAN does not help."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from fedman.paper import targets as paper
from fedman.paper.presets import PARTITIONS, TUNED
from fedman.paper.report import claims
from fedman.paper.report.field import (
    MEASURES,
    METHODS,
    PLACE,
    PLAIN,
    SIDES,
    Field,
    Method,
    Study,
    correlation,
    method_of,
    penalty_title,
    spearman,
)
from fedman.paper.report.series import MAN, method_title
from fedman.paper.report.tables import points

WHERE = paper.partition_title(PLACE)


def briefs(data: Field) -> list[tuple[str, list[str]]]:
    """What follows from the tables, as far as they go: sentences under headings."""
    found = {
        "Measured": _measured(data),
        "What MAN adds": [
            *_best(data), *_gains(data, data.tuned, "Tuned"), *_gains(data, data.default, "With the defaults")
        ],
        "What tuning leaves": [*_tuning(data), *_lead(data)],
        "Other penalties": _penalties(data),
        "Flatness": _sharpness(data),
    }  # fmt: skip
    return [(name, sentences) for name, sentences in found.items() if sentences]


def answer(data: Field | None) -> str:
    """One paragraph for the README: does MAN help the methods after it, and what is left of their gains? Empty where
    no algorithm was run both ways."""
    gains = _gains(data, data.tuned, "Tuned", (PLACE,)) if data else []
    if not data or not gains:
        return ""
    count, (_, each) = len({c.series.algorithm for c in data.tuned.of(PLACE)}), _spent(data)
    about = f"{count} algorithms on CIFAR-100, tuned alike without and with MAN, {each} runs each"
    where = "[the field after the paper](docs/field.md); `fedman report results` shows it"
    return f"**After the paper**: {about} ({where}). {' '.join([*gains, *_best(data), *_lead(data)])}\n"


def _measured(data: Field) -> list[str]:
    def count(study: Study) -> str:
        found = [sum((c.series.algorithm, c.series.penalty) in METHODS for c in study.of(p)) for p in PARTITIONS]
        return ", ".join(f"{n} on {paper.partition_title(p)}" for n, p in zip(found, PARTITIONS, strict=True))

    text = f"Of {len(METHODS)} methods, tuned {count(data.tuned)}; with the defaults {count(data.default)}."
    spent, each = _spent(data)
    tuning = [f"Tuning took {spent.total()} runs, {each} for each of {len(spent)} methods."] if spent else []
    lost = [
        f"{', '.join(names)} ({paper.partition_title(p)}, {how})"
        for study, how in ((data.tuned, "tuned"), (data.default, "default"))
        for p in PARTITIONS
        if (names := [c.series.method for c in study.of(p) if math.isnan(c.series.mean)])
    ]
    return [text, *tuning, *([f"Diverged with one seed or more: {'; '.join(lost)}."] if lost else [])]


def _spent(data: Field) -> tuple[Counter[Method], str]:
    """The runs of tuning for each method, and the least and the most of them as text."""
    spent = Counter[Method]()
    for tried in (tried for tuning in data.tunings for tried in tuning["settings"]):
        spent[method_of(tried["config"])] += len(tried["seeds"])
    return spent, claims.between(list(spent.values()), str) if spent else ""


def _best(data: Field) -> list[str]:
    finite = [(m, s) for m in data.ranked if (s := data.get(data.tuned, m)) and math.isfinite(s.mean)]
    if not finite:
        return []
    (best, s), plain = finite[0], next(((m, s) for m, s in finite if not m[1]), None)
    text = f"Tuned, on {WHERE}, the best is {method_title(*best)} with {s.text} %"
    more = f"; the best without MAN {method_title(*plain[0])} with {plain[1].text} %" if plain and best[1] else ""
    return [f"{text}{more}."]


def _gains(data: Field, study: Study, how: str, partitions: Sequence[str] = PARTITIONS) -> list[str]:
    """How many algorithms MAN helps on each partition, and which it does not."""
    told, down = list[str](), list[str]()
    for partition in partitions:
        known = {a: gain for a in TUNED if (gain := data.gain(study, a, partition)) is not None}
        lost = [a for a in TUNED if _diverges_with_man(data, study, a, partition)]
        if not known and not lost:
            continue
        up, where = sum(gain > 0 for gain in known.values()), paper.partition_title(partition)
        of = f"{up} of {len(known) + len(lost)}{'' if told else ' algorithms'} on {where}"
        by = _spread({method_title(a): gain for a, gain in known.items()}) if known else ""
        told.append(f"{of}, {'' if told else 'in points '}{by}" if by else of)
        names = [
            f"{method_title(a)} ({points(known[a])})" for a in sorted(known, key=known.__getitem__) if known[a] <= 0
        ]
        names += [f"{method_title(a)} (diverges)" for a in lost]
        down += [f"{', '.join(names)} on {where}"] if names else []
    text = [f"{how}, MAN raises the accuracy of {'; '.join(told)}."] if told else []
    return [*text, f"It does not help {'; '.join(down)}."] if down else text


def _diverges_with_man(data: Field, study: Study, algorithm: str, partition: str) -> bool:
    plain, man = (data.get(study, (algorithm, penalty), partition) for penalty in ("", MAN))
    return bool(plain and man and math.isfinite(plain.mean) and math.isnan(man.mean))


def _tuning(data: Field) -> list[str]:
    adds = {m: gain for m in METHODS if (gain := data.tuning_gain(m)) is not None}
    if not adds:
        return []
    spread = _spread({method_title(*m): gain for m, gain in adds.items()})
    text = f"On {WHERE} tuning adds {spread} ({len(adds)} methods)."
    both = [(data.get(data.tuned, m), data.get(data.default, m)) for m in adds]
    rho = spearman([(a.mean, b.mean) for a, b in both if a and b])
    more = [] if rho is None else [f"Rank correlation of the order with the defaults and tuned: {points(rho)}."]
    return [text, *more]


def _lead(data: Field) -> list[str]:
    """What is left of the other algorithms' gains over FedAvg when all are tuned alike, without MAN and with it."""

    def over(study: Study, penalty: str, base: str) -> dict[str, float]:
        first = data.get(study, ("fedavg", base))
        found = {a: data.get(study, (a, penalty)) for a in TUNED if a != "fedavg"}
        leads = {method_title(a): s.mean - first.mean for a, s in found.items() if first and s}
        return {name: lead for name, lead in leads.items() if math.isfinite(lead)}

    told = []
    for penalty in ("", MAN):
        tuned, default = (over(study, penalty, penalty) for study in (data.tuned, data.default))
        if not tuned:
            continue
        both = tuned.keys() & default.keys()
        now, before = (points(statistics.median(of[a] for a in both)) if both else "" for of in (tuned, default))
        spread = (
            f"{_ends(tuned)}; in the median of {len(both)} {now}, with the defaults {before}"
            if both
            else _spread(tuned)
        )
        who = "algorithms with MAN" if penalty else "algorithms"
        base = method_title("fedavg", penalty)
        told.append(f"Over {base}, tuned alike on {WHERE}, the other {who} gain {spread}.")
    ahead = over(data.tuned, "", MAN)
    if ahead:
        behind = sum(lead < 0 for lead in ahead.values())
        told.append(f"{method_title('fedavg', MAN)} is ahead of {behind} of the {len(ahead)} others without MAN.")
    return told


def _penalties(data: Field) -> list[str]:
    told = []
    for algorithm, of in data.penalised.items():
        plain = of.get(PLAIN)
        gains = {kind: s.mean - plain.mean for kind, s in of.items() if plain and math.isfinite(s.mean - plain.mean)}
        mans = [gain for kind, gain in gains.items() if kind[0] == MAN]
        others = {f"{penalty_title(*kind[::2])}, ζ = {kind[1]:g}" if kind[0] else kind[2]: gain
                  for kind, gain in gains.items() if kind[0] != MAN and kind != PLAIN}  # fmt: skip
        if mans and others:
            more = sum(gain > mans[0] for gain in others.values())
            told.append(
                f"On {method_title(algorithm)} with its defaults MAN adds {points(mans[0])}, other penalties and "
                f"weight decays {_ends(others)}; {more} of {len(others)} add more than MAN."
            )
    return told


def _sharpness(data: Field) -> list[str]:
    told = []
    for side in SIDES:
        found = {MEASURES[name].title: correlation(data, name, side) for name in MEASURES}
        known = {title: rho for title, (rho, _) in found.items() if rho is not None}
        if known:
            most = max(count for _, count in found.values())
            of = {"all": "models", "plain": "plain models"}.get(side, f"models {side}")
            told.append(f"{_ends(known)} over {most} {of}")
    if not told:
        return []
    return [
        f"Rank correlation of the measures of sharpness with test accuracy: {'; '.join(told)}. Where it is negative, "
        "flatter models are the more accurate ones."
    ]


def _spread(gains: Mapping[str, float]) -> str:
    """The smallest and the largest, and of several the median."""
    median = f", {points(statistics.median(gains.values()))} in the median" if len(gains) > 2 else ""
    return f"{_ends(gains)}{median}"


def _ends(values: Mapping[str, float]) -> str:
    """The smallest and the largest, each with its name."""
    ends = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return " to ".join(dict.fromkeys(f"{points(values[name])} ({name})" for name in ends))
