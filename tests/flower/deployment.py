"""A Flower deployment on loopback for tests: SuperLink, SuperNodes, `flwr run`.

Each deployment has its own FLWR_HOME and free ports. Flower's processes start others and detach some of them, so what
is stopped in the end is not a process group but every process with this FLWR_HOME in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from fedman.flower import QUIET

BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parents[2] / "src"
SETTINGS = {**QUIET, "OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}


class TimeLimit(AssertionError):
    """Something did not happen in time; the message ends with the logs."""


@dataclass(frozen=True)
class Run:
    """How a run ended."""

    id: str
    status: str  # "finished:completed", "finished:failed", "finished:stopped"
    details: str  # Flower's reason: for a failed run the exception's message
    log: str  # what the ServerApp printed

    @property
    def completed(self) -> bool:
        return self.status == "finished:completed"


@dataclass
class Deployment:
    """A SuperLink and its SuperNodes, by name. Use it in a `with` block, which stops all processes at its end."""

    folder: Path
    certificates: Path | None = None  # a folder with ca.crt, server.pem and server.key: TLS and authenticated nodes
    env: dict[str, str] = field(default_factory=dict)  # more environment for all processes
    warm: bool = False  # apps are forks of `fedman flower superexec`
    port: int = field(default_factory=lambda: free_port())
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Deployment:
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        secure = f'root-certificates = "{self.certificates}/ca.crt"' if self.certificates else "insecure = true"
        config = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{secure}\n'
        (self.folder / "home" / "config.toml").write_text(config)
        try:
            self.start_superlink()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        home = {"FLWR_HOME": str(self.folder / "home"), "PATH": path, "PYTHONPATH": str(SOURCE)}
        return {**os.environ, **SETTINGS, **home, **self.env}

    def start_superlink(self, *extra: str) -> None:
        """Start the SuperLink and wait until it answers; one that was killed starts again on the same port."""
        certificates = self.certificates
        security = ["--insecure"]
        if certificates:
            security = ["--ssl-certfile", f"{certificates}/server.pem", "--ssl-keyfile", f"{certificates}/server.key"]
            security += ["--ssl-ca-certfile", f"{certificates}/ca.crt", "--enable-supernode-auth"]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        self._spawn("superlink", ["flower-superlink", *security, *address, *self._isolation, *extra])
        self._until("the SuperLink to answer", lambda: answers(self.port), 300, "superlink")
        self._warm_up("superlink", self.port)

    def start_node(self, name: str, config: str = "", *security: str, wait: bool = True, mute: bool = False) -> None:
        """Start a SuperNode with a node config such as 'partition-id=0'; by default wait until it has joined.

        A mute one has nothing that does its work, so that it never answers. `security` replaces the default:
        --insecure, or with certificates the key `name` and the certificate authority.
        """
        if not security:
            security = ("--insecure",)
            if self.certificates:
                key = f"{self.certificates}/{name}"
                security = ("--root-certificates", f"{self.certificates}/ca.crt", "--auth-supernode-private-key", key)
        port = free_port()
        isolation = ["--isolation", "process"] if mute else self._isolation
        runtime = ["--host", "127.0.0.1", "--port", str(port), *isolation]
        words = ["flower-supernode", *security, "--superlink", f"127.0.0.1:{self.port}", *runtime]
        self._spawn(name, [*words, "--node-config", config] if config else words)
        if not mute:
            self._warm_up(name, port)
        if wait:
            self._until(f"SuperNode {name} to join", lambda: "SuperNode ID" in self.log(name), 300, name)

    def start_nodes(self, configs: dict[str, str]) -> None:
        """Start several SuperNodes at once and wait for all."""
        for name, config in configs.items():
            self.start_node(name, config, wait=False)
        for name in configs:
            self._until(f"SuperNode {name} to join", lambda name=name: "SuperNode ID" in self.log(name), 300, name)

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Kill a SuperLink or SuperNode with its SuperExec and apps."""
        for process in [self.processes.pop(n) for n in (name, f"{name}-superexec") if n in self.processes]:
            for pid in (process.pid, *descendants(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            process.wait(30)

    def kill_apps(self, name: str) -> None:
        """Kill only the apps that a SuperLink or SuperNode has started: grandchildren of it, or of its SuperExec."""
        top = self.processes.get(f"{name}-superexec", self.processes[name]).pid
        apps = set(descendants(top)) - set(children().get(top, []))
        assert apps, f"{name} has no app at work\n{self.logs()}"
        for pid in apps:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def flwr(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A `flwr` command in this deployment."""
        return subprocess.run(
            [BIN / "flwr", *words], env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(self, app: Path, config: str = "") -> str:
        """Start `flwr run`, without waiting for its end; the run's id."""
        words = ["run", str(app), "here", "--format", "json", *(["--run-config", config] if config else [])]
        done = self.flwr(*words)
        found = re.search(r'"run-id": "(\d+)"', done.stdout)
        assert found, f"flwr run: {done.stdout}{done.stderr}{self.logs()}"
        return found[1]

    def wait(self, run_id: str, timeout: float = 600) -> Run:
        """Wait for a run's end; after the time limit an error with all logs."""
        end = time.monotonic() + timeout
        while True:
            status, details = self.status(run_id)
            if status.startswith("finished"):
                return Run(run_id, status, details, self.run_log(run_id))
            if time.monotonic() > end:
                raise TimeLimit(f"run {run_id} is still {status} after {timeout:.0f} s\n{self.logs()}")
            time.sleep(2)

    def run(self, app: Path, config: str = "", timeout: float = 600) -> Run:
        """Submit and wait."""
        return self.wait(self.submit(app, config), timeout)

    def status(self, run_id: str) -> tuple[str, str]:
        """A run's status and Flower's details of it."""
        done = self.flwr("list", "here", "--run-id", run_id, "--format", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        row = json.loads(done.stdout[done.stdout.index("{") :])["runs"][0]
        return row["status"], row.get("status-details", "")

    def run_log(self, run_id: str) -> str:
        return self.flwr("log", run_id, "here", "--show").stdout

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self, tail: int = 3000) -> str:
        """The ends of all logs, for a failure's message."""
        return "".join(
            f"\n--- {path.stem}\n{path.read_text(errors='replace')[-tail:]}" for path in self.folder.glob("*.log")
        )

    def stop(self) -> None:
        """Stop every process of this deployment, with SIGTERM first and then SIGKILL."""
        for process in self.processes.values():
            process.terminate()
        end_all(f"FLWR_HOME={self.folder / 'home'}")
        for process in self.processes.values():
            process.wait(30)
        self.processes.clear()

    def pids(self) -> list[int]:
        """The processes that have this deployment's FLWR_HOME in their environment."""
        return marked(f"FLWR_HOME={self.folder / 'home'}")

    @property
    def _isolation(self) -> list[str]:
        return ["--isolation", "process"] if self.warm else []

    def _warm_up(self, name: str, port: int) -> None:
        """Start fedman's SuperExec for a SuperLink or SuperNode, if `warm` is set."""
        if self.warm:
            words = ["fedman", "flower", "superexec", "--insecure", "--runtime-api-address", f"127.0.0.1:{port}"]
            self._spawn(f"{name}-superexec", words)

    def _spawn(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as out:
            self.processes[name] = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _until(self, what: str, true: Callable[[], bool], timeout: float, name: str) -> None:
        """Wait for a condition on a process; its end or the time limit is an error that shows its log."""
        end = time.monotonic() + timeout
        while not true():
            if self.processes[name].poll() is not None:
                raise AssertionError(f"{name} ended with {self.processes[name].returncode}\n{self.log(name)[-3000:]}")
            if time.monotonic() > end:
                raise TimeLimit(f"waited {timeout:.0f} s for {what}\n{self.log(name)[-3000:]}")
            time.sleep(0.2)


GIVEN: set[int] = set()
"""Ports that were given out: a process that was to listen on one may not have begun to."""


def free_port() -> int:
    """A port on which nobody listens, each time another one.

    Where there are enough of them, it is none of those that the system gives to connections: one of these could be
    taken before the process that is to listen does, even by a connection to it that is tried meanwhile.
    """
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range")
    own = range(10_000, int(given_away.read_text().split()[0]) if given_away.exists() else 0)
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().choice(own) if len(own) > 1000 else 0))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        if port not in GIVEN:
            GIVEN.add(port)
            return port


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def environments() -> Iterator[tuple[int, bytes]]:
    """Every living process of this user with its environment; other users' and ended ones are left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "environ").read_bytes()


def marked(variable: str) -> list[int]:
    """The processes with this NAME=VALUE in their environment."""
    return [pid for pid, environ in environments() if f"{variable}\0".encode() in environ]


def end_all(variable: str) -> None:
    """Stop these processes, with SIGTERM first and then SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + 10
        while (pids := marked(variable)) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            time.sleep(0.5)


def children() -> dict[int, list[int]]:
    """The children of every process that has some."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                found.setdefault(int(words[1]), []).append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    """The children of a process and theirs."""
    of, found = children(), [pid]
    for parent in found:  # grows while it is read
        found += of.get(parent, [])
    return found[1:]
