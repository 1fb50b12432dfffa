"""The fault harness: break things on purpose and count what held (`make faults`, docs/reliability.md).

A file is a section; the tables of bad input are those of the tests.
"""

import sys
from pathlib import Path

_tests = Path(__file__).resolve().parent.parent / "tests"
sys.path += [str(_tests), str(_tests / "data")]
