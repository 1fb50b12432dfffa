"""`fedman flatness --theory`: both sides of the paper's bounds on a CNN small enough for dense Hessians.

A federation of ten clients learns the embedded digits by FedAvg, once with MAN and once without. After its last round
every bound is evaluated in float64; every few rounds each layer's λ_max and the norm of its input are recorded.
Beside them stand a net on which the paper's reading of convolutions is no bound, and the convergence of FedAvg.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedman.config import Config, resolve
from fedman.data import Dataset, load, partition
from fedman.data.augment import channels_first, normalise
from fedman.flatness.blocks import client_eigenvalues, input_norms, layer_hessians
from fedman.flatness.lanczos import eigenpairs
from fedman.flatness.theory import Bound, gershgorin, layer_check
from fedman.models.convnet import ConvNet
from fedman.models.parameters import ParameterLayout
from fedman.paper.flatness import convergence
from fedman.paper.flatness.convergence import Convergence
from fedman.paper.flatness.finished_runs import Follow
from fedman.runs.build import build
from fedman.training.aggregate import collect
from fedman.training.federation import Assignment
from fedman.training.round import Schedule

ZETA, CLIENTS, ROUNDS, EVERY = 0.15, 10, 40, 4
SAMPLES = 32  # of the dense Hessians
FOLLOWED = 256  # samples on which the layers are measured every few rounds
ROUNDING = 1e-9
CONSTANT = "constant before ‖a‖²"

Paths = dict[str, list[tuple[int, float, float]]]


@dataclass(frozen=True)
class Statement:
    """left ≤ right at one layer; if right is None, left is a figure without a bound.

    What is not `proved` may fail: it is the paper's reading, or what is left of a bound without one of its terms.
    """

    where: str
    about: str
    left: float
    right: float | None
    holds: bool | None
    proved: bool = True


@dataclass(frozen=True)
class Demonstration:
    """For each run, the statements after its last round, and {layer: [(round, mean ‖a‖², λ_max), …]}."""

    statements: dict[str, list[Statement]]
    paths: dict[str, Paths]
    counterexample: Bound
    convergence: list[Convergence]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The statements as header and rows, the runs side by side."""
        rows = [
            [f"{lines[0].where}: {lines[0].about}", *map(_sides, lines), _verdict(lines)]
            for lines in zip(*self.statements.values(), strict=True)
        ]
        return ["", *(f"{run}: left ≤ right (ratio)" for run in self.statements), ""], rows

    def theorems(self) -> tuple[list[str], list[list[str]]]:
        """The paper's statements in its order: what it says, what is evaluated, both sides, whether it holds."""

        def sides(where: str, about: str) -> tuple[str, list[Statement]]:
            """Of one statement in all runs: both sides, and the statements. Of several layers the tightest."""
            found = [
                max((s for s in lines if where in s.where and about in s.about), key=_ratio)
                for lines in self.statements.values()
            ]
            texts = [f"{run} {_sides(s)}" for run, s in zip(self.statements, found, strict=True)]
            return "; ".join(texts), found

        def row(name: str, says: str, evaluated: str, where: str, about: str) -> list[str]:
            text, found = sides(where, about)
            return [name, says, evaluated, text, _verdict(found)]

        against, patches = self.counterexample, "mean λ_max(M̃)·‖U‖²"
        rows = [
            row("clients", "λ_max of the mean loss ≤ mean of the clients' λ_max", "the same", "clients", "of the mean"),
            row("layers", "λ_max is bounded through the layers", "with the off-diagonal blocks", "all layers", "+ R_l"),
            row("layers", "the same", "the largest layer's λ_max alone", "all layers", "alone"),
            row("lemma, linear layers", "H = mean M ⊗ a aᵀ", "‖H − mean M ⊗ a aᵀ‖ / ‖H‖", "linears", "‖H −"),
            row("theorem, linear layers", "λ_max ≤ α·mean ‖a‖², in the paper without the mean's 1/B",
                "mean λ_max(M)·‖a‖², every sample with its own M", "linears", "λ_max(M)·‖a‖²"),
            row("Lemma 2, convolutions", "H is a Kronecker product", "relative error if positions are independent",
                "convs", "positions independent"),
            row("theorem, convolutions", "λ_max ≤ α·‖a‖²", "mean λ_max(M)·‖U‖², U the patches", "convs", "(M)·‖U‖²"),
            row("theorem, convolutions", "the same by one product with a mean M̃", patches, "convs", "λ_max(M̃)"),
            ["theorem, convolutions", "the same by one product with a mean M̃",
             f"{patches}: a convolution, then the mean over positions, on constant images",
             f"{against.left:.3g} ≤ {against.right:.3g} ({against.left / against.right:.3g})",
             "holds" if against.holds else "fails"],
            ["equation 7", "a constant times ‖a‖²", "the constant: mean λ_max(M), weighted by ‖a‖²",
             self._constants(), "depends on the weights"],
        ]  # fmt: skip
        says = "with A1 to A3 the gradient of F = f + ζR becomes small"
        for c in self.convergence:
            setting = f"ηKL = {c.reach:.2f}, σ² = {c.difference:.2f}"
            evaluated = f"{c.problem}: mean ‖∇F‖² ≤ 4(F − F*)/(ηKT) + 9(ηKL)²σ², {setting}"
            sides_text = f"{c.left:.3g} ≤ {c.right:.3g} ({c.left / c.right:.3f})"
            rows.append(["Proposition 1", says, evaluated, sides_text, "holds" if c.holds else "FAILS"])
        return ["", "the paper", "evaluated", "left ≤ right (ratio)", ""], rows

    def _constants(self) -> str:
        """The constants of the layers in both runs, and how those of the second compare with the first's."""
        both = [[s.left for s in lines if s.about == CONSTANT] for lines in self.statements.values()]
        texts = [f"{run} {min(v):.2g} to {max(v):.2g}" for run, v in zip(self.statements, both, strict=True)]
        ratios = [after / before for before, after in zip(both[0], both[-1], strict=True)]
        return f"{'; '.join(texts)}: {min(ratios):.2g} to {max(ratios):.2g} times, layer by layer"


