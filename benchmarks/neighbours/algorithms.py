"""Released code and fedman, the same algorithm from the same start: are the models after every round the same?

    python algorithms.py CHECKOUTS [NAME ...]

CHECKOUTS is the folder of the clones (README.md has the commands), NAME those to play, by default all. Played on a
small network in float64, with the same start, batches and rates, cohorts of two to four of six clients and a clip that
acts (setting.py). A line says the code, its algorithm, fedman's keys, where needed what is not as in fedman
(differences.py), the largest relative difference of the models over all rounds, and whether they are equal, which it
means when that is below 1e-13. The exit code is 1 where a line is not what docs/algorithms.md and docs/man.md say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import differences
import torch
from released import (
    ALPHA,
    BETA2,
    MOMENTUM,
    MU,
    RHO,
    RHO_LOCAL,
    SERVER_LR,
    TAU,
    FedACG,
    FedDC,
    FedDecorr,
    FedDyn,
    FedGloSS,
    FedLESAM,
    FedMAN,
    FLSimulator,
)
from setting import UNEQUAL_SIZES, Setting
from torch import Tensor, nn

import fedman
from fedman.algorithms import ALGORITHMS, Algorithm
from fedman.models import build
from fedman.penalties import MAN, HiddenMAN
from fedman.penalties.man import ActivationNorm
from fedman.penalties.measures import mean_square

TOLERANCE = 1e-13
ADAM = f"server_lr={SERVER_LR} beta1={MOMENTUM} beta2={BETA2} tau={TAU}"
DYN, SAM, BOTH = f"alpha={ALPHA}", f"rho={RHO}", f"alpha={ALPHA} rho={RHO}"
GLOSS = f"alpha={ALPHA} rho={RHO} rho_local={RHO_LOCAL}"
TINY = MAN(man_logits=False, man_variant="tiny-code")


@dataclass(frozen=True)
class Case:
    """One algorithm of released code, and fedman's with these keys, or another class of the same keys."""

    released: str
    keys: str
    equal: bool = True
    but: type[Algorithm] | None = None
    options: dict[str, float] = field(default_factory=dict)  # of the released code alone

    @property
    def algorithm(self) -> Algorithm:
        name, *words = self.keys.split()
        values = {key: value == "true" if value in ("true", "false") else float(value) for key, value in
                  (word.split("=") for word in words)}  # fmt: skip
        return (self.but or ALGORITHMS[name])(**values)

    @property
    def line(self) -> str:
        return f"{self.keys}, but {self.but.__doc__}" if self.but else self.keys


@dataclass(frozen=True)
class Difference:
    """A line of the output: what is compared with what, how far they are apart, and what the documents say."""

    code: str
    what: str
    keys: str
    relative: float
    equal: bool

    @property
    def as_documented(self) -> bool:
        return (self.relative < TOLERANCE) == self.equal

    def __str__(self) -> str:
        found = "equal" if self.relative < TOLERANCE else "not equal"
        wrong = "" if self.as_documented else ": THE DOCUMENTS SAY OTHERWISE"
        return f"{self.code} | {self.what} | {self.keys} | {self.relative:.0e} | {found}{wrong}"


