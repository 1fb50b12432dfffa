"""ActivationNorm in loops of two processes: DistributedDataParallel and FSDP2 against one process with all samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fedman.penalties.man import ActivationNorm
from tests.penalties.man_cases import close

ZETA, PROCESSES = 0.3, 2


class Net(nn.Module):
    """An activation as a module and one as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.second(self.relu(self.first(x)))))


def make() -> tuple[Net, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)
    torch.manual_seed(0)
    return Net().double(), x, y


def expected() -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of all samples, by the formula."""
    model, x, y = make()
    relu = model.relu(model.first(x))
    gelu = F.gelu(model.second(relu))
    logits = model.head(gelu)
    loss = F.cross_entropy(logits, y) + ZETA * sum(a.square().mean() for a in (relu, gelu, logits))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def parallel_after(model: Net) -> tuple[nn.Module, ActivationNorm]:
    man = ActivationNorm(model)
    return DistributedDataParallel(model), man


def parallel_before(model: Net) -> tuple[nn.Module, ActivationNorm]:
    wrapped = DistributedDataParallel(model)
    return wrapped, ActivationNorm(wrapped)


def sharded(model: Net) -> tuple[nn.Module, ActivationNorm]:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    fully_shard(model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, ActivationNorm(model)


def work(rank: int, meeting: str, prepare: Callable[[Net], tuple[nn.Module, ActivationNorm]]) -> None:
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=PROCESSES)
    loss, gradient = expected()
    model, x, y = make()
    wrapped, man = prepare(model)
    mine = slice(rank * len(x) // PROCESSES, (rank + 1) * len(x) // PROCESSES)
    for _ in range(2):
        wrapped.zero_grad()
        own = F.cross_entropy(wrapped(x[mine]), y[mine]) + ZETA * man()
        own.backward()
    total = own.detach().clone()
    distributed.all_reduce(total)
    close(total / PROCESSES, loss)
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    close(found, gradient)
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [parallel_after, parallel_before, sharded])
def test_processes_that_share_a_batch(tmp_path: Path, prepare: Callable) -> None:
    """Equal shares of a batch: the mean of the processes' losses and gradients is the batch's."""
    multiprocessing.spawn(work, (str(tmp_path / "meeting"), prepare), nprocs=PROCESSES)