def demonstrate(seed: int, follow: Follow) -> Demonstration:
    """Train both federations and check the theory on them."""
    statements: dict[str, list[Statement]] = {}
    paths: dict[str, Paths] = {}
    for zeta in (0.0, ZETA):
        keys = {"clients": CLIENTS, "participation": 0.5, "cohort": "fixed", "rounds": ROUNDS}
        config = resolve({"dataset": "digits", "zeta": zeta, "seed": seed, **keys})
        data = load(config.dataset)
        x = channels_first(normalise(torch.as_tensor(data.x_train), data.mean, data.std, torch.float64)).contiguous()
        y = torch.as_tensor(data.y_train)
        path = paths[config.method] = {}
        seen = x[:FOLLOWED], y[:FOLLOWED]
        for t, model in _rounds(config, data):
            follow(f"{config.method}: round", t, ROUNDS)
            norms = input_norms(model, seen, dtype=torch.float64, batch_size=None)
            for name, block in layer_hessians(model, cross_entropy, seen, dtype=torch.float64):
                top = float(eigenpairs(block, 1).values[0])
                path.setdefault(name, []).append((t, norms[name], top))
        clients = partition.clients_of(data, config.partition, config.clients, seed=config.partition_seed)
        parts = [torch.as_tensor(part[:SAMPLES]) for part in clients]
        shares = [(x[part], y[part]) for part in parts]
        statements[config.method] = check(model, x[:SAMPLES], y[:SAMPLES], shares)
    converged = [convergence.check(problem, seed=seed) for problem in convergence.PROBLEMS]
    return Demonstration(statements, paths, counterexample(), converged)


