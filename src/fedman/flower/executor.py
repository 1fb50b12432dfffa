"""Client processes that start warm, for deployments: a SuperExec that forks instead of starting Python anew.

A SuperNode's own SuperExec starts a fresh Python for every message, several seconds of imports each time; Flower 1.41
keeps processes warm only for agents on Kubernetes. A SuperNode started with `--isolation process` leaves the work to a
SuperExec of one's own. This one is Flower's, but for the launch: a server process has imported torch and the client's
code once and is forked for every message. A message still has a process of its own, with no trace of the one before.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from unittest import mock

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import run_clientapp

PRELOAD = ["fedman.flower.client", "fedman.flower.desk", "flwr.supernode.runtime.run_clientapp", "fedman.cli"]
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


class Forking(SubprocessExecutor):
    """Runs ClientApps in forks of a process that has imported what they need."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of one message."""
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        arguments = {
            "runtime_api_address": spec.runtime_api_address,
            "token": spec.token,
            "insecure": spec.insecure,
            "certificates": validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
            "parent_pid": spec.parent_pid,
            "runtime_dependency_install": False,
        }
        self.context.Process(target=run_clientapp, kwargs=arguments).start()
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Take leave of processes that have ended."""
        multiprocessing.active_children()


def main(arguments: list[str]) -> None:
    """`flower-superexec` with its own options and processes that start warm."""
    os.environ.setdefault(POLL, "0.1")
    with (
        mock.patch.object(run_superexec, "get_executor", return_value=Forking()),
        mock.patch.object(sys, "argv", ["flower-superexec", *arguments]),
    ):
        flower_superexec()
