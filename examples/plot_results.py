"""Draw the convergence curves of a results file, or of run folders.

python examples/plot_results.py results/cifar100-first.jsonl --out docs/convergence.png
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from fedman import results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="+", help="results files or run folders")
    parser.add_argument("--out", type=Path, default=Path("convergence.png"))
    parser.add_argument("--precision", help="only runs of this precision")
    options = parser.parse_args()

    runs = []
    for source in options.source:
        runs += results.collect([source]) if source.is_dir() else results.read(source)
    runs = [run for run in runs if options.precision in (None, run["precision"])]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        curve, man = run["curve"], run["config"]["zeta"] > 0
        label = f"{run['method']}  {run['accuracy']['all']:.1f} %"
        axes.plot(curve["round"], curve["all"], label=label, color="#d1495b" if man else "#2f6f9f")
    config = runs[0]["config"]
    axes.set_title(f"{config['dataset']}, {config['partition']}, {config['clients']} clients", loc="left")
    axes.set(xlabel="round", ylabel="test accuracy of all clients' mean, %", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(options.out, dpi=150)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
