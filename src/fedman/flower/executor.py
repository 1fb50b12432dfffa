"""App processes that start warm, for deployments: a SuperExec that forks instead of starting Python anew.

A SuperNode's own SuperExec starts a fresh Python for every message, several seconds of imports each time; Flower 1.41
keeps processes warm only for agents on Kubernetes. A SuperNode (or SuperLink) started with `--isolation process` leaves
the work to a SuperExec of one's own. This one is Flower's, but for the launch: a server process has imported torch and
the apps' code once and is forked for every message. A message still has a process of its own, with no trace of the one
before.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from unittest import mock

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

PROCESSES: dict[TaskType, Callable[[], None]] = {
    TaskType.CLIENT_APP: flwr_clientapp,
    TaskType.SERVER_APP: flwr_serverapp,
}
PRELOAD = ["fedman.cli.commands", *(f"fedman.flower.{name}" for name in ("app", "client", "executor", "worker"))]
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


class Forking(SubprocessExecutor):
    """Runs apps in forks of a process that has imported what they need."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of one message or run."""
        if spec.task_type not in PROCESSES:
            return super().launch(spec)
        words = ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        words += ["--parent-pid", str(spec.parent_pid)]
        if spec.insecure:
            words.append("--insecure")
        elif spec.root_certificates_path is not None:
            words += ["--root-certificates", spec.root_certificates_path]
        self.context.Process(target=_run, args=(spec.task_type, words)).start()
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Take leave of processes that have ended."""
        multiprocessing.active_children()


def _run(task: TaskType, words: list[str]) -> None:
    sys.argv = [task.value, *words]
    PROCESSES[task]()


def main(arguments: list[str]) -> None:
    """`flower-superexec` with its own options and processes that start warm."""
    os.environ.setdefault(POLL, "0.1")
    with (
        mock.patch.object(run_superexec, "get_executor", return_value=Forking()),
        mock.patch.object(sys, "argv", ["flower-superexec", *arguments]),
    ):
        flower_superexec()
