"""The measurements of one model on one set of samples, as plain numbers with how they were made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedman.errors import UserError
from fedman.execution.device import device_name
from fedman.flatness.blocks import client_eigenvalues, input_norms, layer_hessians
from fedman.flatness.density import density
from fedman.flatness.lanczos import Lanczos, eigenpairs
from fedman.flatness.landscape import landscape, random_direction
from fedman.flatness.operator import Hessian, Progress
from fedman.flatness.trace import hutchinson, hutchpp
from fedman.paper.flatness.runs import Samples, Selection
from fedman.runs.version import version

BATCH = {"cpu": 500, "cuda": 5000}  # samples at once, unless told
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
Follow = Callable[[str, int, int], None]  # (what, done, at most)


@dataclass(frozen=True)
class Request:
    """What to measure, and how."""

    top: int = 0  # eigenvalues; 0: none
    ends: str = "top"  # or both
    trace: bool = False
    density: bool = False
    layers: bool = False
    clients: bool = False
    landscape: str = ""  # "random", "top": the kind of directions; "": none
    axes: int = 2
    points: int = 41
    span: float = 1.0
    tol: float = 1e-4
    rtol: float = 0.01
    starts: int = 5
    steps: int = 100
    seed: int = 0
    precision: str = "fp32"
    batch_size: int | None = None
    keep_graphs: bool | None = None  # None: where they fit easily

    def __post_init__(self) -> None:
        checks: list[tuple[str, object, bool, str]] = [
            ("top", self.top, self.top >= 0, "at least 1 eigenvalue is needed"),
            ("ends", self.ends, self.ends in ("top", "both"), "top or both is needed"),
            ("landscape", self.landscape, self.landscape in ("", "random", "top"), "random or top is needed"),
            ("axes", self.axes, self.axes in (1, 2), "1 or 2 is needed"),
            ("points", self.points, 2 <= self.points <= 1001, "2 to 1001 are allowed"),
            ("span", self.span, 0 < self.span < float("inf"), "a positive number is needed"),
            ("tol", self.tol, 0 < self.tol < 1, "a number between 0 and 1 is needed"),
            ("rtol", self.rtol, 0 < self.rtol < 1, "a number between 0 and 1 is needed"),
            ("starts", self.starts, self.starts >= 1, "at least 1 is needed"),
            ("steps", self.steps, self.steps >= 1, "at least 1 is needed"),
            ("seed", self.seed, 0 <= self.seed < 2**31, "0 or more is needed"),
            ("precision", self.precision, self.precision in PRECISIONS, f"{', '.join(PRECISIONS)} are allowed"),
            ("batch-size", self.batch_size, self.batch_size is None or self.batch_size >= 1, "at least 1 is needed"),
        ]
        for name, value, good, allowed in checks:
            if not good:
                raise UserError(f"{name}: {value}; {allowed}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        return PRECISIONS[self.precision]


def check(request: Request, model: nn.Module, which: Selection) -> None:
    """Refuse what this model on these samples cannot give."""
    size = sum(p.numel() for p in model.parameters())
    most = size // 2 if request.ends == "both" else size
    if request.top > most:
        raise UserError(f"top: {request.top}; the model has {size} parameters, 1 to {most} are allowed")
    empty = [i for i, part in enumerate(which.clients) if not len(part)]
    if request.clients and empty:
        raise UserError(f"samples: client {empty[0]} has none of the {len(which.chosen)} drawn; take more")


class Subject:
    """A model on its samples, and the measurements asked for. The loss is the mean cross-entropy alone."""

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        request: Request,
        follow: Follow = lambda what, done, total: None,
        directions: Sequence[Tensor] | None = None,
    ) -> None:
        self.model, self.samples, self.request, self.follow = model.to(samples.x.device), samples, request, follow
        self.data = samples.x, samples.y
        self.device = samples.x.device
        self.options: dict[str, Any] = {
            "dtype": request.dtype,
            "batch_size": request.batch_size or BATCH[self.device.type],
            "tf32": request.precision == "tf32",
            "keep_graphs": request.keep_graphs,
        }
        self.known: Lanczos | None = None  # the recurrence of `top`, where it was asked for
        self.directions = directions  # of the landscape, where another model's are to be used
        self.hessian = Hessian(model, cross_entropy, self.data, **self.options)

    def run(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and result of each measurement as soon as it is known, the cheap ones first."""
        r = self.request
        wanted: list[tuple[str, bool, Callable[[], dict[str, Any]]]] = [
            ("loss", True, self.loss),
            ("top", r.top > 0, self.top),
            ("trace", r.trace, self.trace),
            ("density", r.density, self.density),
            ("layers", r.layers, self.layers),
            ("clients", r.clients, self.clients),
            ("landscape", bool(r.landscape), self.landscape),
        ]
        for name, yes, measure in wanted:
            if yes:
                start = time.perf_counter()
                result = measure()
                yield name, result | self._about(time.perf_counter() - start)

    def loss(self) -> dict[str, Any]:
        """L and ‖∇L‖ at the model."""
        value, gradient = self.hessian.loss_and_gradient()
        return {"value": float(value), "gradient_norm": float(gradient.norm())}

    def top(self) -> dict[str, Any]:
        """The largest eigenvalues, or those of both ends."""
        r = self.request
        ends: Literal["top", "both"] = "both" if r.ends == "both" else "top"
        found = eigenpairs(self.hessian, r.top, ends=ends, tol=r.tol, seed=r.seed, progress=self._bar("eigenvalues"))
        if self.directions is None and r.landscape == "top" and r.top >= r.axes:
            self.directions = list(found.vectors[: r.axes])
        self.known = found.lanczos
        return {
            "method": "Lanczos, full re-orthogonalisation",
            "ends": r.ends,
            "tol": r.tol,
            "values": found.values.tolist(),
            "residuals": found.residuals.tolist(),
            "converged": int(found.converged.sum()),
            "products": found.products,
        }

    def trace(self) -> dict[str, Any]:
        """The trace with its standard error."""
        return self._trace(self.hessian, self.known, "trace")

    def density(self) -> dict[str, Any]:
        """The quadratures of all starts, from which a curve of any width can be drawn."""
        r = self.request
        found = density(self.hessian, starts=r.starts, steps=r.steps, seed=r.seed, progress=self._bar("density"))
        moments, errors = found.moments()
        return {
            "method": "stochastic Lanczos quadrature",
            "starts": r.starts,
            "steps": r.steps,
            "nodes": [t.tolist() for t in found.nodes],
            "weights": [t.tolist() for t in found.weights],
            "moments": moments.tolist(),
            "moment_errors": errors.tolist(),
            "products": found.products,
        }

    def layers(self) -> dict[str, Any]:
        """Top eigenvalue and trace of every layer's block, and the norm of what the layer is fed."""
        norms = input_norms(self.model, self.data, dtype=self.request.dtype, batch_size=self.options["batch_size"])
        blocks, products = {}, 0
        for name, block in layer_hessians(self.model, cross_entropy, self.data, **self.options):
            top = eigenpairs(block, 1, tol=self.request.tol, seed=self.request.seed, progress=self._bar(f"{name}, top"))
            blocks[name] = {
                "parameters": block.size,
                "top": float(top.values[0]),
                "residual": float(top.residuals[0]),
                "trace": self._trace(block, top.lanczos, f"{name}, trace"),
                "input_norm": norms.get(name),
            }
            products += block.products
        return {"method": "diagonal blocks: Lanczos and Hutch++", "blocks": blocks, "products": products}

    def clients(self) -> dict[str, Any]:
        """λ_max of every client's loss, their mean, and λ_max of the mean of their losses."""
        bound = client_eigenvalues(
            self.model,
            cross_entropy,
            [self.samples.of(part) for part in self.samples.clients],
            tol=self.request.tol,
            seed=self.request.seed,
            progress=self._bar("clients"),
            **self.options,
        )
        return {"method": "Lanczos for each client and for their mean"} | vars(bound)

    def landscape(self) -> dict[str, Any]:
        """Losses on a grid along random directions, or along top eigenvectors (the first model's, if several)."""
        r = self.request
        if self.directions is None and r.landscape == "top":
            found = eigenpairs(self.hessian, r.axes, tol=r.tol, seed=r.seed, progress=self._bar("directions"))
            self.directions = list(found.vectors)
        directions = self.directions
        if directions is None:
            directions = [random_direction(self.model, r.seed + i) for i in range(r.axes)]
        plane = landscape(
            self.model,
            cross_entropy,
            self.data,
            directions,
            span=r.span,
            points=r.points,
            chunk=1,
            dtype=r.dtype,
            batch_size=self.options["batch_size"],
            progress=self._bar("landscape"),
        )
        kinds = {"random": "random, filter-normalised", "top": "eigenvectors, the largest eigenvalue first"}
        return {
            "method": kinds[r.landscape],
            "seed": r.seed,
            "offsets": plane.offsets.tolist(),
            "losses": plane.losses.tolist(),
        }

    def _trace(self, operator: Hessian, known: Lanczos | None, what: str) -> dict[str, Any]:
        """By Hutch++ on what a Lanczos recurrence has left, where there is one; its start was drawn with `seed`."""
        how: dict[str, Any] = {"rtol": self.request.rtol, "seed": self.request.seed + 1, "progress": self._bar(what)}
        found = hutchpp(operator, sketch=known, **how) if known is not None else hutchinson(operator, **how)
        return vars(found) | {"interval": list(found.interval)}

    def _bar(self, what: str) -> Progress:
        return lambda done, total: self.follow(what, done, total)

    def _about(self, seconds: float) -> dict[str, Any]:
        return {
            "seconds": round(seconds, 3),
            "samples": len(self.samples.y),
            "precision": self.request.precision,
            "batch_size": self.options["batch_size"],
            "device": device_name(self.device),
            "torch": torch.__version__,
            "version": version(),
        }
