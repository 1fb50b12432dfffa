"""`fedman data`: pictures of partitions, and what is refused."""

import pytest

from tests.cli.command_line import main_ok, refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["get", "cifar11"], "'cifar11' is not known"),
        (["get"], "Missing argument"),
        (["show", "partition=path11"], "partition"),
        (["show", "--plot", "rows.npz/p.png"], "rows.npz"),
        (["show", "--plot", "p.docx"], "p.docx"),
    ],
)
def test_bad_words(workplace, capsys, words, message):
    assert message in refused(capsys, ["data", *words])


def test_data_show(workplace, tmp_path, capsys):
    main_ok(["data", "show", "--preset", "digits", "--plot", "p.svg"])
    assert "classes" in capsys.readouterr().out
    assert (tmp_path / "p.svg").read_bytes().startswith(b"<?xml")


def test_data_show_leaves_out_what_is_held_out(workplace, capsys):
    main_ok(["data", "show", "dataset=digits", "partition=iid", "clients=1", "validation=0.5"])
    assert "smallest 719, largest 719" in capsys.readouterr().out
