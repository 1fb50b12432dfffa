"""TLS: keys made by one command; authenticated nodes play a run; all others stay outside."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509 import DNSName, IPAddress, SubjectAlternativeName, load_pem_x509_certificate
from deployment import BIN, SOURCE, Deployment, end_all, free_port

from fedman.errors import UserError
from fedman.flower.certificates import main, make
from fedman.runs.folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "flower-tls.md"


def test_the_servers_certificate_is_the_authoritys_and_names_its_hosts(tmp_path):
    make(tmp_path, ["superlink.example.org", "203.0.113.7"])
    root, server = (load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(root)
    names = server.extensions.get_extension_for_class(SubjectAlternativeName).value
    assert names.get_values_for_type(DNSName) == ["superlink.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(IPAddress)] == ["203.0.113.7", "127.0.0.1", "::1"]
    assert 364 <= (server.not_valid_after_utc - server.not_valid_before_utc).days <= 366


def test_secrets_are_for_their_owner_alone_and_keys_are_pairs(tmp_path):
    written = make(tmp_path, ["127.0.0.1"], ["north"])
    assert sorted(path.name for path in written) == [
        "ca.crt",
        "ca.key",
        "north",
        "north.pub",
        "server.key",
        "server.pem",
    ]
    for name in ("ca.key", "server.key", "north"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    private = serialization.load_ssh_private_key((tmp_path / "north").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "north.pub").read_bytes())
    assert private.public_key() == public


def test_nodes_are_added_later_without_touching_what_is_there(tmp_path):
    make(tmp_path, ["127.0.0.1"], ["a"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    make(tmp_path, nodes=["b"])
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "b").is_file()


def test_the_servers_certificate_is_renewed_by_the_same_authority(tmp_path):
    make(tmp_path, ["127.0.0.1"])
    root, old = (tmp_path / "ca.crt").read_bytes(), (tmp_path / "server.pem").read_bytes()
    for name in ("server.pem", "server.key"):
        (tmp_path / name).unlink()
    assert [path.name for path in make(tmp_path, ["example.org"])] == ["server.pem", "server.key"]
    assert (tmp_path / "ca.crt").read_bytes() == root
    assert (tmp_path / "server.pem").read_bytes() != old
    server = load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    server.verify_directly_issued_by(load_pem_x509_certificate(root))


def test_a_damaged_authority_is_named(tmp_path):
    make(tmp_path, ["127.0.0.1"])
    (tmp_path / "server.pem").unlink()
    (tmp_path / "ca.key").write_text("nothing")
    with pytest.raises(UserError, match=r"ca\.key: cannot be read"):
        make(tmp_path, ["127.0.0.1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node", "a"], "has no ca.crt yet"),
        (["--host", "not a name"], "host: 'not a name' is neither a name nor an address"),
        (["--host", "h", "--node", "../x"], "node: '../x' is not a name"),
        (["--host", "h", "--node", "ca.key"], "node: 'ca.key' is not a name"),
        (["--host", "h", "--node", "a", "--node", "a.pub"], "node: 'a.pub' is not a name"),
        (["--host", "h", "--node", "a", "--node", "a"], "node: 'a' is not a name of its own"),
        (["--host", "h", "--days", "0"], "--days: 0 is not within 1 and 3650"),
    ],
)  # fmt: skip
def test_bad_input_ends_with_two_and_writes_nothing(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path / "keys"), *words])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


def test_nothing_is_written_over(tmp_path):
    make(tmp_path, ["127.0.0.1"], ["a"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for again in ({"hosts": ["127.0.0.1"]}, {"nodes": ["b", "a"]}):
        with pytest.raises(UserError, match="is there already and is not written over"):
            make(tmp_path, **again)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.xdist_group("deployment")
def test_only_registered_keys_get_in(tmp_path):
    keys = tmp_path / "keys"
    make(keys, ["127.0.0.1"], ["friend", "stranger"])
    make(tmp_path / "elsewhere", ["127.0.0.1"])
    other = ed25519.Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    (keys / "other-kind").write_bytes(other.private_bytes(*form))

    ca, auth = ("--root-certificates", f"{keys}/ca.crt"), "--auth-supernode-private-key"
    elsewhere = ("--root-certificates", f"{tmp_path}/elsewhere/ca.crt")
    outside = {
        "without-key": (ca, "All SuperNodes must be registered"),
        "wrong-key": ((*ca, auth, f"{keys}/other-kind"), "requires elliptic curve private key"),
        "unauthorised": ((*ca, auth, f"{keys}/stranger"), "Failed to activate SuperNode"),
        "other-authority": ((*elsewhere, auth, f"{keys}/friend"), "certificate verify failed"),
        "plaintext": (("--insecure", "--max-retries", "2"), "SuperNode could not establish a connection"),
    }
    with Deployment(tmp_path / "deployment", certificates=keys) as federation:
        done = federation.flwr("supernode", "register", str(keys / "friend.pub"), "here")
        assert done.returncode == 0, done.stdout + done.stderr
        federation.start_node("friend")
        for name, (security, _) in outside.items():
            federation.start_node(name, "partition-id=0", *security, wait=False)
        for name, (_, reason) in outside.items():
            assert federation.processes[name].wait(120) == 1, federation.log(name)
            assert reason in federation.log(name)
            assert "SuperNode ID" not in federation.log(name)

        config = tmp_path / "deployment" / "home" / "config.toml"
        config.write_text(config.read_text().replace(f'root-certificates = "{keys}/ca.crt"', "insecure = true"))
        plain = federation.flwr("list", "here")
        assert plain.returncode != 0
        assert "unavailable" in plain.stderr
    assert federation.pids() == []


@pytest.mark.xdist_group("deployment")
def test_the_page_runs_as_printed(tmp_path):
    """All commands of docs/flower-tls.md in one shell; only the ports are free ones."""
    script = "".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    for port in ("9300", "9310", "9311"):
        assert port in script
        script = script.replace(port, str(free_port()))
    path, home = f"{BIN}{os.pathsep}{os.environ['PATH']}", tmp_path / "flower"
    env = {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=590, check=False
        )
    finally:
        end_all(f"FLWR_HOME={home}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = RunFolder(tmp_path / "out").read_rounds()
    assert [record["refused"] for record in records] == [{}, {}], done.stdout + done.stderr
    assert stat.S_IMODE((tmp_path / "keys" / "north").stat().st_mode) == 0o600
