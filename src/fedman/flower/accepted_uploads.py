"""What a server keeps of clients that remember for themselves: the round whose reply was used, and that upload."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from fedman.algorithms import State
from fedman.flower.client_memory import ClientMemory
from fedman.training.state import Notes


class AcceptedUploads:
    """What is kept of clients that remember for themselves: by client the last round whose reply was used.

    With a `folder`, the uploads of these rounds are kept in it: they are what `all` is made of.
    """

    def __init__(self, initial: Tensor, folder: Path | None) -> None:
        self.initial, self.folder, self.run = initial, folder, uuid.uuid4().hex
        self.accepted: dict[int, int] = {}
        self.forgotten: set[int] = set()  # clients that no longer have the memory of their accepted round
        self.keys: dict[int, str] = {}  # client -> the key of the node that first worked as it

    def remembered(self, k: int) -> int:
        """The round whose memory client k has to start from; -1 for none."""
        return -1 if k in self.forgotten else self.accepted.get(k, -1)

    def uploads(self, ids: Sequence[int]) -> Sequence[Tensor] | None:
        if self.folder is None:
            return None
        start = self.initial.cpu()
        like = {"w": start}
        found = (self._files(k).load(self.accepted[k], like)["w"] if k in self.accepted else start for k in ids)
        return [w.to(self.initial.device) for w in found]

    def memories(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {}

    def save(self, t: int, ids: Sequence[int], w: Tensor, memory: State) -> None:
        for k, row in zip(ids, w, strict=True):
            if self.folder is not None:
                self._files(k).save(t, {"w": row}, self.accepted.get(k, -1))
            self.accepted[k] = t
            self.forgotten.discard(k)

    def tensors(self, seen: Sequence[int]) -> dict[str, Tensor]:
        return {}

    def notes(self) -> Notes:
        return {
            "run": self.run,
            "accepted": {str(k): [t] for k, t in self.accepted.items()},
            "forgotten": {str(k): [] for k in sorted(self.forgotten)},
            "keys": {str(k): [key] for k, key in self.keys.items()},
        }

    def restore(self, seen: Sequence[int], tensors: Mapping[str, Tensor], notes: Notes) -> None:
        self.run = str(notes["run"])
        accepted, forgotten, keys = (_table(notes, name) for name in ("accepted", "forgotten", "keys"))
        self.accepted = {k: int(t) for k, (t, *_) in accepted.items()}
        self.forgotten = set(forgotten)
        self.keys.update({k: str(key) for k, (key,) in keys.items()})

    def _files(self, k: int) -> ClientMemory:
        assert self.folder is not None
        return ClientMemory(self.folder, self.run, k, str(self.folder))


def _table(notes: Notes, name: str) -> dict[int, list[int | str]]:
    """What a checkpoint notes of every client; a checkpoint of an older version may have nothing."""
    found = notes.get(name, {})
    assert isinstance(found, dict)
    return {int(k): v for k, v in found.items()}
