"""`fedman flatness`: the command's options, and what they ask of `fedman.paper.flatness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedman.cli.options import Device
from fedman.cli.output import print_table
from fedman.errors import UserError


def flatness(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", help="folders of finished runs")] = None,
    top: Annotated[int | None, typer.Option(metavar="K", help="the K largest eigenvalues of the Hessian")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="its trace with a standard error")] = False,
    density: Annotated[bool, typer.Option("--density", help="the density of its eigenvalues")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="top eigenvalue and trace of each layer's block")] = False,
    clients: Annotated[bool, typer.Option("--clients", help="top eigenvalue of each client's loss")] = False,
    gauss_newton: Annotated[
        bool, typer.Option("--gauss-newton", help="top eigenvalue and trace of the Gauss-Newton matrix")
    ] = False,
    sharpness: Annotated[
        bool, typer.Option("--sharpness", help="adaptive sharpness: average, worst case, worst case of m samples")
    ] = False,
    radius: Annotated[float, typer.Option(help="of the sharpness: times the default radii")] = 1.0,
    m: Annotated[int, typer.Option("--m", help="of the sharpness: samples of a group")] = 128,
    landscape: Annotated[bool, typer.Option("--landscape", help="the loss around the model")] = False,
    directions: Annotated[str, typer.Option(help="of the landscape: random, or top (eigenvectors)")] = "random",
    axes: Annotated[int, typer.Option(help="of the landscape: 1 or 2")] = 2,
    points: Annotated[int, typer.Option(help="of the landscape along an axis")] = 41,
    span: Annotated[float, typer.Option(help="of the landscape: from -SPAN to SPAN")] = 1.0,
    ends: Annotated[str, typer.Option(help="of the spectrum for --top: top, or both (K of each)")] = "top",
    tol: Annotated[float, typer.Option(help="residual of an eigenvalue, relative to the largest")] = 1e-4,
    rtol: Annotated[float, typer.Option(help="standard error of a trace, relative")] = 0.01,
    starts: Annotated[int, typer.Option(help="of the density's Lanczos runs")] = 5,
    steps: Annotated[int, typer.Option(help="of each of them")] = 100,
    model: Annotated[str, typer.Option(help="all, sel, cloud, or several with commas")] = "all",
    samples: Annotated[int | None, typer.Option(help="training samples, drawn at random", show_default="all")] = None,
    batch_size: Annotated[int | None, typer.Option(help="samples at once: bounds the memory")] = None,
    keep_graphs: Annotated[
        bool | None,
        typer.Option(
            "--keep-graphs/--drop-graphs", help="faster products for memory", show_default="on CUDA, where they fit"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of random vectors and directions")] = 0,
    precision: Annotated[str, typer.Option(help="fp32, fp64, or tf32 on CUDA")] = "fp32",
    device: Device = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="where the data set lies", show_default="as in the run")] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for the pictures", show_default="the run's, or that of all")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="leave out models that have all these measurements already")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="only draw what has been measured")] = False,
    theory: Annotated[bool, typer.Option("--theory", help="check the paper's bounds on a small federation")] = False,
) -> None:
    """How flat the training loss is around finished runs; top eigenvalue and trace by default.

    fedman flatness runs/fedavg runs/fedavg-man --top 200 --density --landscape
    """
    from fedman.cli.progress import work_progress
    from fedman.paper.flatness import command

    models = command.chosen_models(model)
    screen = command.Screen(typer.echo, print_table, work_progress)
    if theory:
        return command.theory(out, seed, screen)
    if plot:
        return command.plot(runs or [], models, out, screen)
    if top is not None and top < 1:
        raise UserError(f"top: {top}; at least 1 eigenvalue is needed")
    nothing = not (top or trace or density or layers or clients or gauss_newton or sharpness or landscape)
    request = command.Request(
        top=top or int(nothing), ends=ends, trace=trace or nothing, density=density, layers=layers, clients=clients,
        gauss_newton=gauss_newton, sharpness=sharpness, radius=radius, m=m,
        landscape=directions if landscape else "", axes=axes, points=points, span=span, tol=tol, rtol=rtol,
        starts=starts, steps=steps, seed=seed, precision=precision, batch_size=batch_size, keep_graphs=keep_graphs,
    )  # fmt: skip
    command.measure(
        runs or [], request, models=models, samples=samples, device=device, data_dir=data_dir, out=out, screen=screen,
        missing=missing,
    )  # fmt: skip
