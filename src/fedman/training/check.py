"""Checks before training that the parts of a run fit together: one line that says which does not, and why."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from fedman.aggregation import Aggregation
from fedman.algorithms import Algorithm, Local, State
from fedman.data.dataset import Dataset
from fedman.errors import UserError, describe
from fedman.execution.training_pass import TrainingPass
from fedman.models.parameters import ParameterLayout, copy_of, holding, other_names
from fedman.optimizers import LocalOptimizer
from fedman.tasks import Task
from fedman.training.attacks import Attack
from fedman.training.batches import Samples
from fedman.training.evaluate import grade

RESERVED = (
    *("round", "cohort", "quarantined", "lr", "loss", "penalty", "test_loss", "seconds", "clients", "attackers"),
    *("extended_from", "refused", "restarted", "attempts", "bytes_down", "bytes_up"),
    *("config", "method", "headline", "lower_is_better", "rounds_to_target", "device", "precision", "execution"),
    *("version", "source", "earlier_sources", "torch", "stacked", "extended", "stopped", "evaluated_on"),
    *("inputs", "curve", "diverged"),
    *("sum", "man"),  # in the lines of files, and in those of earlier versions
)
"""Names in records and summaries that a figure of a task cannot have."""

MIXED = "gives a client something else among others than alone; norms and sums run over the last axis, nothing is drawn"


def check_fit(
    task: Task, data: Dataset, model: nn.Module, samples: Samples, dtype: torch.dtype = torch.float32
) -> None:
    """That the model takes the samples, and the task its output in numbers of this type and the targets: tried on up to
    two samples."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = samples.inputs(samples.x[:2], parameter.dtype).to(parameter.device)
    y = samples.y[:2].to(parameter.device)
    name = type(model).__name__
    _check_ids(data, model, samples)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            output = copy_of(model).eval()(x.clone())
        except UserError:
            raise
        except Exception as error:  # a user's module may raise anything
            whole = samples.x.is_floating_point() and data.x_train.dtype.kind in "iu"
            hint = (
                "; it is given whole numbers as float; say from_arrays(..., ids=True) if they are ids" if whole else ""
            )
            raise UserError(
                f"model: {name} cannot take samples of shape {_shape(x)} ({describe(error)}){hint}"
            ) from error
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(x):
        raise UserError(
            f"model: {name} returns {_got(output)} for {len(x)} samples; a tensor [{len(x)}, ...] is wanted"
        )
    task.check(data, tuple(output.shape))
    kind, output = type(task).__name__, output.to(dtype)
    _check_targets(task, data, output)
    try:
        found = {"loss": task.loss(output, y), **(scores := dict(task.scores(output, y)))}
        weight = task.weight(y)
    except Exception as error:  # so may a user's task
        shapes = f"outputs {_shape(output)} and targets {_shape(y)} a sample"
        raise UserError(f"task: {kind} fails for {shapes} ({describe(error)})") from error
    for what, value in (*found.items(), *([] if weight is None else [("weight", weight)])):
        if not isinstance(value, Tensor) or value.shape != (len(x),):
            raise UserError(
                f"task: {kind}'s {what} has {_got(value)} for {len(x)} samples; one number a sample is wanted"
            )
    _check_parameters(model, x)
    try:
        figures = grade(task, {"loss": 1.0, **dict.fromkeys(scores, 1.0)})
    except Exception as error:
        raise UserError(f"task: {kind}.summarise gives no numbers by name ({describe(error)})") from error
    if taken := [name for name in (*scores, *figures) if name in RESERVED]:
        raise UserError(f"task: a figure cannot be called {taken[0]}, which records have for something else")
    if task.headline not in figures:
        raise UserError(f"task: the headline {task.headline!r} is not one of {kind}'s figures: {', '.join(figures)}")


