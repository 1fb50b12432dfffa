"""The same algorithms on Flower, for machines that need not trust each other: `pip install '.[flower]'`.

Flower's telemetry and update checks, and Ray's usage reports, are off by default; environment variables enable them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedman.flower.dropin import man_mod, with_man
    from fedman.flower.strategy import Screened

__all__ = ["Screened", "man_mod", "with_man"]

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use: a client process that only answers a query does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'fedman.flower' has no attribute {name!r}")
    from fedman.flower import dropin, strategy

    return getattr(strategy if name == "Screened" else dropin, name)
