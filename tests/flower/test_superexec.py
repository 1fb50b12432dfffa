"""The SuperExec's options, and its end; that it runs apps is tested by every deployment."""

import multiprocessing
import signal
import time

import pytest

from fedman.errors import UserError
from fedman.flower import superexec
from fedman.flower.superexec import main

ADDRESS = ["--insecure", "--runtime-api-address", "127.0.0.1:1"]


def test_a_missing_secret_is_named(tmp_path):
    with pytest.raises(UserError, match=r"superexec-auth-secret-file: Failed to read .*secret"):
        main([*ADDRESS, "--superexec-auth-secret-file", str(tmp_path / "secret")])


def test_the_address_is_required(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--insecure"])
    assert end.value.code == 2
    assert "--runtime-api-address" in capsys.readouterr().err


def test_it_ends_if_nobody_answers(monkeypatch):
    """A SuperNode or SuperLink that is gone does not leave its SuperExec behind."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    monkeypatch.setattr(superexec, "PATIENCE", 0.5)
    started = time.monotonic()
    try:
        with pytest.raises(UserError, match=r"^runtime-api-address: 127.0.0.1:1 does not answer \(.*refused\)"):
            main(ADDRESS)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert time.monotonic() - started < 50  # of the usual 60


def stubborn(started):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started.set()
    time.sleep(60)


def test_apps_that_do_not_end_are_killed(monkeypatch):
    monkeypatch.setattr(superexec, "GRACE", 0.2)
    context = multiprocessing.get_context("fork")
    started = context.Event()
    app = context.Process(target=stubborn, args=[started])
    app.start()
    assert started.wait(60)
    superexec._end_apps()
    assert app.exitcode == -signal.SIGKILL
