"""The server's options: split from the run's keys, saved in its folder, some of them fixed."""

import json
import re
from pathlib import Path

import pytest

from fedman.errors import UserError
from fedman.flower.server_options import OPTIONS_FILE, ServerOptions, refuse_changed, save_options, split_options
from fedman.runs.key_text import read_toml

ROOT = Path(__file__).parents[2]


def test_options_are_split_from_the_keys_of_the_configuration():
    values, options = split_options({"rounds": "3", "quorum": "0.75", "sizes": "12,9"})
    assert values == {"rounds": "3"}
    assert options == ServerOptions(quorum=0.75, sizes=(12, 9))


def test_the_page_says_all_options_and_their_defaults():
    page = (ROOT / "docs/flower.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| key \| \| default \|\n.*?\n\n", page, re.MULTILINE | re.DOTALL)
    said = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*?) ?\|$", table, re.MULTILINE))
    assert said.pop("norm_bound") == "what the optimiser's steps allow"
    assert said.pop("keep_last") == "true with `aggregation=mean`"
    found = {key: json.loads(text or "null") for key, text in said.items()} | {"norm_bound": None, "keep_last": True}
    assert found == {name: field.default for name, field in ServerOptions.model_fields.items()}


def test_a_wrong_value_is_named():
    with pytest.raises(UserError, match="retries: should be greater than or equal to 0, not '-1'"):
        split_options({"retries": "-1"})


def test_a_resumed_run_keeps_its_fixed_options(tmp_path):
    options = ServerOptions(sizes=(12, 9), keep_last=False)
    refuse_changed(tmp_path, options)
    save_options(tmp_path, options)
    assert ServerOptions.model_validate(read_toml(tmp_path / OPTIONS_FILE)) == options
    with pytest.raises(UserError, match="holds a run of another configuration; sizes, keep_last differ"):
        refuse_changed(tmp_path, ServerOptions())
    refuse_changed(tmp_path, options.model_copy(update={"wait": 1.0}))
