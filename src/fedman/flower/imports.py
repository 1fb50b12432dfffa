"""What a server may make a node import: fedman's own parts, and what the node's configuration names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedman.config import CUSTOM, PARTS
from fedman.data import rules
from fedman.errors import UserError
from fedman.models import MODELS


def check_imports(settings: Mapping[str, object], allowed: Collection[str]) -> None:
    """Refuse a run whose settings name code or a file that is neither fedman's own nor `allowed` here."""
    for key in (*PARTS, "model", "partition"):
        name = str(settings.get(key, ""))
        if name and not _is_own(key, name) and name not in allowed:
            raise UserError(
                f"{key}: the run names {name!r:.80}, which this node may not import; its owner can start it with "
                f"allow={name:.80}"
            )


def _is_own(key: str, name: str) -> bool:
    if key in PARTS:
        return name in PARTS[key].built_in
    if key == "model":
        return name in (*MODELS, CUSTOM)
    return rules.parse(name).kind in (*rules.RULES, "natural")
