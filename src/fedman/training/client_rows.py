"""What clients leave behind in this process: a row of named vectors for each that has taken part.

Clients that have not taken part share the common start, so what is held grows with those seen, not with N. A round
reads the rows of its cohort and writes them anew. New rows go to the device of the model; when its memory is full, the
least recently written ones are moved to the host's memory, and from there to the run's disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedman.algorithms import State
from fedman.errors import UserError
from fedman.execution.memory import memory, readable
from fedman.execution.transfer import send
from fedman.training.state import Notes

HOST = torch.device("cpu")
LAST = "last"
"""The name of a client's last upload in its row; memories are called `memory.NAME`."""
START = "clients.start"
"""The name in a checkpoint of the model that all clients start from: a module given in Python may have others later."""
SHARE = 0.6  # of the memory that was available at the start: rows take no more where there is another level
RESERVE = 0.1  # of a device's memory stays free, or as much as its rows take where that is less
SLABS = 64  # parts that a device's memory is taken in
BLOCK = 64  # rows on their way to the disk at a time


class RowDisk(Protocol):
    """Rows beyond memory. A checkpoint holds where they are, the disk the rows themselves."""

    def __contains__(self, client: object) -> bool:
        """Whether it has a row of this client."""

    def write(self, clients: Sequence[int], rows: State) -> None:
        """Write these clients' rows; what checkpoints point at stays as it is."""

    def read(self, name: str, clients: Sequence[int]) -> Tensor:
        """One vector of these clients' rows, `[S, Q]` on the host, checked."""

    def tensors(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """Where these clients' rows are, for a checkpoint; they have reached the disk."""

    def restore(self, clients: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Go back to the rows of a checkpoint, if all of them are sound."""

    def require_room(self, clients: float) -> None:
        """Refuse a run that will leave behind the rows of so many clients, if there is no room for them."""


def as_row(w: Tensor, memory: State) -> dict[str, Tensor]:
    """The vectors of a row: the last upload w `[P]` and the memory, `[Q]` each of its own length. The same for the rows
    of S clients, `[S, P]` and `[S, Q]`."""
    return {LAST: w, **{f"memory.{name}": v for name, v in memory.items()}}


class ClientRows:
    """The rows of N clients, all of them like `start` before round 0."""

    def __init__(self, start: State, clients: int, disk: RowDisk | None = None) -> None:
        self.start, self.clients, self.disk, self.device = dict(start), clients, disk, start[LAST].device
        self.row_bytes = sum(v.nbytes for v in start.values())
        homes = [self.device] if self.device == HOST else [self.device, HOST]
        self.levels = [Slabs(start, clients, home, pinned=self.device.type == "cuda") for home in homes]
        self._unsaved: set[int] = set()  # whose rows differ from those on the disk

    @property
    def last(self) -> Tensor:
        """Everyone's last upload, `[N, P]`: a copy, for small federations."""
        return self._take(LAST, range(self.clients))

    @property
    def memory(self) -> dict[str, Tensor]:
        """Everyone's memory, `[N, Q]` each: a copy, for small federations."""
        return self.memories(range(self.clients))

    def uploads(self, ids: Sequence[int]) -> Sequence[Tensor]:
        if self.device == HOST:  # without a copy of those in memory
            return [self.levels[0].row(LAST, k) if self._home(k) == 0 else self._take(LAST, [k])[0] for k in ids]
        return self._take(LAST, ids).unbind()

    def memories(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {name.removeprefix("memory."): self._take(name, ids) for name in self.start if name != LAST}

    def save(self, t: int, ids: Sequence[int], w: Tensor, memory: State) -> None:
        for level in self.levels:
            level.drop(ids)
        self._unsaved.update(ids)
        self._put(0, list(ids), as_row(w, memory))

    def tensors(self, seen: Sequence[int]) -> dict[str, Tensor]:
        """Where the rows are on the disk, after those that changed since the last checkpoint are written."""
        assert self.disk is not None
        changed = sorted(self._unsaved)
        for block in (changed[i : i + BLOCK] for i in range(0, len(changed), BLOCK)):
            self._write(block, {name: self._take(name, block, HOST) for name in self.start})
        return {START: self.start[LAST], **self.disk.tensors(seen)}

    def notes(self) -> Notes:
        """What a row is made of."""
        return {"row": {name: [*v.shape, str(v.dtype)] for name, v in self.start.items()}}

    def restore(self, seen: Sequence[int], tensors: Mapping[str, Tensor], notes: Notes) -> None:
        assert self.disk is not None
        self.disk.restore(seen, tensors)
        if START in tensors:  # not in checkpoints of earlier versions
            self.start[LAST] = tensors[START].to(self.device, copy=True)

    def _take(self, name: str, ids: Sequence[int], device: torch.device | None = None) -> Tensor:
        """One vector of these clients, wherever it is, on the device of the model or another."""
        start, device = self.start[name], device or self.device
        found: dict[int, list[int]] = {}
        for i, k in enumerate(ids):
            found.setdefault(self._home(k), []).append(i)

        def rows(home: int) -> Tensor:
            its = [ids[i] for i in found[home]]
            if home < 0:
                return start.expand(len(its), -1).to(device)
            if home < len(self.levels):
                return self.levels[home].take(name, its, device)
            assert self.disk is not None
            return send(self.disk.read(name, its), device)

        if len(found) == 1:
            return rows(*found).contiguous()
        whole = torch.empty(len(ids), *start.shape, dtype=start.dtype, device=device)
        for home, places in found.items():
            whole[send(places, device)] = rows(home)
        return whole

    def _home(self, k: int) -> int:
        """The level that has client k's row; one more than there are for the disk, −1 if it has none."""
        for i, level in enumerate(self.levels):
            if k in level.slots:
                return i
        return len(self.levels) if self.disk is not None and k in self.disk else -1

    def _put(self, at: int, ids: list[int], rows: State) -> None:
        """Write rows to a level, or where it has no room to the next; older ones there are moved on."""
        if at == len(self.levels):
            return self._write(ids, {name: v.to(HOST) for name, v in rows.items()})
        level, is_last = self.levels[at], at + 1 == len(self.levels) and self.disk is None
        level.grow(len(ids), without_limit=is_last)
        if is_last and len(level.free) < len(ids):
            raise UserError(self._no_room(len(self._unsaved), memory(level.device)[0]))
        here = level.capacity
        if here < len(ids):
            self._put(at + 1, ids[here:], {name: v[here:] for name, v in rows.items()})
        if oldest := level.oldest(min(here, len(ids)) - len(level.free)):
            self._put(at + 1, oldest, {name: level.take(name, oldest, level.device) for name in self.start})
            level.drop(oldest)
        level.put(ids[:here], {name: v[:here] for name, v in rows.items()})

    def _write(self, ids: Sequence[int], rows: State) -> None:
        """From the host to the disk, unless it has the same rows."""
        assert self.disk is not None
        places = [i for i, k in enumerate(ids) if k in self._unsaved]
        if places:
            changed = [ids[i] for i in places]
            self.disk.write(changed, {name: v[places] for name, v in rows.items()})
            self._unsaved.difference_update(changed)

    def require_room(self, clients: float, on_disk: bool) -> None:
        """Refuse a run in which so many clients will take part, if there is no room for their rows; `on_disk`: all of
        them will be written there in the end."""
        available = sum(memory(level.device)[0] for level in self.levels)
        fits = clients * self.row_bytes <= available
        if self.disk is None and not fits:
            raise UserError(self._no_room(clients, available))
        if self.disk is not None and (on_disk or not fits):
            self.disk.require_room(clients)

    def _no_room(self, clients: float, available: int) -> str:
        return (
            f"clients: the state of about {clients:,.0f} that take part, {readable(self.row_bytes)} each, needs "
            f"{readable(clients * self.row_bytes)} and {readable(available)} of memory are available; give a folder "
            "(--out, in Python out=), whose disk then holds what does not fit"
        )


class Slabs:
    """Rows on one device, in slabs of equally many; there are as many slabs as are needed and as fit."""

    def __init__(self, like: State, clients: int, device: torch.device, pinned: bool) -> None:
        self.like, self.device, self.pinned = like, device, pinned and device.type == "cpu"
        available, total = memory(device)
        self.limit = int(SHARE * available)
        self.row_bytes = sum(v.nbytes for v in like.values())
        slab_bytes = 1 << max(1, total // SLABS).bit_length() - 1  # pinned memory is rounded up to a power of two
        self.height = min(clients, max(1, slab_bytes // self.row_bytes))
        self.tables: dict[str, list[Tensor]] = {name: [] for name in like}
        self.slots: dict[int, int] = {}  # client -> its row, counted over all slabs; the oldest first
        self.free: list[int] = []

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return len(self.slots) + len(self.free)

    def grow(self, rows: int, without_limit: bool) -> None:
        """Take more memory until so many rows are free, or until there is no more."""
        while len(self.free) < rows:
            size, (available, total) = self.height * self.row_bytes, memory(self.device)
            taken = self.capacity * self.row_bytes + size
            beyond = taken > self.limit and not without_limit
            if beyond or available < size + min(RESERVE * total, taken) or not self._add():
                return

    def _add(self) -> bool:
        """Take memory for another slab, if there is any."""
        try:
            new = {
                name: torch.empty(self.height, *v.shape, dtype=v.dtype, device=self.device, pin_memory=self.pinned)
                for name, v in self.like.items()
            }
        except RuntimeError:  # what torch raises depends on the device
            return False
        first = self.capacity
        for name, table in new.items():
            self.tables[name].append(table)
        self.free.extend(reversed(range(first, first + self.height)))
        return True

    def oldest(self, count: int) -> list[int]:
        """The clients whose rows were written least recently."""
        return [k for k, _ in zip(self.slots, range(count), strict=False)]

    def drop(self, clients: Collection[int]) -> None:
        self.free.extend(self.slots.pop(k) for k in clients if k in self.slots)

    def put(self, clients: Sequence[int], rows: State) -> None:
        """Rows of clients that have none here; there must be room."""
        new = {k: self.free.pop() for k in clients}
        self.slots |= new
        for slab, places, at in self._by_slab(list(new.values())):
            for name, v in rows.items():
                table = self.tables[name][slab]
                if v.device == self.device:
                    table[send(at, self.device)] = v if len(places) == len(clients) else v[send(places, v.device)]
                else:
                    _copy([table[i] for i in at], [v[i] for i in places])
        if self.pinned:
            torch.cuda.current_stream().synchronize()  # the host may read these rows next

    def row(self, name: str, client: int) -> Tensor:
        """One vector of a client that has a row here, where it lies."""
        slab, at = divmod(self.slots[client], self.height)
        return self.tables[name][slab][at]

    def take(self, name: str, clients: Sequence[int], device: torch.device) -> Tensor:
        """One vector of clients that have a row here, `[S, Q]` on a device."""
        if device == HOST and self.device != HOST:
            return self.take(name, clients, self.device).to(HOST)
        like = self.like[name]
        whole = torch.empty(len(clients), *like.shape, dtype=like.dtype, device=device)
        for slab, places, at in self._by_slab([self.slots[k] for k in clients]):
            table = self.tables[name][slab]
            if device != self.device:
                _copy([whole[i] for i in places], [table[i] for i in at])
            elif len(places) == len(clients):
                return table[send(at, device)]
            else:
                whole[send(places, device)] = table[send(at, device)]
        return whole

    def _by_slab(self, slots: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
        """Slab, places among those asked for, rows in the slab."""
        found: dict[int, list[int]] = {}
        for place, slot in enumerate(slots):
            found.setdefault(slot // self.height, []).append(place)
        for slab, places in found.items():
            yield slab, places, [slots[i] % self.height for i in places]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Row by row between a GPU and pinned memory, without a staging copy."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
