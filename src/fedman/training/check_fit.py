"""Checks before training that model, data and task fit together: one line that says what does not, and why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedman.data.dataset import Dataset
from fedman.errors import UserError, describe
from fedman.execution.training_pass import TrainingPass
from fedman.models.parameters import ParameterLayout, copy_of, holding, other_names
from fedman.tasks import Task
from fedman.training.batches import Samples
from fedman.training.check_parts import kind_of
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
            f"model: {name} returns {kind_of(output)} for {len(x)} samples; a tensor [{len(x)}, ...] is wanted"
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
                f"task: {kind}'s {what} has {kind_of(value)} for {len(x)} samples; one number a sample is wanted"
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


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape[1:]))
