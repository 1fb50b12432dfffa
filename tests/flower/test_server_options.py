"""The server's options: split from the run's keys, saved in its folder, some of them fixed."""

import pytest

from fedman.config import read_toml
from fedman.errors import UserError
from fedman.flower.server_options import OPTIONS_FILE, ServerOptions, save_options, split_options


def test_options_are_split_from_the_keys_of_the_configuration():
    values, options = split_options({"rounds": "3", "quorum": "0.75", "sizes": "12,9"})
    assert values == {"rounds": "3"}
    assert options == ServerOptions(quorum=0.75, sizes=(12, 9))


def test_a_wrong_value_is_named():
    with pytest.raises(UserError, match="retries: should be greater than or equal to 0, not '-1'"):
        split_options({"retries": "-1"})


def test_a_resumed_run_keeps_its_fixed_options(tmp_path):
    options = ServerOptions(sizes=(12, 9), keep_last=False)
    save_options(tmp_path, options, resume=False)
    assert ServerOptions.model_validate(read_toml(tmp_path / OPTIONS_FILE)) == options
    with pytest.raises(UserError, match="holds a run of another configuration; sizes, keep_last differ"):
        save_options(tmp_path, ServerOptions(), resume=True)
    save_options(tmp_path, options.model_copy(update={"wait": 1.0}), resume=True)
