"""One row per algorithm: a new algorithm adds a row here and is run through the whole battery."""

CASES = {
    "fedavg": ("fedavg", {}),
    "fedprox": ("fedprox", {"mu": 0.3}),
    "fedsam": ("fedsam", {"rho": 0.2}),
    "fedasam": ("fedasam", {"rho": 0.4, "eta": 0.2}),
    "feddyn": ("feddyn", {"alpha": 0.3}),
    "feddc": ("feddc", {"alpha": 0.3}),
    "feddc, decayed states": ("feddc", {"alpha": 0.3, "decayed": True}),
    "fedspeed": ("fedspeed", {"alpha": 0.3, "rho": 0.2}),
    "fedspeed, stale ascent": ("fedspeed", {"alpha": 0.3, "rho": 0.2, "stale_ascent": True}),
    "scaffold": ("scaffold", {}),
    "scaffold, decayed states": ("scaffold", {"decayed": True}),
}