def compare(neighbour: type, setting: Setting, cases: list[Case], root: Path) -> Iterator[Difference]:
    """The cases of one released code in one setting."""
    code = neighbour(root)
    for case in cases:
        theirs, ours = code.play(setting, case.released, **case.options), setting.fedman(case.algorithm)
        apart = max(relative(a, b) for a, b in zip(theirs, ours, strict=True))
        yield Difference(neighbour.folder, case.released, case.line, apart, case.equal)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def fl_simulator(root: Path) -> Iterator[Difference]:
    """By authors of FedSpeed and FedSMOO."""
    prox = {"lamb": MU}
    cases = [
        Case("FedAvg", "fedavg"),
        Case("FedCM", f"fedcm {DYN}"),
        Case("MoFedSAM", f"mofedsam {BOTH}"),
        Case("FedGamma", f"fedgamma {SAM}"),
        Case("FedGamma", f"fedgamma {SAM} decayed=false", equal=False),
        Case("SCAFFOLD", "scaffold decayed=true"),
        Case("SCAFFOLD", "scaffold", equal=False),
        Case("FedDyn", f"feddyn {DYN}"),
        Case("FedSpeed", f"fedspeed {BOTH}"),
        Case("FedSMOO", f"fedsmoo {BOTH} mu_alone=true"),
        Case("FedSMOO", f"fedsmoo {BOTH}", equal=False),
        Case("FedSAM", f"fedsam {SAM}", equal=False),
        Case("FedSAM", f"fedsam {SAM}", but=differences.Offset),
        Case("FedAdam", f"fedadam {ADAM}", equal=False, options={"global_learning_rate": SERVER_LR}),
        Case("FedAdam", f"fedadam {ADAM}", but=differences.FromZero, options={"global_learning_rate": SERVER_LR}),
        Case("FedProx", f"fedprox mu={MU}", equal=False, options=prox),
        Case("FedProx", f"fedprox mu={MU}", but=differences.Outside, options=prox),
    ]
    yield from compare(FLSimulator, Setting(), cases, root)


def fedlesam(root: Path) -> Iterator[Difference]:
    cases = [
        Case("FedLESAM", f"fedlesam {SAM}", equal=False),
        Case("FedLESAM", f"fedlesam {SAM} last_round=true", equal=False),
        Case("FedLESAM", f"fedlesam {SAM} last_round=true", but=differences.IndexedLESAM),
        Case("FedLESAM_D", f"fedlesam-d {BOTH}", equal=False),
        Case("FedLESAM_D", f"fedlesam-d {BOTH} last_round=true", equal=False),
        Case("FedLESAM_D", f"fedlesam-d {BOTH} last_round=true", but=differences.IndexedLESAMD),
    ]
    yield from compare(FedLESAM, Setting(), cases, root)


def feddyn(root: Path) -> Iterator[Difference]:
    """With clients of unequal size."""
    cases = [
        Case("FedAvg", "fedavg"),
        Case("SCAFFOLD", "scaffold"),
        Case("FedDyn", f"feddyn {DYN}"),
        Case("FedProx", f"fedprox mu={MU}"),
    ]
    yield from compare(FedDyn, Setting(UNEQUAL_SIZES), cases, root)


def feddc(root: Path) -> Iterator[Difference]:
    """With clients of unequal size."""
    yield from compare(FedDC, Setting(UNEQUAL_SIZES), [Case("FedDC", f"feddc {DYN}")], root)


def fedman_authors(root: Path) -> Iterator[Difference]:
    """The MAN authors' code, with MAN and with clients of unequal size; and its models and their term."""
    cases = [
        Case("FedAvgReg", "fedavg"),
        Case("FedDyn", f"feddyn {DYN}"),
        Case("FedDC", f"feddc {DYN}"),
        Case("FedSpeed", f"fedspeed {BOTH} stale_ascent=true"),
        Case("FedSpeed", f"fedspeed {BOTH}", equal=False),
        Case("SAM", f"fedsam {SAM}"),
        Case("ASAM", "fedasam rho=0.5 eta=0.2"),  # written in the code
    ]
    yield from compare(FedMAN, Setting(UNEQUAL_SIZES, zeta=0.01), cases, root)
    yield from models_and_terms(FedMAN(root))


