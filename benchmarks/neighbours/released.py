"""Released code that can be run beside fedman, one class each. Comments say what had to be supplied for it to run.

`play` runs one of its algorithms in a `Setting` and returns the server's model after every round.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import os
import tempfile
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from checkout import load
from setting import CLIENTS, COHORTS, SEED, STEPS, Setting, Wrapped, network, start, vector
from torch import Tensor, nn

ALPHA, MU, RHO, RHO_LOCAL, SERVER_LR, MOMENTUM, BETA2, TAU = 0.3, 0.6, 0.2, 0.1, 0.1, 0.8, 0.95, 0.03
"""Hyper-parameters, by the names that they have in fedman."""


class FLSimulator:
    """Its `Server.train`, with all that it calls, as released."""

    folder = "FL-Simulator"
    absent: ClassVar = ("torchvision",)
    reader = "client.client"  # the module that makes the DataLoader

    def __init__(self, root: Path) -> None:
        self.server, self.reads = load(root, "server", self.reader, absent=self.absent)

    def play(self, setting: Setting, method: str, **own: float) -> list[Tensor]:
        # Supplied: the batches. Left out: evaluation after a round, the files and the summary at the end.
        self.reads.data = SimpleNamespace(DataLoader=setting.data_loader())
        self.reads.Dataset = lambda x, y, **_: x
        models: list[Tensor] = []

        class Played(getattr(self.server, method)):
            def _test_(self, t: int, selected: list[int]) -> None:
                assert list(selected) == COHORTS[t]
                models.append(self.server_model_params_list.clone())

            def _save_results_(self) -> None:
                pass

            _summary_ = _save_results_

        training = setting.training
        options = {
            "method": method, "total_client": CLIENTS, "active_ratio": 0.5, "seed": SEED, "comm_rounds": len(COHORTS),
            "local_epochs": 1, "batchsize": 10, "weight_decay": training.weight_decay, "use_RI": False,
            "local_learning_rate": training.lr, "lr_decay": training.lr_decay, "global_learning_rate": 1.0,
            "alpha": ALPHA, "lamb": ALPHA, "rho": RHO, "beta1": MOMENTUM, "beta2": BETA2, "epsilon": TAU,
            "dataset": None, "mode": None,
        }  # fmt: skip
        held = SimpleNamespace(client_x=setting.x, client_y=setting.y)
        with contextlib.redirect_stdout(io.StringIO()):
            args = SimpleNamespace(**options | own)
            Played("cpu", network, network(), start(), held, method, args).train()
        return models


class FedLESAM(FLSimulator):
    """Made from FL-Simulator; here the server makes the DataLoader."""

    folder = "FedLESAM"
    absent = ("torchvision", "tqdm", "server.FedSpeed", "server.FedGAMMA")  # it imports the last two and lacks them
    reader = "server.server"


class FedDyn:
    """Its `train_*` functions, each of which plays a whole run. FedDC's and fedMAN's code were made from it."""

    folder = "FedDyn"
    parts: ClassVar = (".",)
    files: ClassVar = ("utils_methods", "utils_general", "utils_models")
    absent: ClassVar = ("torchvision", "scipy", "matplotlib")
    network = staticmethod(network)

    def __init__(self, root: Path) -> None:
        self.modules = {part: load(root / part, *self.files, absent=self.absent) for part in self.parts}

    def play(self, setting: Setting, method: str) -> list[Tensor]:
        return self.run(setting, self.modules[self.parts[0]], method)

    def run(self, setting: Setting, modules: list[ModuleType], method: str, option: str = "") -> list[Tensor]:
        # Supplied: the batches and the network. Left out: evaluation, and moving to a GPU.
        for module in modules:
            module.data = SimpleNamespace(DataLoader=setting.data_loader())
            module.Dataset = lambda x, y, **_: x
            module.get_acc_loss = lambda *_: (0.0, 0.0)
            module.device = "cpu"
        training = setting.training
        data = SimpleNamespace(
            name="toy", dataset="toy", n_client=CLIENTS, clnt_x=setting.x, clnt_y=setting.y, tst_x=None, tst_y=None
        )
        args = SimpleNamespace(
            mu_mean=2 * training.zeta, add_reg=1, save_period=1, swa=0, opt_method=option, search_param=RHO,
            rule="toy", dataset_name="toy",
        )  # fmt: skip
        given: dict[str, Any] = {
            "data_obj": data, "act_prob": 0.5, "rand_seed": SEED, "com_amount": len(COHORTS), "save_period": 1,
            "learning_rate": training.lr, "lr_decay_per_round": training.lr_decay,
            "weight_decay": training.weight_decay, "batch_size": 10, "epoch": 1, "n_minibatch": STEPS,
            "sch_step": 1, "sch_gamma": 1.0, "model_func": self.network, "init_model": self.network(),
            "alpha_coef": ALPHA, "rho": RHO, "mu": MU, "print_per": 9, "test_per": 9, "trial": False, "args": args,
        }  # fmt: skip
        train = next(found for module in modules if (found := vars(module).get(f"train_{method}")))
        wanted = {name: given[name] for name in inspect.signature(train).parameters if name in given}
        # It writes its models to the working directory, and from there they are read.
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for made in "Output", "Model":
                os.makedirs(f"{made}/toy")
            with contextlib.redirect_stdout(io.StringIO()):
                train(**wanted)
            rounds = range(1, len(COHORTS) + 1)
            return [vector(torch.load(next(Path().rglob(SAVED.get(method, SENT).format(t))))) for t in rounds]


SENT = "{}_com_sel.pt"
SAVED = {"FedDyn": "{}_com_cld.pt", "FedDC": "cld_avg_{}com.pt", "FedSpeed": "{}_com_all.pt"}
"""The file with the server's model, where that is not the mean of the round's clients."""


class FedDC(FedDyn):
    """Its `train_FedDC`."""

    folder = "FedDC"
    files = ("utils_methods_FedDC", "utils_general", "utils_models")
    absent = (*FedDyn.absent, "sklearn", "IPython", "torchsummary", "tensorboardX", "torch.utils.tensorboard")


class Measured(Wrapped):
    """As fedMAN's models: logits, the squares of the hidden layers, and None."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], None]:
        hidden = self.network.linears[0](x).relu()
        return self.network.head(hidden), [hidden.square().mean(1)], None


