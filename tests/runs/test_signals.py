"""The first signal asks for a checkpoint, the second one kills."""

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


def test_a_hangup_that_is_ignored_stays_so():
    """As under nohup."""
    code = """
import os, signal, threading
from fedman.runs.signals import stop_on_signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with stop_on_signal(threading.Event()) as caught:
    os.kill(os.getpid(), signal.SIGHUP)
    assert caught == []
print("went on")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "went on\n"
