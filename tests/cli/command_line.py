"""Commands called as a user would: ending well, or refused."""

import pytest

from fedman.cli.commands import main


def refused(capsys, words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert "Traceback (most recent" not in captured.err
    assert captured.out == ""
    return captured.err


def main_ok(words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 0