class FedMAN(FedDyn):
    """The MAN authors' code. SAM and ASAM, options of FedAvg, have a folder of their own."""

    folder = "fedMAN"
    parts = ("code", "man_code_sam")
    files = ("utils_methods", "utils_methods_FedDC", "utils_general", "utils_models")
    network = Measured

    def play(self, setting: Setting, method: str) -> list[Tensor]:
        if method in ("SAM", "ASAM"):
            return self.run(setting, self.modules["man_code_sam"], "FedAvg", method)
        return super().play(setting, method)

    def model(self, part: str, name: str) -> nn.Module:
        """One of its models, as released."""
        return self.modules[part][-1].client_model(name)


class FedACG:
    """Its clients and servers. The round between them is written again: `Trainer.train` starts processes and logs."""

    folder = "FedACG"
    absent: ClassVar = (
        "torchvision", "torchmetrics", "sklearn", "matplotlib", "PIL", "tqdm", "tabulate", "datasets", "models",
    )  # fmt: skip

    def __init__(self, root: Path) -> None:
        self.servers, self.clients = load(root, "servers.base", "clients.base_client", absent=self.absent)

    def play(self, setting: Setting, method: str) -> list[Tensor]:
        # Supplied: the round, the batches. Within a round the rate stays; gradients are not scaled for half precision.
        loader = setting.data_loader()
        self.clients.DataLoader = lambda held, **_: loader(held.x)
        self.clients.GradScaler = partial(torch.amp.GradScaler, enabled=False)
        logging.getLogger("clients.base_client").setLevel(logging.ERROR)
        training, ahead = setting.training, method == "FedACG"
        momentum = Options(momentum=MOMENTUM, beta=BETA2, tau=TAU, FedACG=ahead)
        loss = {"ce_loss": Options(weight=1)} | ({"prox_loss": Options(weight=MU / 2)} if ahead else {})
        args = Options(
            server=momentum, client=Options(loss), dataset=Options(name="toy", num_instances=0), batch_size=10,
            optimizer=Options(momentum=0.0, wd=training.weight_decay), use_amp=False, num_workers=0, pin_memory=False,
            trainer=Options(local_lr_decay=1.0, local_epochs=1, global_lr=SERVER_LR, num_clients=CLIENTS),
        )  # fmt: skip
        model = Named()
        server = (self.servers.ServerAdam if method == "FedAdam" else self.servers.ServerM)(args)
        server.set_momentum(model)
        client, models = self.clients.Client(args, 0, model=Named()), []
        for t, cohort in enumerate(COHORTS):
            if ahead:
                model = server.FedACG_lookahead(model)
            sent, weights, deltas = copy.deepcopy(model.state_dict()), defaultdict(list), defaultdict(list)
            for k in cohort:
                held = SimpleNamespace(x=setting.x[k], class_dict={0: 1})
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    client.setup(sent, "cpu", held, training.rate(t), t + 1, None)
                    trained, _ = client.local_train(t + 1)
                for name, tensor in trained.items():
                    weights[name].append(tensor.clone())
                    deltas[name].append(tensor - sent[name])
            model.load_state_dict(server.aggregate(weights, deltas, cohort, sent, training.rate(t)))
            models.append(vector(model.state_dict()))
        return models


