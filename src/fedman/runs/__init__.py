"""Runs: from a configuration to records, models and checkpoints in a folder; sweeps of them; their results."""
