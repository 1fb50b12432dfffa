"""Clients with data of their own: an .npz, a folder of pictures; what does not fit is refused in one line."""

import json
import os
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from PIL import Image

from fedman.config import resolve
from fedman.data import load
from fedman.errors import TooFew, UserError
from fedman.flower import client_data, worker
from fedman.flower.messages import SampleKind
from fedman.flower.server import serve
from fedman.flower.server_options import ServerOptions
from tests.flower.local_grid import LocalGrid

SIZES = (12, 9, 15)
PICTURES = SampleKind(shape=(3, 8, 8), classes=4, images=True, mean=(0.5,) * 3, std=(0.25,) * 3)
ROWS = SampleKind(shape=(5,), classes=3, images=False, mean=(0.0,), std=(1.0,))


def rows(n, seed, classes=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, classes, n)


def texts(n, seed):
    return tuple(np.random.default_rng(seed).integers(0, 9, (2, n, 6)))


def pictures(folder, classes, seed=0, size=(8, 8), mode="RGB"):
    """`{class: number}` pictures; their arrays in the order in which they are read."""
    rng = np.random.default_rng(seed)
    made = []
    for name, n in sorted(classes.items()):
        (folder / str(name)).mkdir(parents=True)
        for i in range(n):
            pixels = rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / str(name) / f"{i:03d}.png")
            made.append(pixels)
    return np.stack(made)


