"""The commands of docs/flower.md run as printed, in an empty folder; only the ports are replaced by free ones.

A proxy that listens here records attempts to reach the internet (telemetry, update checks, usage statistics).
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import ray

from tests.flower.deployment import BIN, SOURCE, environments, free_port

pytestmark = pytest.mark.xdist_group("deployment")
PAGE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text(encoding="utf-8")
HERE = ray.util.get_node_ip_address()  # by which Ray's processes find each other
QUIET, SIMULATED, LOOPBACK = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def proxy():
    """The address of a proxy, and the requests it has received."""
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    calls.append(caller.recv(200))
                    caller.close()

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", calls


def bash(script, folder, proxy):
    """Run a script of the page in a folder that is its home too."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment |= {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": f"127.0.0.1,localhost,{HERE}"}
    return subprocess.run(
        ["bash", "-ec", QUIET + script], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
def test_simulated(tmp_path, proxy):
    done = bash(SIMULATED, tmp_path, proxy[0])
    assert done.returncode == 0, done.stderr
    assert proxy[1] == []
    first, again = re.findall("FedDC.*", done.stdout)
    assert first == again
    assert len((tmp_path / "simulated" / "rounds.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_loopback(tmp_path, proxy):
    script = LOOPBACK.replace("9200", str(free_port()))
    script = script.replace("921$k", "${ports[$k]}")
    script = f"ports=({' '.join(str(free_port()) for _ in range(4))})\n" + script
    done = bash(script, tmp_path, proxy[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert proxy[1] == []
    assert "round 3: loss" in done.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["method"] == "FedDyn+MAN"
    mark = f"FLWR_HOME={tmp_path}/flower\0".encode()
    end = time.monotonic() + 60
    while (left := [pid for pid, environment in environments() if mark in environment]) and time.monotonic() < end:
        time.sleep(0.5)
    assert not left
