"""Measures one model on one set of training samples: what to measure, and the results as `flatness.json` has them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.execution.device import device_name
from fedman.flatness.ascent import Ascent
from fedman.flatness.average_sharpness import average_sharpness
from fedman.flatness.blocks import client_eigenvalues, input_norms, layer_hessians
from fedman.flatness.density import density
from fedman.flatness.gauss_newton import GaussNewton
from fedman.flatness.lanczos import Eigenpairs, Lanczos, eigenpairs
from fedman.flatness.landscape import landscape, random_direction
from fedman.flatness.m_sharpness import m_sharpness
from fedman.flatness.operator import Hessian, Operator, Progress, select
from fedman.flatness.trace import hutchinson, hutchpp
from fedman.flatness.worst_case_sharpness import worst_case_sharpness
from fedman.paper.flatness.finished_runs import Follow, Selection
from fedman.runs.version import version
from fedman.tasks import Task

BATCH = {"cpu": 500, "cuda": 5000}  # samples at once by default
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
RADII = {"average": 0.1, "worst_2": 0.5, "worst_inf": 0.002}  # of adaptive sharpness, as used for CNNs in the field
Measured = dict[str, object]  # an entry of `flatness.json`; tensors are written as lists


@dataclass(frozen=True)
class Request:
    """What to measure, and how."""

    top: int = 0  # eigenvalues; 0: none
    ends: str = "top"  # or both
    trace: bool = False
    density: bool = False
    layers: bool = False
    clients: bool = False
    gauss_newton: bool = False
    sharpness: bool = False
    radius: float = 1.0  # times `RADII`
    m: int = 128
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
    keep_graphs: bool | None = None  # None: where they fit in memory easily

    def __post_init__(self) -> None:
        checks: list[tuple[str, object, bool, str]] = [
            ("top", self.top, self.top >= 0, "at least 1 eigenvalue is needed"),
            ("ends", self.ends, self.ends in ("top", "both"), "top or both is needed"),
            ("landscape", self.landscape, self.landscape in ("", "random", "top"), "random or top is needed"),
            ("axes", self.axes, self.axes in (1, 2), "1 or 2 is needed"),
            ("radius", self.radius, 0 < self.radius < float("inf"), "a positive number is needed"),
            ("m", self.m, self.m >= 1, "at least 1 sample is needed"),
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
        """The floating-point type of the arithmetic."""
        return PRECISIONS[self.precision]

    @property
    def measurements(self) -> list[str]:
        """The measurements by name, the cheap ones first."""
        names = ("top", "trace", "gauss_newton", "sharpness", "density", "layers", "clients", "landscape")
        return ["loss", *(name for name in names if getattr(self, name))]


def check(request: Request, model: nn.Module, which: Selection) -> None:
    """Raise an error for a request that this model on these samples cannot fulfil."""
    size = select(model).size
    most = size // 2 if request.ends == "both" else size
    if request.top > most:
        raise UserError(f"top: {request.top}; the model has {size} parameters, 1 to {most} are allowed")
    empty = [i for i, part in enumerate(which.clients) if not len(part)]
    if request.clients and empty:
        raise UserError(f"samples: client {empty[0]} has none of the {len(which.chosen)} drawn; take more")


class Measurer:
    """Makes the measurements of a request for one model on its samples. The loss is the task's, without a penalty."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        data: tuple[Tensor, Tensor],
        clients: Sequence[Tensor],
        request: Request,
        follow: Follow = lambda what, done, total: None,
        directions: Sequence[Tensor] | None = None,
    ) -> None:
        self.task, self.data, self.parts, self.request, self.follow = task, data, clients, request, follow
        self.device = data[0].device
        self.model = model.to(self.device)
        self.options: dict[str, Any] = {
            "dtype": request.dtype,
            "batch_size": request.batch_size or BATCH[self.device.type],
            "tf32": request.precision == "tf32",
            "keep_graphs": request.keep_graphs,
        }
        self.recurrence: Lanczos | None = None  # of `top`, if it was requested
        self.directions = directions  # of the landscape, if another model's are to be used
        self.hessian = Hessian(model, self.task.mean_loss, data, **self.options)

    def run(self) -> Iterator[tuple[str, Measured]]:
        """Each measurement by name as soon as it is made, with how it was made."""
        for name in self.request.measurements:
            start = time.perf_counter()
            found: Measured = getattr(self, name)()
            yield (
                name,
                found
                | {
                    "seconds": round(time.perf_counter() - start, 3),
                    "samples": len(self.data[1]),
                    "precision": self.request.precision,
                    "batch_size": self.options["batch_size"],
                    "device": device_name(self.device),
                    "torch": torch.__version__,
                    "version": version(),
                },
            )

    def loss(self) -> Measured:
        """L and ‖∇L‖ at the model."""
        value, gradient = self.hessian.loss_and_gradient()
        return {"value": float(value), "gradient_norm": float(gradient.norm())}

    def top(self) -> Measured:
        """The largest eigenvalues, or those of both ends."""
        r = self.request
        found = self._eigenpairs(self.hessian, r.top, "eigenvalues", ends="both" if r.ends == "both" else "top")
        if self.directions is None and r.landscape == "top" and r.top >= r.axes:
            self.directions = list(found.vectors[: r.axes])
        self.recurrence = found.lanczos
        return {
            "method": "Lanczos, full re-orthogonalisation",
            "ends": r.ends,
            "tol": r.tol,
            "values": found.values,
            "residuals": found.residuals,
            "converged": int(found.converged.sum()),
            "products": found.products,
        }

    def trace(self) -> Measured:
        """The trace with its standard error."""
        return self._trace(self.hessian, self.recurrence, "trace")

    def density(self) -> Measured:
        """The quadratures of all starts, from which a curve of any width can be drawn, and the first moments."""
        r = self.request
        found = density(self.hessian, starts=r.starts, steps=r.steps, seed=r.seed, progress=self._progress("density"))
        moments, errors = found.moments()
        how = {"method": "stochastic Lanczos quadrature", "starts": r.starts, "steps": r.steps}
        return how | vars(found) | {"moments": moments, "moment_errors": errors}

    def layers(self) -> Measured:
        """Top eigenvalue and trace of every layer's block, and the mean squared norm of the layer's input."""
        norms = input_norms(self.model, self.data, dtype=self.request.dtype, batch_size=self.options["batch_size"])
        blocks: dict[str, Measured] = {}
        products = 0
        for name, block in layer_hessians(self.model, self.task.mean_loss, self.data, **self.options):
            top = self._eigenpairs(block, 1, f"{name}, top")
            blocks[name] = {
                "parameters": block.size,
                "top": float(top.values[0]),
                "residual": float(top.residuals[0]),
                "trace": self._trace(block, top.lanczos, f"{name}, trace"),
                "input_norm": norms.get(name),
            }
            products += block.products
        return {"method": "diagonal blocks: Lanczos and Hutch++", "blocks": blocks, "products": products}

    def clients(self) -> Measured:
        """λ_max of every client's loss, their mean, and λ_max of the mean of their losses."""
        x, y = self.data
        bound = client_eigenvalues(
            self.model,
            self.task.mean_loss,
            [(x[part], y[part]) for part in self.parts],
            tol=self.request.tol,
            seed=self.request.seed,
            progress=self._progress("clients"),
            **self.options,
        )
        return {"method": "Lanczos for each client and for their mean"} | vars(bound)

    def gauss_newton(self) -> Measured:
        """Top eigenvalue and trace of the Gauss-Newton matrix."""
        matrix = GaussNewton(self.model, self.task.mean_loss, self.data, **self.options)
        top = self._eigenpairs(matrix, 1, "Gauss-Newton, top")
        return {
            "method": "Lanczos and Hutch++",
            "top": float(top.values[0]),
            "residual": float(top.residuals[0]),
            "converged": bool(top.converged[0]),
            "trace": self._trace(matrix, top.lanczos, "Gauss-Newton, trace"),
            "products": matrix.products,
        }

    def sharpness(self) -> Measured:
        """Adaptive sharpness: on average, in the worst case, and in the worst case of every m samples."""
        r = self.request
        whole = {"dtype": r.dtype, "batch_size": self.options["batch_size"]}
        rho = {name: r.radius * value for name, value in RADII.items()}
        x, y = self.data
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(r.seed)).to(self.device)
        shuffled = x[order], y[order]  # groups are consecutive
        follow = self._progress("average sharpness")
        average = average_sharpness(
            self.model, self.task.mean_loss, self.data, rho=rho["average"], seed=r.seed, progress=follow, **whole
        )
        measures = {"average": {"value": average.value, "error": average.error, "rho": average.rho}}
        for name, p in (("2", 2), ("inf", math.inf)):
            ascent = Ascent(rho[f"worst_{name}"], p, restarts=0)
            worst = worst_case_sharpness(self.model, self.task.mean_loss, self.data, ascent, **whole)
            follow = self._progress(f"m-sharpness, p={name}")
            groups = m_sharpness(
                self.model, self.task.mean_loss, shuffled, ascent, m=r.m, dtype=r.dtype, progress=follow
            )
            measures[f"worst_{name}"] = {"value": worst.value, "rho": ascent.rho}
            measures[f"m_{name}"] = {"value": groups.value, "rho": ascent.rho}
        method = f"adaptive; {average.pairs} pairs of draws; {ascent.steps} steps of gradient ascent from the model"
        return {"method": method, "seed": r.seed, "m": r.m, "measures": measures}

    def landscape(self) -> Measured:
        """Losses on a grid along random directions, or along top eigenvectors (the first model's, if several)."""
        r = self.request
        if self.directions is None and r.landscape == "top":
            self.directions = list(self._eigenpairs(self.hessian, r.axes, "directions").vectors)
        directions = self.directions
        if directions is None:
            directions = [random_direction(self.model, r.seed + i) for i in range(r.axes)]
        plane = landscape(
            self.model,
            self.task.mean_loss,
            self.data,
            directions,
            span=r.span,
            points=r.points,
            dtype=r.dtype,
            batch_size=self.options["batch_size"],
            progress=self._progress("landscape"),
        )
        kinds = {"random": "random, filter-normalised", "top": "eigenvectors, the largest eigenvalue first"}
        return {"method": kinds[r.landscape], "seed": r.seed} | vars(plane)

    def _eigenpairs(self, operator: Operator, k: int, what: str, ends: Literal["top", "both"] = "top") -> Eigenpairs:
        r = self.request
        return eigenpairs(operator, k, ends=ends, tol=r.tol, seed=r.seed, progress=self._progress(what))

    def _trace(self, operator: Operator, recurrence: Lanczos | None, what: str) -> Measured:
        """By Hutch++ on the basis of a Lanczos recurrence if there is one, else by Hutchinson's method.

        The recurrence started from a vector drawn with `seed`: the probes need another one.
        """
        how: dict[str, Any] = {"rtol": self.request.rtol, "seed": self.request.seed + 1}
        how["progress"] = self._progress(what)
        return vars(hutchinson(operator, **how) if recurrence is None else hutchpp(operator, sketch=recurrence, **how))

    def _progress(self, what: str) -> Progress:
        return lambda done, total: self.follow(what, done, total)
