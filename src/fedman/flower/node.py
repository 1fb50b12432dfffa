"""The settings of a node, from its `--node-config`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from flwr.app import Context

from fedman.errors import UserError

ALLOW = "FEDMAN_ALLOW"
"""Environment: `allow` for the nodes of a simulation."""


@dataclass(frozen=True)
class Node:
    """Which client a node is, and where its files are."""

    client: int  # `partition-id`
    data: str = ""  # an .npz file or a folder with the client's own samples
    data_dir: str = ""
    memory_dir: str = ""
    device: str = "auto"
    allow: tuple[str, ...] = ()  # parts of the form module:Name that a server may name

    @staticmethod
    def of(context: Context) -> Node:
        """The settings in a node's `--node-config`."""
        given = {name.replace("-", "_"): value for name, value in context.node_config.items()}
        client = given.get("partition_id")
        if type(client) is not int or client < 0:
            raise UserError(f"partition-id: {client!r} is not a client's number; start the node with 0, 1, 2, …")
        texts = {name: str(given[name]) for name in ("data", "data_dir", "memory_dir", "device") if name in given}
        allow = str(given.get("allow", os.environ.get(ALLOW, ""))).split(",")
        return Node(client, **texts, allow=tuple(name.strip() for name in allow if name.strip()))