def federation(tmp_path, samples=rows, **keys):
    """A server with a test set and three clients with files of their own."""
    x, y = samples(30, 9)
    np.savez(tmp_path / "server.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    grid = LocalGrid.of(3, tmp_path / "memory")
    for k, n in enumerate(SIZES):
        np.savez(tmp_path / f"client{k}.npz", **dict(zip(("x", "y"), samples(n, k), strict=True)))
        grid.nodes[100 + k]["data"] = str(tmp_path / f"client{k}.npz")
    config = resolve({
        "dataset": f"npz:{tmp_path}/server.npz", "clients": 3, "participation": 1, "rounds": 2, "batch_size": 4,
        "algorithm": "feddc", "zeta": 0.1, **keys,
    })  # fmt: skip
    return grid, config, ServerOptions(sizes=SIZES, wait=0.2, round_timeout=0.2, retries=0)


def test_clients_train_on_their_own_files(tmp_path):
    """The result is that of the simulator whose partition these files are."""
    grid, config, options = federation(tmp_path, chunk=1)
    there = serve(grid, config, options, out=tmp_path / "out", device="cpu")
    assert [r["refused"] for r in there.rounds] == [{}, {}]
    import torch

    from fedman.data import from_arrays
    from tests.federations import simulator

    parts = [rows(n, k) for k, n in enumerate(SIZES)]
    x, y = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    data = from_arrays(x, y, *rows(30, 9))
    cuts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    machine = simulator(config, data, cuts)
    state = machine.start()
    for _ in range(2):
        machine.round(state, [0, 1, 2])
    assert torch.equal(torch.cat([v.flatten() for v in there.models["cloud"].values()]), state.server["w"])


def test_clients_have_texts_of_their_own_and_no_test_set(tmp_path):
    grid, config, options = federation(tmp_path, texts, task="language-model", model="lstm", rounds=1)
    (record,) = serve(grid, config, options, out=tmp_path / "out", device="cpu").rounds
    assert record["refused"] == {}
    assert np.isfinite(record["loss"])


def test_public_data_are_looked_for_in_the_nodes_own_folder(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "load", lambda name, folder: asked.append((name, folder)) or load(name))
    grid = LocalGrid.of(2, tmp_path / "memory", **{"data-dir": str(tmp_path / "data")})
    config = resolve({"dataset": "digits", "clients": 2, "participation": 1, "rounds": 1, "epochs": 1, "model": "mlp"})
    serve(grid, config, ServerOptions(wait=0.2, round_timeout=30.0, retries=0), out=tmp_path / "out", device="cpu")
    assert set(asked) == {("digits", str(tmp_path / "data"))}


def test_sizes_are_the_servers_knowledge(tmp_path):
    """A client with another number of samples than the server expects is refused."""
    grid, config, options = federation(tmp_path)
    np.savez(tmp_path / "client1.npz", **dict(zip(("x", "y"), rows(900, 1), strict=True)))
    with pytest.raises(TooFew, match="client 1 has 900 samples of its own, the server knows 9"):
        serve(grid, config, options, out=tmp_path / "out", device="cpu")
    del grid.nodes[101]["data"]
    with pytest.raises(TooFew, match="client 1 has 0 samples of its own, the server knows 9"):
        serve(grid, config, options, out=tmp_path / "out", device="cpu")
    with pytest.raises(UserError, match="sizes: has 3 numbers for 4 clients"):
        serve(grid, resolve({**config.flat(), "clients": 4}), options, out=tmp_path / "out", device="cpu")


def test_the_server_cannot_name_a_file_on_a_client(tmp_path):
    grid, config, options = federation(tmp_path)
    for node in grid.nodes.values():
        del node["data"]
    with pytest.raises(TooFew, match="data: the run has no public data set; start this node with data=PATH"):
        serve(grid, config, options.model_copy(update={"sizes": None}), out=tmp_path / "out", device="cpu")


@pytest.mark.parametrize("own", ["", "own.npz"])
def test_a_file_that_a_hostile_server_names_is_not_read(tmp_path, monkeypatch, own):
    """Not even to count the clients in it, which the settings of such a data set need."""
    (tmp_path / "secret.json").write_text("{}")
    monkeypatch.setattr("fedman.config.natural_clients", lambda source: pytest.fail("read"))
    settings, kind = json.dumps({"dataset": f"leaf:{tmp_path / 'secret.json'}"}), json.dumps(asdict(ROWS))
    with pytest.raises(UserError, match="data: the server names a file of this machine, which is not read"):
        worker._build.__wrapped__(settings, kind, own, "", "cpu")


def test_a_node_whose_part_of_a_public_data_set_has_another_size_is_refused(tmp_path, monkeypatch):
    """Its copy of the data, or its fedman or numpy, is another one; the parts would overlap."""

    def there(name, folder):
        data = load(name)
        return replace(data, x_train=data.x_train[:900], y_train=data.y_train[:900]) if folder == "other" else data

    monkeypatch.setattr(worker, "load", there)
    grid = LocalGrid.of(3, tmp_path / "memory")
    grid.nodes[101]["data-dir"] = "other"
    config = resolve({"dataset": "digits", "clients": 3, "participation": 1.0, "rounds": 1, "unbalanced": 0.3})
    options = ServerOptions(wait=5.0, round_timeout=5.0, retries=0)
    (record,) = serve(grid, config, options, out=tmp_path / "out", device="cpu").rounds
    assert record["quarantined"] == [1]
    assert re.match(
        r"the client says: partition: client 1 has \d+ samples here, the server knows", record["refused"]["1"]
    )


def test_a_folder_of_pictures(tmp_path):
    made = pictures(tmp_path, {0: 2, 3: 3, 10: 0})
    x, y = client_data.read(tmp_path, PICTURES)
    assert np.array_equal(x, made)
    assert y.tolist() == [0, 0, 3, 3, 3]
    assert client_data.count(tmp_path) == 5
    grey, _ = client_data.read(tmp_path, SampleKind((1, 8, 8), 4, True, (0.5,), (0.25,)))
    assert grey.shape == (5, 8, 8, 1)


def test_a_server_that_reads_the_same_folders_has_the_same_classes(tmp_path):
    for half in ("train", "test"):
        pictures(tmp_path / half, dict.fromkeys(range(11), 1))
    served = load(f"images:{tmp_path}")
    x, y = client_data.read(tmp_path / "train", replace(PICTURES, classes=11))
    assert np.array_equal(x, served.x_train)
    assert np.array_equal(y, served.y_train)


@pytest.mark.parametrize(
    ("make", "task", "message"),
    [
        (lambda d: pictures(d, {"cat": 1}), PICTURES, "cat: sub-folders are named by their class's number"),
        (lambda d: pictures(d, {0: 1, 4: 1}), PICTURES, "has a label 4; the run's classes are 0 to 3"),
        (lambda d: pictures(d, {0: 1}, size=(9, 8)), PICTURES, "000.png: is 9x8, wanted is 8x8"),
        (lambda d: (d / "0").mkdir(), PICTURES, "no sub-folder of it holds pictures"),
        (lambda d: ((d / "0").mkdir(), (d / "0" / "a.png").write_bytes(b"GIF89a")), PICTURES, "a.png: is not a whole"),
        (lambda d: ((d / "0").mkdir(), os.mkfifo(d / "0" / "a.png")), PICTURES, "a.png: is not a regular file"),
        (lambda d: pictures(d, {"0": 1, "00": 1}), PICTURES, "00: sub-folders are named by their class's number"),
        (lambda d: pictures(d, {10**20: 1}), PICTURES, "0: sub-folders are named by their class's number"),
        (lambda d: pictures(d, {0: 1}), ROWS, "holds pictures, but the run's samples are of shape"),
    ],
)
def test_folders_that_do_not_fit(make, task, message, tmp_path):
    make(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        client_data.read(tmp_path, task)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x": np.ones((3, 4), np.float32), "y": np.arange(3)},
            r"holds numbers of \(4,\); the run wants numbers",
        ),
        ({"x": np.ones((3, 5), np.float32), "y": np.arange(3) + 5}, "has a label 7; the run's classes are 0 to 2"),
        ({"x": np.ones((3, 5), np.float32), "y": np.arange(2)}, "x has 3 samples but y has 2 labels"),
        ({"x": np.ones((3, 5), np.float32)}, "has x; wanted are x_train, y_train; or x, y"),
        ({"x": np.full((3, 5), np.nan), "y": np.arange(3)}, "not finite"),
    ],
)
def test_files_that_do_not_fit(arrays, message, tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match=message):
        client_data.read(tmp_path / "mine.npz", ROWS)


def test_whole_numbers_in_a_regression(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.ones((3, 5), np.float32), y=np.arange(3))
    with pytest.raises(UserError, match="has targets of whole numbers; the run wants floating-point numbers"):
        client_data.read(tmp_path / "mine.npz", replace(ROWS, classes=0))


def test_one_class_alone_is_fine(tmp_path):
    np.savez(tmp_path / "mine.npz", x_train=np.ones((3, 5), np.float32), y_train=np.zeros(3, np.int64))
    assert client_data.read(tmp_path / "mine.npz", ROWS)[1].tolist() == [0, 0, 0]
