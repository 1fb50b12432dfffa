"""The result of a finished run: records and models, as a table, as a figure, in three lines."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedman.errors import UserError
from fedman.runs.records import RoundRecord, Summary, evaluated_on, figure, figures, headline, headline_of, how_run
from fedman.trackers import numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run.

    - `summary`: what `summary.json` holds, a dict.
    - `rounds`: the records, one a round.
    - `models`: of "all" (the mean of all clients' last models), "sel" (of the last cohort's) and "cloud" (the server's)
      what `load_state_dict` takes.
    - `folder`: where the run was written, or None.
    """

    summary: Summary
    rounds: list[RoundRecord]
    models: dict[str, dict[str, Tensor]]
    folder: Path | None = None

    @property
    def headline(self) -> float:
        """The figure by which runs are compared, of `all`, the mean of all clients' last models: by default the test
        accuracy in percent."""
        return headline(self.summary)

    @property
    def accuracy(self) -> float:
        """The test accuracy of `all` in percent; not a number for a task that has none."""
        return headline(self.summary) if "accuracy" in self.summary else nan

    def __repr__(self) -> str:
        """Three lines: what was run, how good it is, where."""
        summary, settings, best = self.summary, self.summary["config"], headline_of(self.summary)
        clients = f"{_several(settings['clients'], 'client')} ({settings['partition']})"
        scores = [f"{model} {best.shown(value)}" for model, value in figure(summary, best.name).items()]
        others = [
            f"{name} {next(iter(values.values())):.4g}"
            for name, values in (*figures(self.rounds[-1]).items(), ("loss", summary["test_loss"]))
            if name != best.name and values
        ]
        rounds = _several(len(self.rounds), "round")
        if "stopped" in summary:
            rounds += f" of {settings['rounds']} (stopped: {summary['stopped']})"
        return "\n".join(
            [
                f"{summary['method']} on {settings['dataset']}, {clients}, {rounds}",
                f"{evaluated_on(settings)} {best.name}: {', '.join(scores)}; {', '.join(others)}",
                f"{how_run(summary)}; {f'written to {self.folder}' if self.folder else 'not written'}",
            ]
        )

    def frame(self) -> Any:
        """The rounds as a table: a pandas `DataFrame` where pandas is installed, otherwise a dict of numpy arrays.

        Columns are `round`, `loss`, `lr`, `seconds`, ...; what a record holds by name has a column for each, as
        `accuracy.all`, `penalty.relus.0`, `clients.worst_tenth`. What a round did not measure is nan. Lists of clients
        are in `rounds` alone.
        """
        rows = [{"round": record["round"], **numbers(record, ".")} for record in self.rounds]
        order = list(dict.fromkeys(key for record in self.rounds for key in record))
        names = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda n: order.index(n.split(".")[0]))
        columns = {name: np.array([row.get(name, nan) for row in rows]) for name in names}
        if find_spec("pandas") is None:
            return columns
        import pandas

        return pandas.DataFrame(columns)

    def plot(self, path: str | Path | None = None) -> Figure:
        """A figure of the training loss and of the headline over rounds, saved if a path is given."""
        if find_spec("matplotlib") is None:
            raise UserError("plot: matplotlib is not installed; pip install matplotlib")
        from matplotlib.figure import Figure

        best, rounds = headline_of(self.summary), [record["round"] for record in self.rounds]
        drawn = Figure(figsize=(8, 3), layout="constrained")
        drawn.suptitle(repr(self).split("\n")[0], fontsize="medium")
        left, right = drawn.subplots(1, 2)
        left.plot(rounds, [record["loss"] for record in self.rounds])
        left.set(xlabel="round", ylabel="training loss")
        for model in figure(self.summary, best.name):
            curve = {r["round"]: value for r in self.rounds if (value := figure(r, best.name).get(model)) is not None}
            right.plot(curve.keys(), curve.values(), label=model, marker="." if len(curve) < len(rounds) else "")
        right.set(xlabel="round", ylabel=f"{evaluated_on(self.summary['config'])} {best.name}")
        right.legend()
        for axes in (left, right):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if path is not None:
            try:
                drawn.savefig(path, dpi=150)
            except (OSError, ValueError) as error:
                raise UserError(f"plot: {path} cannot be written ({str(error).splitlines()[0]})") from None
        return drawn


def _several(count: object, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