def _check_targets(task: Task, data: Dataset, output: Tensor) -> None:
    """That there is an output for the smallest and the largest of all classes. In a stack of models a class without one
    would have no loss, on a GPU it would end the process."""
    for field, y in (("y_train", data.y_train), ("y_test", data.y_test)):
        if not y.size or y.dtype.kind not in "iu":
            continue
        places = [int(np.unravel_index(i, y.shape)[0]) for i in (y.argmin(), y.argmax())]
        try:
            task.loss(output[[0, -1]].cpu(), torch.as_tensor(y[places]))
        except IndexError as error:
            raise UserError(
                f"{data.name}: {field} has targets {y.min()} to {y.max()}, which do not fit outputs {_shape(output)} a "
                f"sample ({describe(error)})"
            ) from error
        except Exception:  # a user's task may raise anything: the trial on its own device says so
            return


def _check_parameters(model: nn.Module, x: Tensor) -> None:
    """That a forward pass computes with the parameters that it is given, and leaves them as they are."""
    name, copied = type(model).__name__, copy_of(model).train()
    given = {n: p.detach().clone().requires_grad_() for n, p in copied.named_parameters() if p.requires_grad}
    before = [p.detach().clone() for p in given.values()]
    constant = {n: v.clone() for n, v in copied.named_buffers() if not (v.is_floating_point() or v.is_complex())}

    def play() -> object:
        with torch.random.fork_rng(devices=[]), TrainingPass(None, None), holding(copied, given, other_names(copied)):
            return copied(x.clone())

    with warnings.catch_warnings(record=True) as told:  # training gives them again
        warnings.simplefilter("always")
        try:
            output = play()
        except UserError:
            raise
        except Exception as error:  # a user's module may raise anything
            raise UserError(f"model: {name} fails in training mode ({describe(error)})") from error
    for p, value, parameter in zip(given.values(), before, given, strict=True):
        if p._version or not torch.allclose(p, value, rtol=0, atol=0, equal_nan=True):
            raise UserError(
                f"model: {name}'s forward pass changes its parameter {parameter}; let it compute with a copy"
            )
    if any("None of the inputs have requires_grad=True" in str(warning.message) for warning in told):
        reached = {id(leaf) for leaf in _leaves(output)}
        if not reached.issuperset(map(id, given.values())):
            raise UserError(
                f"model: {name} checkpoints a part with use_reentrant=True, which is not trained; use False"
            )
    own = {id(p): n for each in (model, copied) for n, p in each.named_parameters()}
    loose = {id(v): n for module in copied.modules() for n, v in vars(module).items() if isinstance(v, Tensor)}
    leaves = list(_leaves(output))  # those that the forward pass made itself have no name
    foreign = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in own]
    again = {id(leaf) for leaf in _leaves(play())} if foreign else set()  # of those, the ones that are kept
    for leaf in leaves:
        if id(leaf) in own:
            raise UserError(
                f"model: {name} reaches its parameter {own[id(leaf)]} through a list, a function or another object; "
                "use it as an attribute of its module, where clients put their own"
            )
        if id(leaf) in loose:
            what = loose[id(leaf)]
            raise UserError(f"model: {name}'s {what} requires a gradient; make it an nn.Parameter to train it")
        if id(leaf) in again and isinstance(leaf, nn.Parameter):
            raise UserError(
                f"model: {name} uses a parameter of shape {tuple(leaf.shape)} that is none of its own, so that nobody "
                "would train it; keep modules as attributes, several of them in an nn.ModuleList, or set "
                "requires_grad_(False) if they are not to be trained"
            )
    trained = ParameterLayout.of_buffers(model).names
    after = dict(copied.named_buffers())
    if counted := [n for n, v in constant.items() if n not in trained and n in after and not torch.equal(v, after[n])]:
        warnings.warn(
            f"model: {name} changes its buffer {counted[0]}, which is of whole numbers and stays as it is from step to "
            "step; one of floating-point numbers is averaged over clients",
            stacklevel=2,
        )


