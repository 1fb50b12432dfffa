"""The roster: which node is which client, when nodes come, go, fall silent or make false claims."""

import threading

import pytest

from fedman.errors import TooFew
from fedman.flower import roster
from fedman.flower.roster import Roster
from tests.flower.local_grid import LocalGrid


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Nodes 100 to 102, clients 0 to 2."""
    monkeypatch.setattr(roster, "QUERY_TIMEOUT", 0.2)
    return LocalGrid.of(3, tmp_path)


def queries(grid, node):
    return [m.metadata.message_type for m in grid.sent if m.metadata.dst_node_id == node].count("query")


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
    found.refresh()
    grid.nodes |= {300: {"partition-id": 1}, 301: {"partition-id": 2}}
    grid.alter = lambda query, reply: None if query.metadata.dst_node_id == 102 else reply
    found.refresh()
    assert found.nodes == {0: 100, 1: 101, 2: 301}
    assert [queries(grid, node) for node in (100, 101, 102)] == [1, 2, 2]


def test_a_node_that_has_disconnected_is_replaced_without_a_query(grid):
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event())
    found.refresh()
    grid.nodes[300] = grid.nodes.pop(102)
    found.refresh()
    assert found.nodes == {0: 100, 1: 101, 2: 300}
    assert queries(grid, 102) == 1


def test_a_silent_node_is_asked_three_times(grid):
    grid.alter = lambda query, reply: None if query.metadata.dst_node_id == 102 else reply
    found = Roster(grid, [10, 10, 10], own_data=False, stopping=threading.Event())
    for _ in range(5):
        found.refresh()
    assert queries(grid, 102) == 3
