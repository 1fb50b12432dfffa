"""What the size of a Hessian depends on: how many images it is measured on, and whether MAN's term is in the loss.

    python benchmarks/hessian_size.py RUN... [--images 200 500] [--draws 4] [--trace] [--out FILE.jsonl]

The largest eigenvalue (and the trace) of finished runs on a few training images drawn at random: once of the mean
cross-entropy, as `fedman flatness` has it, and for runs with MAN once more of what their clients minimise, with ζ·MAN.
A JSON line for each draw.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedman import ActivationNorm
from fedman.data import load
from fedman.flatness import Hessian, eigenpairs, hutchpp
from fedman.paper.flatness.finished_runs import read_run, restore, select_samples, training_samples
from fedman.runs.version import version


class Regularised(nn.Module):
    """A model whose output has one more column: the MAN term of the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.man = model, ActivationNorm(model)

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        return torch.cat([out, self.man().expand(len(out), 1)], 1)


def objective(zeta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy + ζ·MAN of a `Regularised` model's output."""
    return lambda out, y: cross_entropy(out[:, :-1], y) + zeta * out[:, -1].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--images", type=int, nargs="+", default=[200, 500])
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--trace", action="store_true", help="also the trace, to 4 %%")
    parser.add_argument("--model", default="all")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for folder in options.runs:
        run = read_run(folder)
        data = load(run.config.dataset, options.data_dir or run.config.data_dir)
        model = Regularised(restore(run, options.model, data)).to(device)
        for images, zeta, draw in product(options.images, sorted({0.0, run.config.zeta}), range(options.draws)):
            seen = training_samples(model, data, select_samples(run, data, images, draw), device, torch.float32)
            hessian = Hessian(model, objective(zeta), seen, batch_size=500)
            top = eigenpairs(hessian, 1, tol=1e-3)
            row = {
                "method": run.config.method, "partition": run.config.partition, "seed": run.config.seed,
                "images": images, "draw": draw, "zeta": zeta, "top": round(float(top.values[0]), 3),
            }  # fmt: skip
            if options.trace:
                row["trace"] = round(hutchpp(hessian, sketch=top.lanczos, rtol=0.04, seed=1).value, 1)
            line = json.dumps(row | {"version": version()}, ensure_ascii=False)
            print(line, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")


if __name__ == "__main__":
    main()