def _leaves(output: object) -> Iterator[Tensor]:
    """The tensors without a history from which autograd would compute gradients of an output."""
    found = dict.fromkeys([output.grad_fn] if isinstance(output, Tensor) else [])
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        new = [n for n, _ in getattr(node, "next_functions", ()) if n is not None and n not in found]
        found |= dict.fromkeys(new)
        waiting += new


def warn_of_single_samples(model: nn.Module, samples: Samples, batch_size: int) -> None:
    """Say so where a client has a batch of one sample, and a batch-norm layer a single value a channel in it."""
    single = [k for k, part in enumerate(samples.parts) if batch_size == 1 or len(part) % batch_size == 1]
    if not single:
        return
    played, parameter, found = copy_of(model).eval(), next(model.parameters()), []

    def note_single_value(name: str, module: nn.Module, args: object, out: object) -> None:
        if isinstance(out, Tensor) and out.numel() == out.shape[1]:
            found.append(name)

    for name, module in played.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_hook(partial(note_single_value, name))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        played(samples.inputs(samples.x[:1], parameter.dtype).to(parameter.device))
    if found:
        who = f"client {single[0]}" + (f" and {len(single) - 1} others have" if len(single) > 1 else " has")
        warnings.warn(
            f"{who} a batch of one sample, of which the batch-norm layer {found[0]} knows no variance: in that step it "
            f"returns its bias; batch_size={batch_size + 1} may avoid it",
            stacklevel=2,
        )


def _check_ids(data: Dataset, model: nn.Module, samples: Samples) -> None:
    """That all inputs, where they are ids, are such as the model's largest embedding has."""
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not sizes or samples.x.is_floating_point() or samples.images:
        return
    for field, x in (("x_train", samples.x), ("x_test", samples.x_test)):
        if x.numel() and not (int(x.min()) >= 0 and int(x.max()) < max(sizes)):
            allowed = f"the model's embedding has 0 to {max(sizes) - 1}"
            raise UserError(f"{data.name}: {field} has ids {int(x.min())} to {int(x.max())}; {allowed}")


def trial(clients: int, size: int) -> Local:
    """The settings of a step with which an algorithm is played on models of `size` numbers."""
    return Local(
        lr=torch.tensor(0.1),
        lr0=0.1,
        decay=0.01,
        clip=1.0,
        p=torch.full((clients, 1), 1.5),
        steps=torch.full((clients, 1), 3.0),
        is_weight=torch.ones(size, dtype=torch.bool),
    )


def check_algorithm(algorithm: Algorithm) -> Algorithm:
    """`algorithm`, once played by three clients on models of two numbers: it returns what it must and writes to none of
    its inputs."""
    name, hp = f"algorithm: {type(algorithm).__name__}", trial(3, 2)
    if missing := [key for key in ("w", algorithm.cloud) if key not in algorithm.server]:
        raise UserError(f"{name}.server has no {missing[0]!r}, the server's model")
    inputs: list[tuple[str, Tensor, Tensor]] = []

    def given(where: str, vectors: State) -> dict[str, Tensor]:
        inputs.extend((f"{where}[{key!r}]", v, v.clone()) for key, v in vectors.items())
        return dict(vectors)

    w = torch.tensor([[0.5, -0.2], [0.1, 0.4], [-0.3, 0.2]])
    server = given("server", {key: torch.full((2,), 0.3) for key in algorithm.server})
    memory = given("client", {key: torch.full_like(w, 0.1) for key in algorithm.client})
    scratch = given("client", {key: torch.zeros_like(w) for key in algorithm.scratch})
    inputs.append(("w", w, w.clone()))
    stage = "begin"
    try:
        kept = {**memory, **given("client", algorithm.begin(server, memory, hp))}
        stage = "step"
        after = algorithm.step(w, torch.cos, server, {**kept, **scratch}, hp)
        after, carried = after if isinstance(after, tuple) else (after, scratch)
        _require_shape(name, "step returns w", after, (3, 2))
        _require_vectors(name, "step returns the vectors", carried, scratch, (3, 2))
        stage = "finish"
        new, upload = algorithm.finish(after, server, {**kept, **carried}, hp)
        _require_vectors(name, "finish returns the memory", new, memory, (3, 2))
        _require_vectors(name, "finish returns the upload", upload, {"w", *upload}, (3, 2))
        stage = "update"
        done = algorithm.update(server, {key: v.mean(0) for key, v in upload.items()}, 0.5)
        _require_vectors(name, "update returns the vectors", done, server, (2,))
        for key, v, before in inputs:
            if not torch.equal(v, before):
                raise UserError(f"{name} writes to its input {key}; a step must return new tensors")
        together = _local_work(algorithm, w, server)
        stage = "step of a client alone"
        alone = [_local_work(algorithm, row, server) for row in w.split(1)]
        for what, *rows in zip(together, *alone, strict=True):
            if not torch.allclose(what, torch.cat(rows), equal_nan=True):
                raise UserError(f"{name} {MIXED}")
    except UserError:
        raise
    except Exception as error:  # a user's algorithm may raise anything
        raise UserError(f"{name}.{stage} fails ({describe(error)})") from error
    return algorithm