def models_and_terms(code: FedMAN) -> Iterator[Difference]:
    """The authors' models: their logits, and the MAN term that they return."""
    cnn, tiny = ("cifar_cnn", (3, 32, 32)), ("tiny_cnn", (3, 64, 64))
    layers = dict.fromkeys((f"relus.{i}" for i in range(5)), mean_square) | {"relus.2": differences.pooled}
    after = f"man_logits=false, but {differences.pooled.__doc__}"
    for folder, name, (ours, shape), classes, measure, keys, equal in (
        ("code", "cifar10", cnn, 10, HiddenMAN().attach, "man_logits=false", True),
        ("code", "cifar100", cnn, 100, HiddenMAN().attach, "man_logits=false", True),
        ("code", "ConvNet", tiny, 200, TINY.attach, "man_logits=false man_variant=tiny-code", True),
        ("man_code_sam", "cifar100", cnn, 100, HiddenMAN().attach, "man_logits=false", True),
        ("man_code_sam", "ConvNet", tiny, 200, HiddenMAN().attach, "man_logits=false", False),
        ("man_code_sam", "ConvNet", tiny, 200, partial(ActivationNorm, output=False, layers=layers), after, True),
    ):
        theirs, mine, x = code.model(folder, name), build(ours, shape, classes), torch.randn(3, *shape)
        for p, q in zip(theirs.parameters(), mine.parameters(), strict=True):
            q.data.copy_(p.data)
        terms = measure(mine)
        (logits, squares, _), expected = theirs(x), mine(x)
        term, measured = sum(s.mean() for s in squares), sum(terms.terms().values())
        apart = max(relative(logits, expected), relative(term, measured))
        yield Difference("fedMAN", f"{folder}, {name} and its MAN", f"model={ours} {keys}", apart, equal)


def fedacg(root: Path) -> Iterator[Difference]:
    cases = [
        Case("FedACG", f"fedacg mu={MU} server_momentum={MOMENTUM}"),
        Case("FedACG", f"fedacg mu={MU / 2} server_momentum={MOMENTUM}", equal=False),
        Case("FedAvgM", f"fedavgm server_momentum={MOMENTUM}"),
        Case("FedAdam", f"fedadam {ADAM}"),
    ]
    yield from compare(FedACG, Setting(), cases, root)


def fedgloss(root: Path) -> Iterator[Difference]:
    cases = [
        Case("FedGloSS", f"fedgloss {GLOSS}", equal=False),
        Case("FedGloSS", f"fedgloss {GLOSS}", but=differences.TwiceDivided),
    ]
    yield from compare(FedGloSS, Setting(clip=1e9), cases, root)


def feddecorr(root: Path) -> Iterator[Difference]:
    """Its loss of random features, and fedman's term times (B − 1)²/B · d/(d − 1)."""
    for batch, d in ((64, 512), (50, 192)):
        features = 1e4 * torch.randn(batch, d) @ torch.randn(d, d)  # so large that 1e-8 in their variance is nothing
        model = nn.Sequential(nn.Identity(), nn.Linear(d, 3))
        terms = fedman.FedDecorr().attach(model)
        model(features)
        factor = (batch - 1) ** 2 / batch * d / (d - 1)
        ours = factor * sum(terms.terms().values())
        yield Difference("FedDecorr", f"loss, B={batch} d={d}", f"{factor:.2f} times penalty=feddecorr",
                         relative(FedDecorr(root).loss(features), ours), True)  # fmt: skip


NEIGHBOURS: dict[str, Callable[[Path], Iterator[Difference]]] = {
    "FL-Simulator": fl_simulator,
    "FedLESAM": fedlesam,
    "FedDyn": feddyn,
    "FedDC": feddc,
    "fedMAN": fedman_authors,
    "FedACG": fedacg,
    "fedgloss": fedgloss,
    "FedDecorr": feddecorr,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", default=[], help=", ".join(NEIGHBOURS))
    given = parser.parse_args()
    if unknown := set(given.names) - set(NEIGHBOURS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(NEIGHBOURS)}")
    names = given.names or list(NEIGHBOURS)
    if missing := [name for name in names if not (given.checkouts / name).is_dir()]:
        parser.error(f"{given.checkouts} has no {', '.join(missing)}")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    good = True
    for name in names:
        for found in NEIGHBOURS[name]((given.checkouts / name).resolve()):
            print(found, flush=True)
            good &= found.as_documented
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
