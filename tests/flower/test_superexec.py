"""The SuperExec's options; that it runs apps is tested by every deployment."""

import pytest

from fedman.errors import UserError
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
