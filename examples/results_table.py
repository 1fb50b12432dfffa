"""Print the runs of results files as a Markdown table: accuracy of all clients' mean, with and without MAN.

python examples/results_table.py results/cifar100.jsonl
"""

import argparse
import statistics
from pathlib import Path

from fedman import results
from fedman.algorithms import ALGORITHMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="+")
    groups: dict[tuple[str, str, str], dict[bool, list[dict]]] = {}
    for path in parser.parse_args().file:
        for run in results.read(path):
            config = run["config"]
            key = config["dataset"], config["partition"], config["algorithm"]
            groups.setdefault(key, {}).setdefault(config["zeta"] > 0, []).append(run)
    print("| data | partition | method | plain | +MAN | gain | rounds to target, plain / MAN | seeds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (dataset, partition, algorithm), pair in sorted(groups.items()):
        plain, man = pair.get(False, []), pair.get(True, [])
        a, b = ([run["accuracy"]["all"] for run in runs] for runs in (plain, man))
        gain = f"{statistics.fmean(b) - statistics.fmean(a):+.2f}" if a and b else "–"
        rounds = " / ".join(reached(runs) for runs in (plain, man))
        cells = dataset, partition, ALGORITHMS[algorithm].title, shown(a), shown(b), gain, rounds, str(len(a or b))
        print(f"| {' | '.join(cells)} |")


def shown(values: list[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def reached(runs: list[dict]) -> str:
    """The median over seeds of the first round at the target."""
    if not runs:
        return "–"
    median = statistics.median(run["rounds_to_target"] or float("inf") for run in runs)
    return f"{runs[0]['config']['rounds']}+" if median == float("inf") else f"{median:g}"


if __name__ == "__main__":
    main()
