"""The stacks of a sweep as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedman.errors import UserError, one_line
from fedman.runs.workers import ATTEMPTS, Stack, Workers, play


class RayCluster(Workers):
    """A task for each stack, with a GPU of its own where the device is one. The folder of the sweep must be one that
    all machines share, such as a network drive."""

    def __init__(self, address: str, out: Path, device: str) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's next default; it warns without one
        try:
            import ray
        except ImportError:
            raise UserError("--ray: Ray is not installed; pip install 'ray[default]'") from None
        self.ray, self.out, self.device = ray, out.resolve(), device
        try:
            _require_listener(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"--ray: no cluster at {address!r} ({one_line(error)})") from None
        task = ray.remote(_play)
        gpus = 1 if device == "cuda" else 0
        self._task = task.options(max_retries=ATTEMPTS - 1, num_cpus=1, num_gpus=gpus)
        self._running: dict[Any, Stack] = {}
        self._token = self._leave_token()

    def _leave_token(self) -> Path:
        """A file by which a task knows that it sees the same folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        token = self.out / f".shared-{uuid.uuid4().hex}"
        token.touch()
        return token

    @property
    def is_free(self) -> bool:
        return True  # Ray keeps what waits

    def start(self, stack: Stack) -> None:
        shared = Stack(stack.cells, stack.out.resolve())
        self._running[self._task.remote(shared, self.device, str(self._token))] = stack

    def ended(self, seconds: float) -> list[list[str]]:
        ready, _ = self.ray.wait(list(self._running), num_returns=len(self._running), timeout=seconds)
        found = []
        for task in ready:
            stack = self._running.pop(task)
            try:
                answer = self.ray.get(task)
            except self.ray.exceptions.RayError as error:
                raise UserError(f"{stack.names}: lost on the cluster ({type(error).__name__})") from None
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    def stop(self, signum: int) -> None:
        for task in self._running:
            self.ray.cancel(task, force=False)  # KeyboardInterrupt there, which saves a checkpoint like Ctrl-C
        with suppress(self.ray.exceptions.RayError):
            self.ray.wait(list(self._running), num_returns=len(self._running), timeout=60)
        self._running.clear()

    def close(self) -> None:
        self._token.unlink(missing_ok=True)
        self.ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise OSError if HOST:PORT refuses a connection: Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _play(stack: Stack, device: str, token: str) -> list[str] | Exception:
    """A task: its warnings, or what went wrong."""
    if not os.path.exists(token):
        return UserError(f"--ray: {stack.out} is not the same folder on all machines; choose a shared one with --out")
    try:
        return play(stack, device)
    except Exception as error:
        return error