@cache
def can_be_stacked(kind: type[Algorithm]) -> bool:
    """Whether the local work of such an algorithm can have rows, one for each client, in the place of a server's vector
    and a column [S, 1] in the place of a number: runs that differ in them are then stacked."""
    w = torch.tensor([[0.5, -0.2], [0.1, 0.4], [-0.3, 0.2]])
    try:
        one = kind()
        server = {key: torch.full((2,), 0.3) for key in one.server}
        numbers = {key: v for key, v in vars(one).items() if not isinstance(v, bool | str)}
        stacked = replace(one, **{key: torch.full((3, 1), float(v)) for key, v in numbers.items()})
        found = _local_work(stacked, w, {key: v.expand(3, -1) for key, v in server.items()})
        wanted = _local_work(one, w, server)
        return all(torch.allclose(*each, equal_nan=True) for each in zip(found, wanted, strict=True))
    except Exception:  # a user's algorithm may raise anything
        return False


def _local_work(algorithm: Algorithm, w: Tensor, server: State) -> list[Tensor]:
    """What a step and the end of the local work give for these clients."""
    hp = trial(*w.shape)
    memory = {key: torch.full_like(w, 0.1) for key in algorithm.client}
    kept = {**memory, **algorithm.begin(server, memory, hp)}
    scratch = {key: torch.zeros_like(w) for key in algorithm.scratch}
    after = algorithm.step(w, torch.cos, server, {**kept, **scratch}, hp)
    after, carried = after if isinstance(after, tuple) else (after, scratch)
    new, upload = algorithm.finish(after, server, {**kept, **carried}, hp)
    return [after, *carried.values(), *new.values(), *upload.values()]


