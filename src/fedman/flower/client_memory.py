"""What a client remembers between its rounds: vectors on its own disk, tagged with the run, the client and the round.

What a client saves in round t is valid only if the server uses its reply of that round, which the client does not know.
So it saves a file for every round, keeps the newest few, and reads the one of the round that the server's next order
names: the right one also after a lost reply, a repeated round, or a server that has gone back to a checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedman.errors import UserError
from fedman.runs.atomic import write_whole, writing

KEEP = 4  # files; the server goes back two checkpoints at most


class ClientMemory:
    """The files of one client in one run."""

    def __init__(self, root: Path, run: str, client: int) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", run):
            raise UserError(f"run: {run[:40]!r} is not the name of a run, 32 hexadecimal digits")
        self.root, self.tag = root, {"run": run, "client": str(client)}
        self.folder = root / run / f"client-{client:06d}"

    def load(self, round: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The vectors saved in `round`: those of `like`, each with the shape and dtype of the one there.

        A file that is missing, damaged or of another client, run or round is refused.
        """
        path = self._path(round)
        name = path.relative_to(self.root)  # the message goes to the server, which need not know this machine's folders
        try:
            with safe_open(path, framework="pt") as file:
                tag, found = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            there = ", ".join(path.name for path in self._files())
            raise UserError(f"memory: {name} is not there{f' (but {there})' if there else ''}") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"memory: {name} cannot be read ({error})") from None
        wrong = [field for field, value in self._tag(round, found).items() if tag.get(field) != value]
        if wrong:
            raise UserError(f"memory: {name} is not of this client, run and round; {', '.join(wrong)} differs")
        held, wanted = (
            ", ".join(f"{field} {v.dtype} {list(v.shape)}" for field, v in sorted(vectors.items()))
            for vectors in (found, like)
        )
        if held != wanted:
            raise UserError(f"memory: {name} holds {held}; wanted are {wanted}")
        return found

    def save(self, round: int, vectors: Mapping[str, Tensor]) -> None:
        """Save the vectors of `round`, and delete all files but the newest `KEEP`."""
        vectors = {name: v.detach().cpu().contiguous() for name, v in vectors.items()}
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(round), lambda staged: save_file(vectors, staged, metadata=self._tag(round, vectors)))
        for old in self._files()[:-KEEP]:
            old.unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.safetensors"))

    def _tag(self, round: int, vectors: Mapping[str, Tensor]) -> dict[str, str]:
        """Whose vectors a file holds, and their hash."""
        digest = hashlib.sha256()
        for name in sorted(vectors):
            digest.update(name.encode() + b"\0" + vectors[name].view(torch.uint8).numpy().tobytes())
        return {**self.tag, "round": str(round), "sha256": digest.hexdigest()}
