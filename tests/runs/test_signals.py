"""The first signal asks for a checkpoint, the second one kills."""

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills(second):
    """The first asks for a checkpoint; who cannot wait for that sends another."""
    code = f"""
import os, signal, threading
from fedman.runs.signals import stop_on_signal
stopping = threading.Event()
with stop_on_signal(stopping) as caught:
    os.kill(os.getpid(), signal.SIGINT)
    assert caught == [signal.SIGINT] and stopping.is_set()
    print("asked", flush=True)
    os.kill(os.getpid(), {int(second)})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("asked\n", -second)
