"""`fedman flower simulate`: many clients on this machine or a Ray cluster, in Flower's simulation engine."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from flwr.supercore.logger import update_console_handler

from fedman.config import PARTS, Config
from fedman.data.catalog import own_files
from fedman.errors import Interrupted, UserError, one_line
from fedman.flower import client
from fedman.flower.node import ALLOW
from fedman.flower.server import refuse_simulated, serve
from fedman.flower.server_options import OPTIONS_FILE, ServerOptions
from fedman.flower.worker import SHARED
from fedman.runs.experiment import finished_result
from fedman.runs.records import Progress
from fedman.runs.result import Result
from fedman.runs.signals import stop_on_signal


def simulate(
    config: Config,
    options: ServerOptions,
    *,
    out: str | Path,
    resume: bool = False,
    device: str = "auto",
    cpus: float = 1.0,
    gpus: float = 0.0,
    progress: Progress = lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
) -> Result:
    """Run a configuration with one simulated node per client, which uses `cpus` and `gpus` while it works.

    What clients remember is stored in OUT/memory until the run is done. With $RAY_ADDRESS the clients work on that
    cluster, whose machines must see OUT and the data under the same paths.
    """
    for key in ("sizes", "roster"):
        if getattr(options, key) is not None:
            raise UserError(f"{key}: simulated clients have no data and no keys of their own; leave it out")
    options = options.model_copy(update={"bind_keys": False})  # Ray's nodes have other keys after a resume
    refuse_simulated(config)
    if done := finished_result(config, out, resume):
        return done
    stopping, results = threading.Event(), list[Result]()
    server = ServerApp()
    memory = Path(out).absolute() / "memory"
    _start_ray(config, memory, cpus, gpus)
    try:
        with stop_on_signal(stopping) as caught:

            @server.main()
            def main(grid: Grid, context: Context) -> None:
                end = (stopping, caught)
                results.append(serve(
                    grid, config, options, out=out, resume=resume, device=device, stopping=end,
                    progress=progress, warn=warn,
                ))  # fmt: skip

            update_console_handler(level=logging.CRITICAL)
            resources = {"client_resources": {"num_cpus": cpus, "num_gpus": gpus}}
            run_simulation(server, client.app, config.clients, backend_config=resources)  # type: ignore[arg-type]
    except Interrupted as error:
        how = f"; go on with: fedman flower simulate --out {shlex.quote(str(out))} --resume"
        raise Interrupted(error.signum, f"{error}{how if (memory.parent / OPTIONS_FILE).exists() else ''}") from None
    finally:
        ray.shutdown()
    shutil.rmtree(memory, ignore_errors=True)
    return results[0]


def _start_ray(config: Config, memory: Path, cpus: float, gpus: float) -> None:
    """Start Ray, or connect to a cluster, with the clients' settings in their environment."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.getcwd())))  # for a user's own parts
    variables = {"FEDMAN_MEMORY": str(memory), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    variables[ALLOW] = ",".join(str(getattr(config, key)) for key in (*PARTS, "model", "partition"))
    if config.data_dir:
        variables["FEDMAN_DATA"] = str(Path(config.data_dir).expanduser().absolute())
    if own := own_files(config.dataset):
        variables[SHARED] = f"{own[0]}:{own[1].absolute()}"
    warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
    # Ray starts its dashboard's process even with include_dashboard=False, and that process asks cloud providers'
    # servers which cloud it runs in. At an address that is not this machine's (RFC 5737) it cannot start, and Ray
    # goes on without it, with an error message that CRITICAL hides.
    try:
        ray.init(
            include_dashboard=False, dashboard_host="192.0.2.1", dashboard_port=8265,
            runtime_env={"env_vars": variables}, log_to_driver=False, logging_level=logging.CRITICAL,
        )  # fmt: skip
    except ConnectionError as error:
        raise UserError(f"RAY_ADDRESS: {os.environ.get('RAY_ADDRESS')}: {one_line(error)}") from None
    have = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
    if have["CPU"] < cpus or have["GPU"] < gpus:
        ray.shutdown()
        raise UserError(
            f"cpus, gpus: a client would take {cpus:g} and {gpus:g}, Ray has {have['CPU']:g} and {have['GPU']:g}"
        )