def check_optimizer(optimizer: LocalOptimizer) -> LocalOptimizer:
    """`optimizer`, once tried on three clients' models of two numbers, as an algorithm is."""
    name, w = f"optimizer: {type(optimizer).__name__}", torch.tensor([[0.5, -0.2], [0.1, 0.4], [-0.3, 0.2]])
    stage = "init"
    try:
        state = dict(optimizer.init(w))
        for key, v in state.items():
            if not isinstance(v, Tensor) or v.ndim != 2 or len(v) != 3:
                raise UserError(f"{name}.init returns {key} with {_got(v)}; (3, ...), a row a client, is wanted here")
        inputs = {"w": w, "g": w.cos(), **{f"state[{key!r}]": v for key, v in state.items()}}
        before = {key: v.clone() for key, v in inputs.items()}
        stage = "update"
        after, new = optimizer.update(w, inputs["g"], state, trial(3, 2), 0.01)
        _require_shape(name, "update returns w", after, w.shape)
        _require_names(name, "update returns the state", new, state)
        for key, v in new.items():
            _require_shape(name, f"update returns {key}", v, state[key].shape)
        for key, v in inputs.items():
            if not torch.equal(v, before[key]):
                raise UserError(f"{name} writes to its input {key}; a step must return new tensors")
        rows = [[v[k : k + 1] for v in inputs.values()] for k in range(3)]
        alone = [optimizer.update(w, g, dict(zip(state, own, strict=True)), trial(1, 2), 0.01) for w, g, *own in rows]
        for what, *each in zip([after, *new.values()], *([v, *own.values()] for v, own in alone), strict=True):
            if not torch.allclose(what, torch.cat(each), equal_nan=True):
                raise UserError(f"{name} {MIXED}")
    except UserError:
        raise
    except Exception as error:  # a user's optimiser may raise anything
        raise UserError(f"{name}.{stage} fails ({describe(error)})") from error
    return optimizer


def check_aggregation(rule: Aggregation) -> Aggregation:
    """`rule`, once tried on three uploads of models of two numbers."""
    name = type(rule).__name__
    upload = {
        key: torch.tensor([[0.5, -0.2], [0.1, 0.4], [0.3, 0.3]]) + shift for key, shift in (("w", 0.0), ("h", 1.0))
    }
    share, server = torch.ones(3, dtype=torch.float64), {key: torch.full((2,), 0.3) for key in upload}
    before = {key: v.clone() for key, v in upload.items()}
    try:
        found = rule.aggregate(upload, share, server)
    except Exception as error:  # a user's rule may raise anything
        raise UserError(f"aggregation: {name}.aggregate fails ({describe(error)})") from error
    if not isinstance(found, Mapping) or set(found) != set(upload):
        got = ", ".join(map(str, found)) or "nothing" if isinstance(found, Mapping) else type(found).__name__
        raise UserError(
            f"aggregation: {name} returns {got} for uploads of {', '.join(upload)}; the same names are wanted"
        )
    for key, v in found.items():
        if not isinstance(v, Tensor) or v.shape not in ((2,), (3, 2)):
            raise UserError(f"aggregation: {name} returns {key} with {_got(v)}; (2,) or (3, 2) is wanted here")
        if not torch.equal(upload[key], before[key]):
            raise UserError(f"aggregation: {name} writes to its input upload[{key!r}]; a rule must return new tensors")
    return rule


def check_attack(attack: Attack) -> Attack:
    """`attack`, once tried on models of two numbers."""
    name = type(attack).__name__
    own, honest, theta = torch.full((3, 2), 0.5), torch.full((4, 2), 0.1), torch.full((2,), 0.3)
    try:
        found = attack.upload(own, honest, theta)
    except Exception as error:  # a user's attack may raise anything
        raise UserError(f"attack: {name}.upload fails ({describe(error)})") from error
    if not isinstance(found, Tensor) or found.shape != own.shape:
        raise UserError(f"attack: {name}.upload returns {_got(found)}; {tuple(own.shape)} is wanted here")
    return attack


def _got(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _require_shape(name: str, what: str, value: object, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        raise UserError(f"{name}.{what} with {_got(value)}; {tuple(shape)} is wanted here")


def _require_names(name: str, what: str, found: State, wanted: Iterable[str]) -> None:
    have, want = set(found), set(wanted)
    if have != want:
        listed = [", ".join(sorted(each)) or "nothing" for each in (have, want)]
        raise UserError(f"{name}.{what} {listed[0]}; wanted is {listed[1]}")


def _require_vectors(name: str, what: str, found: State, wanted: Iterable[str], shape: tuple[int, ...]) -> None:
    _require_names(name, what, found, wanted)
    for key, value in found.items():
        _require_shape(name, f"{what.split(' the ')[0]} {key}", value, shape)


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape[1:]))
