"""How much memory a device has, and how much of it can still be had."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")  # the limits of a container (version 2)


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are available on the device, and all that it has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _numbers(Path("/proc/meminfo")).get("MemAvailable:", total // 2048) * 1024
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit
        return available, total
    reclaimable = _numbers(CGROUP / "memory.stat").get("inactive_file", 0)
    return min(available, limit - used + reclaimable), min(total, limit)


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines `name number`; nothing where there is none."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return {line[0]: int(line[1]) for line in lines if len(line) > 1}
    except (OSError, ValueError):
        return {}


def readable(size: float) -> str:
    """A number of bytes for a person.

    >>> readable(3_200_000)
    '3.2 MB'
    """
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
