"""A run: data, clients, rounds, evaluation, records, checkpoints, resume. Follow the data from here.

experiment.run -> engine.Engine.round -> one file of algorithms/
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedman import checkpoint
from fedman.algorithms import ALGORITHMS
from fedman.batches import Samples
from fedman.data import Dataset, load, partition
from fedman.engine import Engine, Federation, Stopped, Training
from fedman.errors import Diverged, UserError
from fedman.man import Measure
from fedman.models import build
from fedman.records import RunFolder, version, write_json, write_text, write_whole
from fedman.sampling import cohort
from fedman.stacked import Stacked

if TYPE_CHECKING:
    from fedman.config import Config

Progress = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    summary: dict[str, Any]
    rounds: list[dict[str, Any]]  # the records, one a round
    models: dict[str, dict[str, Tensor]]  # "all", "sel", "cloud": parameters by name, for load_state_dict

    @property
    def accuracy(self) -> float:
        """The headline: test accuracy of `all`, the mean of all clients' last models, in percent."""
        return self.summary["accuracy"]["all"]


class Interrupted(Exception):
    """A signal ended the run after a checkpoint was written."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def run(
    config: Config,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
) -> Result:
    """Run a configuration to its end, or from its last checkpoint to its end.

    `data` and `model` replace the configuration's own by name. With `out`, everything is written there.
    """
    data = data or load(config.dataset, config.data_dir)
    parts = partition.split(
        data.y_train,
        config.partition,
        config.clients,
        classes=data.classes,
        seed=config.partition_seed,
        sigma=config.unbalanced,
        dataset=data.name,
    )
    augment = data.augment if config.augment is None else config.augment
    if augment and data.x_train.dtype != "uint8":
        raise UserError(f"augment: {data.name} holds no images of bytes (uint8); use augment=false")
    device = pick_device(device)
    precision = pick_precision(config.precision, device)
    model = model if model is not None else initial_model(config.model, data, config.seed)
    stacked = Stacked(model, output=config.man_logits, layers=man_layers(config.man_variant))
    samples = Samples(
        x=torch.as_tensor(data.x_train, device=device),
        y=torch.as_tensor(data.y_train, device=device),
        x_test=torch.as_tensor(data.x_test, device=device),
        y_test=torch.as_tensor(data.y_test, device=device),
        parts=[torch.as_tensor(p, device=device) for p in parts],
        mean=data.mean,
        std=data.std,
        augment=augment,
    )
    engine = Engine(
        stacked,
        ALGORITHMS[config.algorithm](**config.hyper),
        samples,
        Training(**{name: getattr(config, name) for name in Training.__dataclass_fields__}),
        chunk=config.chunk,
        device=device,
        precision=precision,
    )
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(precision))
        folder = stack.enter_context(RunFolder(out)) if out is not None else None
        caught = stack.enter_context(stop_on_signal(engine)) if folder else []
        log = stack.enter_context(tensorboard(folder)) if folder and config.tensorboard else None
        return _rounds(config, engine, folder, resume, precision, caught, progress, warn, log)


def _rounds(
    config: Config,
    engine: Engine,
    folder: RunFolder | None,
    resume: bool,
    precision: str,
    caught: list[int],
    progress: Progress,
    warn: Callable[[str], object],
    log: Any,
) -> Result:
    state, records, before = engine.start(), [], 0.0
    flat = config.flat()
    decisive = {k: v for k, v in flat.items() if k not in ("data_dir", "checkpoint_seconds", "tensorboard")}
    if folder and resume and (found := checkpoint.load(folder.checkpoint, state, decisive, warn)):
        state, before = found
    if folder:
        from fedman.config import to_toml

        records = folder.cut(state.round)
        write_text(folder.config, to_toml(flat))
    started = saved = time.perf_counter()

    def spent() -> float:
        return before + time.perf_counter() - started

    def keep() -> None:
        if folder:
            folder.sync()
            checkpoint.save(folder.checkpoint, state, decisive, spent())

    for t in range(state.round, config.rounds):
        clock = time.perf_counter()
        try:
            outcome = engine.round(
                state, cohort(t, config.clients, config.participation, config.cohort, config.schedule_seed)
            )
        except Stopped:
            keep()
            how = f"round {t} of {config.rounds} is saved; go on with: fedman run --out {folder.path} --resume"  # type: ignore[union-attr]
            raise Interrupted(caught[0], how) from None
        except Diverged as error:
            if folder:
                write_json(
                    folder.diverged,
                    {"diverged": str(error), "round": t + 1, "config": flat, "version": version()},
                )
            raise
        record: dict[str, Any] = {
            "round": t + 1,
            "lr": outcome.lr,
            "cohort": outcome.cohort,
            "quarantined": outcome.quarantined,
            "loss": outcome.loss,
            "man": outcome.man,
        }
        record |= evaluate(config, engine, state, t + 1)
        record["seconds"] = round(time.perf_counter() - clock, 4)
        records.append(record)
        if folder:
            folder.append(record)
            if time.perf_counter() - saved >= config.checkpoint_seconds and t + 1 < config.rounds:
                keep()
                saved = time.perf_counter()
        if log:
            log_round(log, record)
        progress(record)
    keep()

    summary = {
        "method": config.method,
        "config": flat,
        "accuracy": records[-1]["accuracy"],
        "test_loss": records[-1]["test_loss"],
        "rounds_to_target": rounds_to_target(records, config.target),
        "seconds": round(spent(), 3),
        "device": device_name(engine.device),
        "precision": precision,
        "version": version(),
        "torch": torch.__version__,
    }
    models = {
        name: {k: v.cpu().clone() for k, v in engine.stacked.parameters(w).items()}
        for name, w in averages(engine, state).items()
    }
    if folder:
        tensors = {f"{name}.{k}": v for name, model in models.items() for k, v in model.items()}
        write_whole(folder.model, lambda path: save_file(tensors, path))
        write_json(folder.summary, summary)
    return Result(summary, records, models)


def averages(engine: Engine, state: Federation) -> dict[str, Tensor]:
    """The three models of a round: the mean of all clients, of the round's clients, and the one sent next."""
    return {"all": engine.everyone(state), "sel": state.sel, "cloud": state.server["w"]}


