"""Models as others publish them: is a client's gradient PyTorch's own, and does a run go through?

    pip install torchvision transformers
    python benchmarks/published_models.py [NAME ...] [--device cpu|cuda] [--largest 30]

All of torchvision's classifiers of at most `--largest` million parameters, with random weights, on small images; small
ones of the kinds that transformers has, of which the output's `logits` are taken. For each one:

- float64 (float32 where a model does not take that), random layers switched off: the gradients of two clients, without
  MAN and with ζ = 0.1, one by one and under vmap, against `loss.backward()` on the module itself: the largest relative
  difference, or why there is none. Beside it what PyTorch's own gradient changes by if the weights are multiplied by
  1 + 5ε: where that is large, as of batch-norms over three values, the difference is as well;
- as it is, with everything that a run does of itself: FedAvg with ζ = 0.1, one round of two clients, in fp32. The
  execution, seconds, and warnings if there are any.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):  # torchvision asks for them when it is imported, also where its library has not loaded
    if not hasattr(torch.ops.torchvision, operator):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import torchvision  # noqa: E402

import fedman  # noqa: E402
from fedman.errors import one_line  # noqa: E402
from fedman.execution.base import Batch  # noqa: E402
from fedman.execution.one_by_one import OneByOne  # noqa: E402
from fedman.execution.vmapped import Vmapped  # noqa: E402
from fedman.models.parameters import ParameterLayout, copy_of, flatten, flatten_buffers  # noqa: E402
from fedman.penalties import MAN  # noqa: E402
from fedman.tasks import Classification, LanguageModel, Task  # noqa: E402

CLASSES, IDS, LENGTH, SAMPLES = 3, 20, 7, 3
SIDES = {"inception": 75, "swin": 64, "alexnet": 64, "densenet": 64, "squeezenet": 64, "convnext": 64, "vit_h_14": 28}
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**WIDTHS, "vocab_size": IDS, "max_position_embeddings": 32, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 1}
GPT2 = {"vocab_size": IDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
BART = {
    **{"vocab_size": IDS, "d_model": 16, "max_position_embeddings": 32},
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 2))},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}
OPT = {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16}
T5 = {"vocab_size": IDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
DISTILBERT = {"vocab_size": IDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
IMAGE = {**WIDTHS, "image_size": 16, "patch_size": 4}
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 2}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {  # the class of the model, without its end, and its sizes
    "gpt2": ("GPT2LMHead", GPT2),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "gpt-neox": ("GPTNeoXForCausalLM", TEXT),
    "mamba": ("MambaForCausalLM", {**TEXT, "state_size": 4}),
    "bloom": ("BloomForCausalLM", {"vocab_size": IDS, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "opt": ("OPTForCausalLM", OPT),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "bert": ("BertForSequenceClassification", TEXT),
    "distilbert": ("DistilBertForSequenceClassification", DISTILBERT),
    "roberta": ("RobertaForSequenceClassification", TEXT),
    "albert": ("AlbertForSequenceClassification", {**TEXT, "embedding_size": 8}),
    "deberta": ("DebertaV2ForSequenceClassification", TEXT),
    "electra": ("ElectraForSequenceClassification", {**TEXT, "embedding_size": 8}),
    "fnet": ("FNetForSequenceClassification", TEXT),
    "vit": ("ViTForImageClassification", IMAGE),
    "dinov2": ("Dinov2ForImageClassification", IMAGE),
    "swin": ("SwinForImageClassification", SWIN),
    "convnext": ("ConvNextForImageClassification", CONVNEXT),
}


class Logits(nn.Module):
    """A model of transformers as a function of one tensor that returns one."""

    def __init__(self, model: nn.Module, arguments: tuple[str, ...], **fixed: bool) -> None:
        super().__init__()
        self.model, self.arguments, self.fixed = model, arguments, fixed

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**dict.fromkeys(self.arguments, x), **self.fixed).logits


Case = tuple[nn.Module, Task, Tensor, Tensor]
"""A model, its task, inputs and targets of two clients."""


def of_torchvision(name: str) -> Case:
    side = next((n for start, n in SIDES.items() if name.startswith(start)), 32)
    own: dict[str, Any] = {"image_size": side} if name.startswith("vit") else {}
    own |= {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **own)
    x = torch.randn(2, SAMPLES, 3, side, side)
    return model, Classification(), x, torch.randint(CLASSES, (2, SAMPLES))


def of_transformers(name: str) -> Case:
    kind, sizes = TRANSFORMERS[name]
    model_class = getattr(hf, kind, None) or getattr(hf, f"{kind}Model")
    model = model_class(model_class.config_class(**sizes, num_labels=CLASSES))
    if kind.endswith("ImageClassification"):
        y = torch.randint(CLASSES, (2, SAMPLES))
        return Logits(model, ("pixel_values",)), Classification(), torch.randn(2, SAMPLES, 3, 16, 16), y
    x = torch.randint(3, IDS, (2, SAMPLES, LENGTH))
    if kind.endswith("SequenceClassification"):
        return Logits(model, ("input_ids",)), Classification(), x, torch.randint(CLASSES, (2, SAMPLES))
    arguments = ("input_ids", "decoder_input_ids") if kind.endswith("Generation") else ("input_ids",)
    return Logits(model, arguments, use_cache=False), LanguageModel(), x, x.roll(-1, -1)


def without_random_layers(model: nn.Module) -> nn.Module:
    """A copy in which all rates of dropout and of random depth are zero."""
    model = copy_of(model)
    for module in model.modules():
        rates = [key for key, v in vars(module).items() if isinstance(v, float) and (key == "p" or "drop" in key)]
        vars(module).update(dict.fromkeys(rates, 0.0))
    return model


def own_gradient(model: nn.Module, task: Task, w: Tensor, x: Tensor, y: Tensor, zeta: float) -> Tensor:
    """What `loss.backward()` gives."""
    model = copy_of(model).to(w.device, w.dtype).train()
    for name, v in ParameterLayout.of(model).unflatten(w).items():
        model.get_parameter(name).data.copy_(v)
    man = fedman.ActivationNorm(model) if zeta else lambda: 0.0
    (task.loss(model(x.clone()), y).mean() + zeta * man()).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])


def difference(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def gradients(case: Case, device: str) -> list[str]:
    """The differences, one by one and under vmap, of the larger of both ζ; and that of rounding."""
    try:
        return list(_gradients(case, device, "fp64", torch.float64))
    except RuntimeError:
        return [f"{cell} (float32)" for cell in _gradients(case, device, "fp32", torch.float32)]


def _gradients(case: Case, device: str, precision: str, dtype: torch.dtype) -> Iterator[str]:
    model, task, x, y = case
    model = without_random_layers(model)
    x, y = (x.to(dtype) if x.is_floating_point() else x).to(device), y.to(device)
    W = flatten(model).to(device, dtype) * torch.tensor([[1.0], [1.01]], device=device)
    buffers = flatten_buffers(model).to(device, dtype).expand(2, -1)
    batch = Batch(x, y, key=torch.arange(2, device=device), buffers=buffers)

    def own(W: Tensor, zeta: float) -> Tensor:
        return torch.stack([own_gradient(model, task, w, *sample, zeta) for w, *sample in zip(W, x, y, strict=True)])

    expected = {zeta: own(W, zeta) for zeta in (0.0, 0.1)}
    for kind in (OneByOne, Vmapped):
        try:
            execution = kind(model, task, MAN(), precision)
            found = {zeta: execution.gradient(W, batch, zeta)[0] for zeta in expected}
            yield f"{max(difference(found[zeta], expected[zeta]) for zeta in expected):.0e}"
        except Exception as error:
            yield one_line(error, 60)
    yield f"{difference(own(W * (1 + 5 * torch.finfo(dtype).eps), 0.0), expected[0.0]):.0e}"


def run(case: Case, device: str) -> Iterator[str]:
    """The execution, the seconds and the warnings of a run."""
    model, task, x, y = case
    x, y = (np.concatenate([v.flatten(0, 1).numpy()] * 3) for v in (x, y))
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = fedman.run(
            dataset=(x, y, x[:4], y[:4]), model=model, task=task, partition=[range(6), range(6, 18)], participation=1.0,
            rounds=1, epochs=1, batch_size=4, zeta=0.1, lr=0.001, precision="fp32", device=device,
        )  # fmt: skip
    yield result.summary["execution"]
    yield f"{time.perf_counter() - start:.1f}"
    yield "; ".join(dict.fromkeys(one_line(w.message, 90) for w in told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--largest", type=float, default=30, help="million parameters")
    given = parser.parse_args()
    transformers_own = {f"transformers: {name}": name for name in TRANSFORMERS}
    makers: dict[str, Callable[[], Case]] = {
        **{name: (lambda n=name: of_torchvision(n)) for name in torchvision.models.list_models(torchvision.models)},
        **{title: (lambda n=name: of_transformers(n)) for title, name in transformers_own.items()},
    }
    print("| model | million parameters | one by one | vmap | rounding | execution | seconds | warnings |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, make in makers.items():
        if given.names and name not in given.names and transformers_own.get(name) not in given.names:
            continue
        with torch.device("meta"):
            try:
                size = sum(p.numel() for p in make()[0].parameters()) / 1e6
            except Exception:  # some look at values while they are made
                size = 0.0
        if size > given.largest:
            continue
        torch.manual_seed(0)
        case = make()
        size = sum(p.numel() for p in case[0].parameters()) / 1e6
        if size > given.largest:
            continue
        cells: list[str] = []
        for part in (gradients, run):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    cells += part(case, given.device)
            except Exception as error:
                cells.append(one_line(error, 120))
        print(f"| {name} | {size:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