def counterexample() -> Bound:
    """One Kronecker product with a mean M̃ against λ_max: too small by the number of positions, here 16.

    A convolution, then the mean over its P positions, on constant images: every position has the same patch u and the
    same M[p, q] = C/P², so that H = C ⊗ u uᵀ, while M̃ = C/P² and Σ_p ‖u_p‖² = P‖u‖².
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = layer_check(model, cross_entropy, torch.ones(2, 1, 6, 6), torch.tensor([0, 1]), "0").one_product
    assert found is not None
    return found


def check(model: nn.Module, x: Tensor, y: Tensor, clients: list[tuple[Tensor, Tensor]]) -> list[Statement]:
    """Every statement of the theory at one model."""

    def bound(where: str, b: Bound, proved: bool = True) -> Statement:
        return Statement(where, b.name, b.left, b.right, b.holds, proved)

    lines = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            found = layer_check(model, cross_entropy, x, y, name)
            conv = isinstance(module, nn.Conv2d)
            form = "mean (I⊗U) M (I⊗U)ᵀ" if conv else "mean M ⊗ a aᵀ"
            lines.append(Statement(name, f"‖H − {form}‖ / ‖H‖", found.identity, ROUNDING, found.identity <= ROUNDING))
            if conv:
                lines.append(Statement(name, "the same, positions independent", found.approximation, None, None))
            lines += [bound(name, b) for b in found.bounds]
            if found.one_product:
                lines.append(bound(name, found.one_product, proved=False))
            lines.append(Statement(f"layer {name}", CONSTANT, found.constant, None, None))
    discs = gershgorin(model, cross_entropy, x, y)
    lines.append(bound("all layers", discs.top))
    alone = Bound("λ_max ≤ max λ_max(H_ll) alone", discs.top.left, max(discs.blocks))
    lines.append(bound("all layers", alone, proved=False))
    lines.append(Statement("all layers", "eigenvalues outside all intervals", discs.outside, 0.0, not discs.outside))
    tops = client_eigenvalues(model, cross_entropy, clients, tol=1e-8, dtype=torch.float64)
    lines.append(bound(f"{len(clients)} clients", Bound("λ_max of the mean ≤ mean of λ_max", tops.top, tops.mean)))
    return lines


def _rounds(config: Config, data: Dataset) -> Iterator[tuple[int, nn.Module]]:
    """The mean of all clients' models, every few rounds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = ConvNet(data.shape, data.classes, (3, 4), kernel=3, padding=1, hidden=(8,))
    built = build([config], data, "cpu", model=model)
    (federation,), backend = built.federations, built.in_process
    schedule = Schedule(config.clients, config.participation, config.cohort, config.schedule_seed)
    state = federation.start()
    for t in range(config.rounds + 1):
        if t % EVERY == 0:
            mean = copy.deepcopy(model).double()
            mean.load_state_dict(ParameterLayout.of(model).unflatten(federation.models(state)["all"]))
            yield t, mean
        if t < config.rounds:
            now = [Assignment(federation, state, schedule.round(t, federation.training))]
            list(collect(now, backend.train(now, [])))


def _sides(line: Statement) -> str:
    """Both sides and their ratio as text."""
    if line.right is None:
        return f"{line.left:.3g}"
    ratio = f" ({line.left / line.right:.3f})" if line.right > ROUNDING else ""
    return f"{line.left:.3g} ≤ {line.right:.3g}{ratio}"


def _ratio(line: Statement) -> float:
    """left over right; left itself where there is no bound but rounding."""
    return line.left / line.right if line.right is not None and line.right > ROUNDING else line.left


def _verdict(lines: Sequence[Statement]) -> str:
    """One word; capitals for what cannot be."""
    if any(line.holds is None for line in lines):
        return "no bound"
    if all(line.holds for line in lines):
        return "holds"
    return "FAILS" if any(line.proved and not line.holds for line in lines) else "fails"