class Options(dict):
    """Keys as attributes, as in the configurations of hydra."""

    __getattr__ = dict.__getitem__


class Named(Wrapped):
    """As FedACG's models: an output by name."""

    num_layers = 1

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logit": self.network(x)}


class FedGloSS:
    """Its server and clients; it has no clip."""

    folder = "fedgloss"

    def __init__(self, root: Path) -> None:
        names = "servers.fedgloss_server", "clients.fedgloss_client"
        self.server, self.client = load(root / "codebase", *names, absent=("torchvision",))

    def play(self, setting: Setting, method: str) -> list[Tensor]:
        # Supplied: the batches, and no augmentation. ρ and ρ_l are constant (T_s = 0).
        training, rounds, model = setting.training, len(COHORTS), Sized()
        with contextlib.redirect_stdout(io.StringIO()):
            server = self.server.FedGloSSServer(model, "sgd", 1.0, RHO, RHO_LOCAL, 0.0, 0, rounds, 1 / ALPHA, CLIENTS)
        clients, models, loader = [], [], setting.data_loader()
        for k in range(CLIENTS):
            held = list(zip(setting.x[k], setting.y[k], strict=True))
            decay, made = training.weight_decay, self.client.FedGloSSClient
            client = made(0, k, training.lr, decay, 10, 0.0, held, held, model, "toy", RHO_LOCAL, 0.0, 1 / ALPHA, "cpu")
            client.train_transforms = {"toy": lambda x: x}
            clients.append(client)
        for t, cohort in enumerate(COHORTS):
            chosen = [clients[k] for k in cohort]
            for k in cohort:
                clients[k].trainloader = loader(setting.x[k])
            server.update_clients_lr(training.rate(t), chosen)
            server.train_model(clients=chosen)
            server.update_model()
            models.append(vector(server.model))
        return models


class Sized(Wrapped):
    """As FedGloSS's models: with a size and a device."""

    size, device = 0, "cpu"

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class FedDecorr:
    """Its loss of the features of a batch, as released."""

    folder = "FedDecorr"

    def __init__(self, root: Path) -> None:
        (module,) = load(root, "loss")
        self.loss: nn.Module = module.FedDecorrLoss()
