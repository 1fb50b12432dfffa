"""The roster: which node is which client, when nodes come, go, fall silent or make false claims."""

import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from fedman.errors import TooFew, UserError
from fedman.flower import roster
from fedman.flower.roster import Roster, fingerprint, read_roster
from tests.flower.local_grid import LocalGrid


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Nodes 100 to 102, clients 0 to 2."""
    monkeypatch.setattr(roster, "QUERY_TIMEOUT", 0.2)
    return LocalGrid.of(3, tmp_path)


def queries(grid, node):
    return [m.metadata.message_type for m in grid.sent if m.metadata.dst_node_id == node].count("query")


def settle(found):
    """Refresh until all who answer have answered, and those who do not have been given up."""
    end = time.monotonic() + 60
    found.refresh()
    while found.hopeful and time.monotonic() < end:
        found.refresh()
        time.sleep(0.01)


def test_every_client_has_its_node_and_is_asked_once(grid):
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event())
    found.wait(1)
    found.refresh()
    assert found.nodes == {0: 100, 1: 101, 2: 102}
    assert [queries(grid, node) for node in grid.nodes] == [1, 1, 1]


def test_missing_clients_are_named_with_the_reasons_of_refused_nodes(grid):
    grid.nodes |= {200: {"partition-id": 1}, 201: {"partition-id": 7}, 202: {}, 203: {"partition-id": 3}}
    grid.alter = lambda query, reply: ValueError() if query.metadata.dst_node_id == 203 else reply
    with pytest.raises(TooFew, match=r"3 of 5 clients are there after 0\.2 s; missing: 3, 4; node ") as error:
        Roster(grid, [10] * 5, own_data=False, stopping=threading.Event()).wait(0.2)
    assert "node 200: client 1 is node 101" in str(error.value)
    assert "node 201: client: 7 is not one of 0 to 4" in str(error.value)
    assert "node 202: the client says: partition-id: None is not a client's number" in str(error.value)
    assert "node 203: its reply cannot be read (ValueError)" in str(error.value)


def test_a_node_that_no_longer_answers_is_replaced(grid):
    """A killed node stays on Flower's list for a while."""
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event())
    settle(found)
    grid.nodes |= {300: {"partition-id": 1}, 301: {"partition-id": 2}}
    grid.alter = lambda query, reply: None if query.metadata.dst_node_id == 102 else reply
    settle(found)
    assert found.nodes == {0: 100, 1: 101, 2: 301}
    assert [queries(grid, node) for node in (100, 101)] == [1, 2]


def test_a_node_that_has_disconnected_is_replaced_without_a_query(grid):
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event())
    settle(found)
    grid.nodes[300] = grid.nodes.pop(102)
    settle(found)
    assert found.nodes == {0: 100, 1: 101, 2: 300}
    assert queries(grid, 102) == 1


def test_a_silent_node_is_asked_again_after_a_while_and_waited_for_once(grid, monkeypatch):
    """By a clock of the test's own, of which half a second passes in steps of ten milliseconds."""
    now = [0.0]
    sleep = lambda seconds: now.append(now.pop() + seconds)  # noqa: E731
    monkeypatch.setattr(roster, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    grid.alter = lambda query, reply: None if query.metadata.dst_node_id == 102 else reply
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event())
    hope = []
    for _ in range(50):
        found.refresh()
        hope.append(found.hopeful)
        sleep(0.01)
    assert hope[:15] == [True] * 15
    assert hope[25:] == [False] * 25
    assert queries(grid, 102) == 3
    grid.alter = lambda query, reply: reply
    found.wait(1)
    assert found.nodes[2] == 102


def test_a_refused_node_that_is_mended_and_started_again_gets_in(grid):
    """With a key of its own, a node has the same number after a restart."""
    grid.nodes[102]["partition-id"] = 7
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event())
    settle(found)
    assert list(found.refused) == [102]
    grid.nodes[102]["partition-id"] = 2
    found.wait(30)
    assert found.nodes[2] == 102
    assert found.refused == {}


def test_waiting_ends_when_all_clients_are_there_whoever_else_is_silent(grid, monkeypatch):
    monkeypatch.setattr(roster, "QUERY_TIMEOUT", 600.0)
    grid.nodes |= {node: {"partition-id": 1} for node in (1, 2, 3)}
    grid.alter = lambda query, reply: None if query.metadata.dst_node_id < 10 else reply
    started = time.monotonic()
    Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event()).wait(300)
    assert time.monotonic() - started < 200


def ssh_keys(count):
    """Public keys as nodes have them: in PEM, and as a line of ssh-keygen's."""
    for k in range(count):
        key = ec.derive_private_key(1000 + k, ec.SECP384R1()).public_key()
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        yield pem, key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def test_a_roster_says_whose_number_is_whose(grid, tmp_path):
    """Nodes with other keys are not even asked, and one with another client's key cannot be this one."""
    keys = list(ssh_keys(4))
    (tmp_path / "roster").write_text(
        "# clients\n\n" + "".join(f"{k} {line} north\n" for k, (_, line) in enumerate(keys[:3]))
    )
    grid.keys = {100 + k: pem for k, (pem, _) in enumerate(keys[:3])} | {50: keys[3][0], 51: b"?"}
    grid.nodes |= {50: {"partition-id": 1}, 51: {"partition-id": 2}, 52: {"partition-id": 0}}
    grid.nodes[102]["partition-id"] = 0
    wanted = read_roster(tmp_path / "roster", 3)
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event(), keys=wanted)
    for _ in range(3):
        found.refresh()
    assert found.nodes == {0: 100, 1: 101}
    assert [queries(grid, node) for node in (50, 51, 52)] == [0, 0, 0]
    assert found.refused[50] == f"its key {fingerprint(load_pem_public_key(keys[3][0]))} is not in the roster"
    assert found.refused[102] == f"claims to be client 0, whose key is {wanted[0]}; its own is {wanted[2]}"
    (tmp_path / "north.pub").write_text(keys[0][1])
    shown = subprocess.run(["ssh-keygen", "-lf", tmp_path / "north.pub"], capture_output=True, text=True).stdout
    assert wanted[0] in shown


def test_a_new_key_in_the_roster_takes_the_place_of_the_one_that_worked_before(grid):
    keys = {k: fingerprint(load_pem_public_key(pem)) for k, (pem, _) in enumerate(ssh_keys(3))}
    grid.keys = {100 + k: pem for k, (pem, _) in enumerate(ssh_keys(3))}
    found = Roster(grid, [10, 10, 10], False, threading.Event(), keys, bound={0: "SHA256:an-older-key"})
    found.refresh()
    assert found.nodes == {0: 100, 1: 101, 2: 102}


LINE = next(ssh_keys(1))[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no key of client 0; wanted are keys of 0 to 1"),
        (f"0 {LINE}\n2 {LINE}", "line 2: '2' is not one of the clients 0 to 1"),
        (f"zero {LINE}", "line 1: 'zero' is not one of"),
        (f"0 {LINE}\n1 {LINE}", "line 2: client 1 or its key stands in a line before"),
        ("0 ssh-ed25519 AAAA", "line 1: 'ssh-ed25519 AAAA' is not an ECDSA public key"),
        ("0", "line 1: '' is not an ECDSA public key"),
        (b"\xff", "cannot be read"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_roster_is_refused(text, reason, tmp_path):
    if text is not None:
        (tmp_path / "roster").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=f"^roster: {tmp_path}/roster: .*{reason}"):
        read_roster(tmp_path / "roster", 2)
