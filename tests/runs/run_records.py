"""Records of a run as they are written."""

RECORD = {
    "round": 1, "cohort": [0], "quarantined": [], "lr": 0.1, "loss": 1.0, "penalty": {"0": 1.0},
    "accuracy": {"all": 50.0}, "test_loss": {"all": float("inf")}, "seconds": 0.1,
}  # fmt: skip

SUMMARY = {
    "method": "FedAvg",
    "config": {
        "dataset": "d", "partition": "iid", "algorithm": "fedavg", "zeta": 0, "seed": 0, "rounds": 2, "clients": 3,
        "clip": float("inf"), "data_dir": "here",
    },
    "accuracy": {"all": 50.0},
    "test_loss": {"all": float("nan")},
    "rounds_to_target": None,
    "seconds": 1.0,
    "device": "cpu",
    "precision": "fp32",
    "version": "0",
    "torch": "2",
}  # fmt: skip

ROW = SUMMARY | {"curve": {"round": [1, 2], "all": [40.0, 50.0]}}
