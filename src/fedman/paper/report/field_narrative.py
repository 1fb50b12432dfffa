"""What follows from the field's tables, in sentences: as much as was measured, and where MAN does not help."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from fedman.paper import targets as paper
from fedman.paper.presets import PARTITIONS, TUNED
from fedman.paper.report import claims
from fedman.paper.report.field import METHODS, PLACE, PLAIN, Field, Method, Study, method_of
from fedman.paper.report.field_sharpness import MEASURES, SIDES, correlation
from fedman.paper.report.field_tables import penalty_title
from fedman.paper.report.narrative import share_of
from fedman.paper.report.rank_correlation import spearman
from fedman.paper.report.series import MAN, common_seeds, common_seeds_text, gained, method_title
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
    compared = data.gains(data.tuned) if data else {}
    if not data or not compared:
        return ""
    _, each = _spent(data, compared)
    count = claims.counted(compared, "algorithm")
    about = f"{count} on CIFAR-100, tuned alike without and with MAN, {each} runs each"
    where = "[the field after the paper](docs/field.md); `fedman report results` shows it"
    told = [*_gains(data, data.tuned, "Tuned", (PLACE,)), *_best(data), *_lead(data)]
    return f"**After the paper**: {about} ({where}). {' '.join(told)}\n"


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
    hopeless = [method_title(*method) for method in METHODS if method in data.hopeless]
    lost += [f"{', '.join(hopeless)} ({WHERE}, with every setting that was tried)"] if hopeless else []
    return [text, *tuning, *([f"Diverged with one seed or more: {'; '.join(lost)}."] if lost else [])]


def _spent(data: Field, algorithms: Collection[str] = TUNED) -> tuple[Counter[Method], str]:
    """The runs of tuning that have been played for each method, and the least and the most of them as text."""
    spent = Counter[Method]()
    for tried in (tried for tuning in data.tunings for tried in tuning["settings"]):
        method = method_of(tried["config"])
        if tried["scores"] and method[0] in algorithms:
            spent[method] += len(tried["seeds"])
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
        gains = data.gains(study, partition)
        if not gains:
            continue
        known, where = _finite(gains), paper.partition_title(partition)
        of = f"{share_of(list(gains.values()))}{'' if told else ' algorithms'} on {where}"
        of += f" ({data.seeds_of_gains(study, partition)})"
        told.append(f"{of}, {'' if told else 'in points '}{_spread(_titled(known))}" if known else of)
        why = {a: points(known[a]) for a in sorted(known, key=known.__getitem__) if known[a] <= 0}
        chosen = {a for a in TUNED if study is data.default or (a, MAN) not in data.hopeless}
        why |= {a: "diverges" if a in chosen else "diverges in tuning" for a in gains if a not in known}
        names = ", ".join(f"{method_title(a)} ({text})" for a, text in why.items())
        down += [f"{names} on {where}"] if names else []
    text = [f"{how}, MAN raises the accuracy of {'; '.join(told)}."] if told else []
    return [*text, f"It does not help {'; '.join(down)}."] if down else text


def _tuning(data: Field) -> list[str]:
    adds, pairs = {method_title(*m): gain for m, gain in data.tuning_gains().items()}, data.tuning_pairs()
    known = _finite(adds)
    if not known:
        return []
    counted = f"{claims.counted(adds, 'method')}, {common_seeds_text(pairs)}"
    text = f"On {WHERE} tuning adds {_spread(known)} ({counted}){_lost(adds)}."
    finite = [(pair, common_seeds(*pair)) for pair in pairs if math.isfinite(pair[1].mean)]
    rho = spearman([(default.over(seeds), tuned.over(seeds)) for (default, tuned), seeds in finite])
    more = [] if rho is None else [f"Rank correlation of the order with the defaults and tuned: {points(rho)}."]
    return [text, *more]


def _lead(data: Field) -> list[str]:
    """What is left of the other algorithms' gains over FedAvg when all are tuned alike, without MAN and with it."""
    others = [a for a in TUNED if a != "fedavg"]

    def over(study: Study, penalty: str, base: str) -> dict[str, float]:
        found = {a: data.gained(study, ("fedavg", base), (a, penalty)) for a in others}
        return _titled({a: lead for a, lead in found.items() if lead is not None})

    told = []
    for penalty in ("", MAN):
        every = over(data.tuned, penalty, penalty)
        tuned, default = _finite(every), _finite(over(data.default, penalty, penalty))
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
        first = data.get(data.tuned, ("fedavg", penalty))
        seeds = common_seeds_text((first, s) for a in others if first and (s := data.get(data.tuned, (a, penalty))))
        base = method_title("fedavg", penalty)
        told.append(f"Over {base}, tuned alike on {WHERE} ({seeds}), the other {who} gain {spread}{_lost(every)}.")
    ahead = _finite(over(data.tuned, "", MAN))
    if ahead:
        behind = sum(lead < 0 for lead in ahead.values())
        told.append(f"{method_title('fedavg', MAN)} is ahead of {behind} of the {len(ahead)} others without MAN.")
    return told


def _penalties(data: Field) -> list[str]:
    told = []
    for algorithm, of in data.penalised.items():
        found = {kind: gained(of.get(PLAIN), s) for kind, s in of.items() if kind != PLAIN}
        gains = {kind: gain for kind, gain in found.items() if gain is not None}
        mans = [gain for kind, gain in gains.items() if kind[0] == MAN]
        others = {f"{penalty_title(*kind[::2])}, ζ = {kind[1]:g}" if kind[0] else kind[2]: gain
                  for kind, gain in gains.items() if kind[0] != MAN}  # fmt: skip
        if mans and others:
            man, finite = mans[0], _finite(others)
            more = sum(math.isnan(man) or gain > man for gain in finite.values())
            does, add = ("diverges", "add ") if math.isnan(man) else (f"adds {points(man)}", "")
            told.append(
                f"On {method_title(algorithm)} with its defaults MAN {does}, other penalties and weight decays "
                f"{f'{add}{_ends(finite)}' if finite else 'diverge'}; {more} of {len(others)} add more than MAN"
                f"{_lost(others)}."
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


def _titled(gains: Mapping[str, float]) -> dict[str, float]:
    return {method_title(algorithm): gain for algorithm, gain in gains.items()}


def _finite(gains: Mapping[str, float]) -> dict[str, float]:
    """Those that did not diverge."""
    return {name: gain for name, gain in gains.items() if math.isfinite(gain)}


def _lost(gains: Mapping[str, float]) -> str:
    """Those that did."""
    names = "; ".join(name for name, gain in gains.items() if math.isnan(gain))
    return f"; diverged: {names}" if names else ""


def _spread(gains: Mapping[str, float]) -> str:
    """The smallest and the largest, and of several the median."""
    median = f", {points(statistics.median(gains.values()))} in the median" if len(gains) > 2 else ""
    return f"{_ends(gains)}{median}"


def _ends(values: Mapping[str, float]) -> str:
    """The smallest and the largest, each with its name."""
    ends = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return " to ".join(dict.fromkeys(f"{points(values[name])} ({name})" for name in ends))
