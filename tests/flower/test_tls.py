"""docs/flower-tls.md: its commands run as printed, and its keys keep out everyone who is not registered."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from fedman.runs.folder import RunFolder
from tests.flower.deployment import BIN, SOURCE, Deployment, end_all, free_port

PAGE = (Path(__file__).parents[2] / "docs" / "flower-tls.md").read_text(encoding="utf-8")
VARIABLES, KEYS, *OTHERS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder that is its home too."""
    env = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        ["bash", "-ec", script], cwd=folder, env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=590,
    )  # fmt: skip


def make_keys(folder: Path) -> Path:
    """Run the page's commands for keys; the folder that holds them."""
    done = bash(VARIABLES + KEYS, folder)
    assert done.returncode == 0, done.stderr
    return folder / "keys"


def test_the_certificate_is_valid_for_its_names_and_private_keys_are_private(tmp_path):
    keys = make_keys(tmp_path)
    for name in ("-verify_ip 127.0.0.1", "-verify_hostname localhost"):
        verified = bash(f"openssl verify -x509_strict -purpose sslserver {name} -CAfile ca.crt server.pem", keys)
        assert verified.stdout == "server.pem: OK\n", verified.stderr
    other = bash("openssl verify -verify_hostname example.org -CAfile ca.crt server.pem", keys)
    assert "hostname mismatch" in other.stderr
    private = {path.name for path in keys.iterdir() if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert private == {"ca.key", "server.key", "north", "south"}


@pytest.mark.slow
@pytest.mark.xdist_group("deployment")
def test_only_registered_keys_get_in(tmp_path):
    keys = make_keys(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    elsewhere = make_keys(tmp_path / "elsewhere")
    bash("ssh-keygen -q -t ed25519 -N '' -f other-type", keys)

    ca, auth = ("--root-certificates", f"{keys}/ca.crt"), "--auth-supernode-private-key"
    refused = {
        "without-key": (ca, "All SuperNodes must be registered"),
        "other-type": ((*ca, auth, f"{keys}/other-type"), "requires elliptic curve private key"),
        "unregistered": ((*ca, auth, f"{keys}/south"), "Failed to activate SuperNode"),
        "other-authority": (
            ("--root-certificates", f"{elsewhere}/ca.crt", auth, f"{keys}/north"),
            "certificate verify failed",
        ),
        "without-tls": (("--insecure", "--max-retries", "2"), "SuperNode could not establish a connection"),
    }
    with Deployment(tmp_path / "deployment", certificates=keys) as federation:
        done = federation.flwr("supernode", "register", str(keys / "north.pub"), "here")
        assert done.returncode == 0, done.stdout + done.stderr
        federation.start_node("north")
        for name, (security, _) in refused.items():
            federation.start_node(name, "partition-id=0", *security, wait=False)
        for name, (_, reason) in refused.items():
            assert federation.processes[name].wait(300) == 1, federation.log(name)
            assert reason in federation.log(name)
            assert "SuperNode ID" not in federation.log(name)

        (number,) = re.findall(r"SuperNode ID: (\d+)", federation.log("north"))
        done = federation.flwr("supernode", "unregister", number, "here")
        assert done.returncode == 0, done.stdout + done.stderr
        federation.kill("north")
        federation.start_node("north", wait=False)
        assert federation.processes["north"].wait(300) == 1, federation.log("north")
        assert "SuperNode ID" not in federation.log("north")

        config = tmp_path / "deployment" / "home" / "config.toml"
        config.write_text(config.read_text().replace(f'root-certificates = "{keys}/ca.crt"', "insecure = true"))
        plain = federation.flwr("list", "here")
        assert plain.returncode != 0
        assert "unavailable" in plain.stderr
    assert federation.pids() == []


@pytest.mark.xdist_group("deployment")
@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path):
    """All commands of the page in one shell; only the ports are replaced by free ones."""
    script = VARIABLES + KEYS + "".join(OTHERS)
    for port in ("9300", "9310", "9311"):
        assert port in script
        script = script.replace(port, str(free_port()))
    try:
        done = bash(script, tmp_path)
    finally:
        end_all(f"FLWR_HOME={tmp_path / 'flower'}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = RunFolder(tmp_path / "out").read_rounds()
    assert [record["refused"] for record in records] == [{}, {}], done.stdout + done.stderr
