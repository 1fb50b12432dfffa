"""TLS: keys made by one command; authenticated nodes play a run; all others stay outside."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509 import DNSName, IPAddress, SubjectAlternativeName, load_pem_x509_certificate
from deployment import Deployment

from fedman.errors import UserError
from fedman.flower.app import new_project
from fedman.flower.certificates import main, make
from fedman.records import read_rounds

NODES = ("a", "b")


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node", "a"], "has no ca.crt yet"),
        (["--host", "not a name"], "host: 'not a name' is neither a name nor an address"),
        (["--host", "h", "--node", "../x"], "node: '../x' is not a name"),
        (["--host", "h", "--node", "ca.key"], "node: 'ca.key' is not a name"),
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
def test_authenticated_nodes_play_a_run_and_nobody_else_gets_in(tmp_path):
    keys = tmp_path / "keys"
    words = [str(keys), "--host", "127.0.0.1", "--node", "a", "--node", "b", "--node", "stranger"]
    subprocess.run([sys.executable, "-m", "fedman.flower.certificates", *words], check=True, capture_output=True)
    other = ed25519.Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    (keys / "other-kind").write_bytes(other.private_bytes(*form))
    make(tmp_path / "elsewhere", ["127.0.0.1"])

    env = {"FEDMAN_MEMORY": str(tmp_path / "memory")}
    with Deployment(tmp_path / "deployment", certificates=keys, env=env) as federation:
        for name in NODES:
            done = federation.flwr("supernode", "register", str(keys / f"{name}.pub"), "here")
            assert done.returncode == 0, done.stdout + done.stderr
        federation.start_nodes({name: f"partition-id={k}" for k, name in enumerate(NODES)})

        ca, auth, few = (
            ("--root-certificates", f"{keys}/ca.crt"),
            "--auth-supernode-private-key",
            ("--max-retries", "2"),
        )
        outside = {
            "without-key": (ca, "All SuperNodes must be registered"),
            "wrong-key": ((*ca, auth, f"{keys}/other-kind"), "requires elliptic curve private key"),
            "unauthorised": ((*ca, auth, f"{keys}/stranger"), "Failed to activate SuperNode"),
            "plaintext": (("--insecure", *few), "SuperNode could not establish a connection"),
            "other-authority": (
                ("--root-certificates", f"{tmp_path}/elsewhere/ca.crt", auth, f"{keys}/a"),
                "certificate verify failed",
            ),
        }  # fmt: skip
        for name, (security, _) in outside.items():
            federation.start_node(name, "partition-id=0", *security, wait=False)
        app = tmp_path / "app"
        new_project(app)
        run = f"dataset=digits clients={len(NODES)} participation=1 cohort=fixed rounds=1 epochs=1 zeta=0.05"
        done = federation.run(app, f'settings="{run}" out="{tmp_path}/run"', timeout=300)
        assert done.completed, done.details + federation.logs()
        (record,) = read_rounds(tmp_path / "run" / "rounds.jsonl")
        assert record["cohort"] == [0, 1]
        assert record["refused"] == {}

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
