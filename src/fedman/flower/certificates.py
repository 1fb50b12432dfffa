"""Keys for a Flower deployment with TLS: a certificate authority, the SuperLink's certificate, the SuperNodes' keys.

    python -m fedman.flower.certificates keys --host superlink.example.org --host 203.0.113.7 --node north --node south

writes `ca.crt` (goes to every machine), `ca.key` (stays locked away), `server.pem` and `server.key` (the SuperLink's),
and for every node `NAME` (its private key, goes to that machine alone) and `NAME.pub` (for `flwr supernode register`).
Run it again with `--node` alone to add nodes, or with `--host` after deleting `server.pem` and `server.key` to renew
the server's certificate under the same authority. A file that is there already is never written over.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedman.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
AUTHORITY, AUTHORITY_DAYS = "fedman certificate authority", 3650
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def make(folder: Path, hosts: Sequence[str] = (), nodes: Sequence[str] = (), days: int = 365) -> list[Path]:
    """Write what is asked for: with `hosts` the server's certificate, by the folder's authority or a new one, and a
    key for each node."""
    files: dict[str, bytes] = {}
    if hosts:
        new = not (folder / "ca.crt").exists()
        authority = ec.generate_private_key(ec.SECP384R1()) if new else _authority(folder / "ca.key")
        files |= _root(authority) if new else {}
        files |= _server(authority, [*hosts, *(name for name in LOOPBACK if name not in hosts)], days)
    elif not (folder / "ca.crt").is_file():
        raise UserError(f"{folder}: has no ca.crt yet; give the SuperLink's name or address with --host")
    for node in nodes:
        if not NAME.fullmatch(node) or node in files:
            raise UserError(f"node: {node!r} is not a name of its own of letters, digits, '_' and '-'")
        files |= _node(node)
    if there := [name for name in files if (folder / name).exists()]:
        raise UserError(f"{folder / there[0]}: is there already and is not written over")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in files.items():
            public = name.endswith((".crt", ".pem", ".pub"))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(folder / name, flags, 0o644 if public else 0o600), "wb") as file:
                file.write(content)
    except OSError as error:
        raise UserError(f"{folder}: cannot write here: {error.strerror or error}") from None
    return [folder / name for name in files]


def _root(authority: ec.EllipticCurvePrivateKey) -> dict[str, bytes]:
    """A certificate authority: its own certificate and its key."""
    root = (
        _certificate(authority, AUTHORITY, authority.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .sign(authority, hashes.SHA384())
    )
    return {
        "ca.crt": root.public_bytes(serialization.Encoding.PEM),
        "ca.key": _private(authority, serialization.PrivateFormat.PKCS8),
    }


def _server(authority: ec.EllipticCurvePrivateKey, hosts: Sequence[str], days: int) -> dict[str, bytes]:
    """The certificate and key of a server that answers to all of `hosts`."""
    key = ec.generate_private_key(ec.SECP384R1())
    server = (
        _certificate(authority, hosts[0], key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .sign(authority, hashes.SHA384())
    )
    return {
        "server.pem": server.public_bytes(serialization.Encoding.PEM),
        "server.key": _private(key, serialization.PrivateFormat.PKCS8),
    }


def _certificate(
    authority: ec.EllipticCurvePrivateKey, subject: str, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """What both certificates have."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(_named(AUTHORITY), _named(subject), public, x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )


def _authority(path: Path) -> ec.EllipticCurvePrivateKey:
    """The authority's key of an earlier call."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is not the key of an authority made here")
    return key


def _node(name: str) -> dict[str, bytes]:
    """A SuperNode's key pair, as ssh-keygen -t ecdsa -b 384 makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return {name: _private(key, serialization.PrivateFormat.OpenSSH), f"{name}.pub": public + f" {name}\n".encode()}


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _usage(*granted: str) -> x509.KeyUsage:
    uses = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    uses += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{use: use in granted for use in uses})


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise UserError(f"host: {host!r} is neither a name nor an address")
    return x509.DNSName(host)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of the module's docstring; bad input ends with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m fedman.flower.certificates", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--host", action="append", default=[], help="a name or address of the SuperLink")
    parser.add_argument("--node", action="append", default=[], help="a SuperNode's name")
    parser.add_argument("--days", type=int, default=365, help="how long the certificates are valid [365]")
    given = parser.parse_args(arguments)
    if not 1 <= given.days <= 3650:
        parser.error(f"--days: {given.days} is not within 1 and 3650")
    try:
        for path in make(given.folder, given.host, given.node, given.days):
            print(path)
    except UserError as error:
        print(f"fedman: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
