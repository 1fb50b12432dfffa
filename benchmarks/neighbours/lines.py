"""What every program here prints of a round: one JSON line that compare.py finds among the neighbour's own output."""

import json

MARK = "round-line "


def round_line(number: int, seconds: float, accuracy: float | None) -> None:
    """Print a round: its seconds, evaluation included, and the accuracy in percent where it was evaluated."""
    print(MARK + json.dumps({"round": number, "seconds": round(seconds, 4), "accuracy": accuracy}), flush=True)
