"""The same algorithms on Flower: many machines that do not trust each other. `pip install 'fedman[flower]'`.

Flower's telemetry and update checks, and Ray's usage reports, are off unless the environment switches them on.
"""

from __future__ import annotations

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
