"""Signals that end a run after the round under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signal(stopping: threading.Event) -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP set `stopping` and are added to the list; a second one kills the process.

    A SIGHUP that the process was started to ignore, as by nohup, stays ignored.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield caught
        return

    def handle(signum: int, frame: object) -> None:
        for s in before:
            signal.signal(s, signal.SIG_DFL)
        caught.append(signum)
        stopping.set()

    handled = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, handle) for s in handled}
    try:
        yield caught
    finally:
        for s, old in before.items():
            signal.signal(s, old)