def evaluate(config: Config, engine: Engine, state: Federation, done: int) -> dict[str, Any]:
    """Test accuracy in percent and test loss of the models that are due after round `done`."""
    last = done == config.rounds
    accuracy: dict[str, float] = {}
    loss: dict[str, float] = {}
    for name, w in averages(engine, state).items():
        every = config.eval_every if name == "all" else config.eval_others_every
        if not (last or done % every == 0):
            continue
        if name == "cloud" and "sel" in accuracy and torch.equal(w, state.sel):
            accuracy[name], loss[name] = accuracy["sel"], loss["sel"]
        else:
            accuracy[name], loss[name] = engine.evaluate(w)
    return {"accuracy": accuracy, "test_loss": loss}


def rounds_to_target(records: list[dict[str, Any]], target: float | None) -> int | None:
    """The first round (counted from 1) in which `all` reaches the target; None if it never does."""
    if target is None:
        return None
    return next((r["round"] for r in records if r["accuracy"].get("all", -1) >= target), None)


def initial_model(name: str, data: Dataset, seed: int) -> nn.Module:
    """The model with PyTorch's default initialisation under `seed`, always drawn on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(name, data.shape, data.classes)


def man_layers(variant: str) -> dict[str, Measure] | None:
    """None: the paper's formula (all activations). "tiny-code": the term in the authors' Tiny-ImageNet code, which
    misses the third convolution and adds the batch variance of the second linear layer (protocol §2.5)."""
    if variant == "formula":
        return None

    def mean_square(a: Tensor) -> Tensor:
        return a.square().flatten(1).mean(1)

    def with_variance(a: Tensor) -> Tensor:
        return mean_square(a) + a.var(0).mean()

    return {"relus.0": mean_square, "relus.1": mean_square, "relus.3": mean_square, "relus.4": with_variance}


def pick_device(name: str) -> str:
    """ "auto" is CUDA where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: no CUDA device is available; use auto or cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"device: {name!r} is not one of auto, cpu, cuda")
    return name


def pick_precision(name: str, device: str) -> str:
    """ "auto" is TF32 on CUDA and fp32 elsewhere."""
    if name == "auto":
        return "tf32" if device == "cuda" else "fp32"
    if name in ("tf32", "bf16") and device != "cuda":
        raise UserError(f"precision: {name} needs a CUDA device; use fp32")
    return name


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 in CUDA's matrix products and convolutions, or not, for the time of a run."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, conv.allow_tf32
    matmul.allow_tf32 = conv.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, conv.allow_tf32 = before


@contextmanager
def stop_on_signal(engine: Engine) -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the current round early; the list holds the signal that came."""
    caught: list[int] = []

    def handle(signum: int, frame: object) -> None:
        if caught:
            signal.signal(signum, signal.SIG_DFL)  # a second one means it
        caught.append(signum)
        engine.stopping.set()

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for s, old in before.items():
            signal.signal(s, old)


def device_name(device: torch.device) -> str:
    """A device as a person would name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


@contextmanager
def tensorboard(folder: RunFolder) -> Iterator[Any]:
    """A TensorBoard writer into the run's folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard: not installed; pip install 'fedman[tensorboard]'") from None
    with SummaryWriter(str(folder.path / "tensorboard")) as writer:
        yield writer


def log_round(log: Any, record: dict[str, Any]) -> None:
    """One record as TensorBoard scalars."""
    scalars = {"loss": record["loss"], "lr": record["lr"]}
    scalars |= {f"accuracy/{k}": v for k, v in record["accuracy"].items()}
    scalars |= {f"man/{k}": v for k, v in record["man"].items()}
    for name, value in scalars.items():
        log.add_scalar(name, value, record["round"])
