"""`fedman flower superexec`: starts the processes of ClientApps and ServerApps without importing torch anew.

Flower's own SuperExec starts a new Python for every message, which costs several seconds of imports; Flower 1.41 and
1.42 keep processes warm only for agents on Kubernetes. A SuperNode or SuperLink started with `--isolation process`
leaves the work to another SuperExec, such as this one. It polls for tasks as Flower's does, with Flower's own parts,
and runs apps in forks of a process that has imported torch and fedman. Every message still has its own process.

No process stays behind: apps end when this process does, however it ends, and it ends itself if the SuperNode or
SuperLink that it serves has not answered for a minute.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import Any

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supercore.cli.flower_superexec import _parse_args
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.grpc_health import run_health_server_grpc_no_tls
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.logger import mirror_output_to_queue
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec.executor import SubprocessExecutor
from flwr.supercore.superexec.plugin import AutoExecPlugin
from flwr.supercore.telemetry import EventType
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.superlink.runtime import run_serverapp
from flwr.supernode.runtime.run_clientapp import run_clientapp

from fedman.errors import UserError

PATIENCE = 60.0  # seconds without an answer from the SuperNode or SuperLink
GRACE = 3.0  # seconds for apps to end after a SIGTERM


def main(arguments: list[str]) -> None:
    """Poll for tasks and start them, until a signal ends the process. The options are those of `flower-superexec`."""
    parser = _parse_args()
    parser.prog = "fedman flower superexec"
    given = parser.parse_args(arguments)
    address, root, insecure = given.runtime_api_address, given.root_certificates, given.insecure
    install, health = given.runtime_dependency_install, given.health_server_address
    interceptors: list[ProtobufClientInterceptor] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    try:
        secret = load_superexec_auth_secret(given.superexec_auth_secret_file)
    except ValueError as error:
        raise UserError(f"superexec-auth-secret-file: {error}") from None
    if secret:
        protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        interceptors.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=protected))
    if given.parent_pid is not None:
        start_parent_process_monitor(given.parent_pid)
    certificates = validate_and_resolve_root_certificates(root, insecure)
    retry = make_simple_http_retry_invoker()
    retry.max_time = PATIENCE
    client = RuntimeHttpClient.from_server_address(address, insecure, certificates, interceptors, retry_invoker=retry)
    register_signal_handlers(
        EventType.RUN_SUPEREXEC_LEAVE,
        "SuperExec terminated gracefully.",
        grpc_servers=[run_health_server_grpc_no_tls(health)] if health else [],
        exit_handlers=[client.close, _end_apps],
    )
    warm = multiprocessing.get_context("forkserver")
    imported = [name for name in sys.modules if name.startswith("fedman.")]  # a fork imports the command again
    warm.set_forkserver_preload(["fedman.flower.app", "fedman.flower.client", "fedman.flower.worker", *imported])
    options = {
        "runtime_api_address": address,
        "insecure": insecure,
        "certificates": certificates,
        "runtime_dependency_install": install,
    }
    others = AutoExecPlugin(address, insecure, root, install, executor=SubprocessExecutor())
    interval = float(os.environ.get("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1"))
    while True:
        multiprocessing.active_children()  # reaps finished processes
        try:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=others.supported_task_types))
        except httpx.HTTPError as error:
            _end_apps()
            raise UserError(f"runtime-api-address: {address} does not answer ({error})") from None
        if found.token and found.task.type in APPS:
            app = APPS[found.task.type]
            warm.Process(target=_run_app, args=[app], kwargs={**options, "token": found.token}).start()
        elif found.token:
            others.launch_task(found.token, found.task)
        time.sleep(interval)


def _end_apps() -> None:
    """End the apps at work, with SIGTERM first and then SIGKILL."""
    apps = multiprocessing.active_children()
    for app in apps:
        app.terminate()
    end = time.monotonic() + GRACE
    for app in apps:
        app.join(max(0.0, end - time.monotonic()))
        if app.is_alive():
            app.kill()
            app.join()


def _run_app(app: Callable[..., None], **options: Any) -> None:
    """In a fork: run an app, which ends when the SuperExec does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    app(**options)


def _end_with_parent() -> None:
    """Wait for the SuperExec's end, also for one by SIGKILL; then as `_end_apps` would."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _run_serverapp(**options: Any) -> None:
    """A ServerApp whose output is also sent to the SuperLink, as the command `flwr-serverapp` does."""
    lines: Queue[str | None] = Queue()
    mirror_output_to_queue(lines)
    run_serverapp(log_queue=lines, **options)


APPS: dict[str, Callable[..., None]] = {TaskType.CLIENT_APP: run_clientapp, TaskType.SERVER_APP: _run_serverapp}
