"""The head of a vocabulary that ranks share out, and models that transformers' plans have split, on the ranks that
torchrun has started.

Usage: torchrun --nproc_per_node 2 -m tests.distributed.tensor_parallel FILE

First the ops, beside their references on the whole vocabulary: what is wrong raises here. Then the faults that would be
easy to make, each planted in a case that has to see it. Then models, without and with the kernels. Rank 0 writes to
FILE, per model: how far its parameters have moved without the kernels and how far those with the kernels are from them,
what the ops have served and declined, and what the ranks have said to each other in a step; and under "faults" those
that were not seen.
"""

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # the kernels, too; nothing else is served by them on a CPU

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from trl import GRPOConfig
from trl import GRPOTrainer as TrlGRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from npu_trainer_kernels import GRPOTrainer, NpuKernelsCallback, apply_npu_kernels, tiling
from npu_trainer_kernels.closeness import assert_as_close, run
from npu_trainer_kernels.ops import (
    GrpoOptions,
    fused_linear_cross_entropy,
    fused_linear_grpo_loss,
    linear_cross_entropy_reference,
    linear_logprob,
    linear_logprob_reference,
)
from npu_trainer_kernels.ops._head import _Call
from npu_trainer_kernels.ops._head_slices import VocabSlice
from npu_trainer_kernels.ops.grpo_loss import fused_linear_grpo_loss_reference
from npu_trainer_kernels.ops.linear_logprob import OUTPUTS
from tests.distributed.ranks import end_ranks
from tests.distributed.run import apart
from tests.models import batch, in_double, small_model
from tests.trainers.test_grpo import reward, tokenizer

ROWS, HIDDEN, VOCAB = 41, 24, 101
CHUNK = 16
FIRST, LAST = 51, 50  # ids of the first rank, and of the other
Case = tuple[Callable[..., Any], Callable[..., Any]]


class Said(TorchDispatchMode):
    """What this rank says to the others, with how many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            # A gathering one has what it writes to first, and what it is given second.
            given = args[1] if "gather" in function._opname else args[0]
            self.calls.append((function._opname.strip("_"), sum(t.numel() for t in given)))
        elif function.namespace == "_c10d_functional" and "wait" not in function._opname:
            self.calls.append((function._opname.replace("_", "").removesuffix("intotensor"), args[0].numel()))
        return function(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------------------------
# Ops
# ---------------------------------------------------------------------------------------------------------------------


def inputs(ids: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    low, high = {"mixed": (0, VOCAB), "first": (0, FIRST), "last": (FIRST, VOCAB), "ignored": (0, VOCAB)}[ids]
    target = torch.randint(low, high, (ROWS,), generator=drawn)
    target[::7] = -100
    found = {
        "x": torch.randn(ROWS, HIDDEN, generator=drawn),
        "weight": 0.4 * torch.randn(VOCAB, HIDDEN, generator=drawn),
        "bias": 0.1 * torch.randn(VOCAB, generator=drawn),
    }
    # Greatest where nobody looks for it: on the first rank's slice in some rows, on the other's in the rest.
    found["x"][: ROWS // 2] *= 4
    found = {name: t.to(dtype).requires_grad_() for name, t in found.items()}
    found["target"] = torch.full_like(target, -100) if ids == "ignored" else target
    found["class_weights"] = torch.rand(VOCAB, generator=drawn) + 0.5
    return found


def shared(t: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's rows of a head's parameter, as the DTensor that the head has."""
    if t is None:
        return None
    shape = (VOCAB, *t.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t, MESH, [Shard(0)], run_check=False, shape=shape, stride=stride)


def weighted(outputs: Any) -> torch.Tensor:
    """A scalar of all outputs, in which no row counts as another does."""
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(outputs):
        if out is not None and out.is_floating_point() and out.requires_grad:
            of_each = torch.arange(1, out.numel() + 1, dtype=torch.float64).view(out.shape) / out.numel()
            total = total + (out.double() * (of_each + i)).sum()
    return total


def agree(op: Callable[..., Any], reference: Callable[..., Any], ids: str, dtype: torch.dtype, biased: bool = True,
          frozen: bool = False) -> None:  # fmt: skip
    """Raises unless the op on this rank's rows does what the reference does on all: values, the gradient of x, and its
    rows of the weight's and the bias's."""
    given = inputs(ids, dtype)
    if not biased:
        given["bias"] = None  # type: ignore[assignment]
    if frozen:
        given["weight"].requires_grad_(False)
    mine = slice(0, FIRST) if MESH.get_local_rank() == 0 else slice(FIRST, VOCAB)
    slices = {name: given[name] if given[name] is None else given[name].detach()[mine].requires_grad_(
        given[name].requires_grad) for name in ("weight", "bias")}  # fmt: skip

    def sliced(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return op(x, shared(weight), shared(bias), *rest)

    actual = run(sliced, [*{**given, **slices}.values()], weighted)
    same = run(reference, [*given.values()], weighted)
    truth = run(reference, [*given.values()], weighted, torch.float64)
    for i, (a, r, t) in enumerate(zip(actual, same, truth, strict=True)):
        assert (a is None) == (r is None), i
        if a is None or r is None or t is None:
            continue
        cut = mine if r.shape[:1] == (VOCAB,) else slice(None)
        assert_as_close(a, r[cut] if r.dim() else r, t[cut] if t.dim() else t, f"result {i}, {ids} ids")


def cross_entropy(backend: str | None, **options: Any) -> Case:
    def op(x: Any, weight: Any, bias: Any, target: Any, k: Any) -> Any:
        return fused_linear_cross_entropy(
            x, weight, target, bias, backend=backend, class_weights=k if weigh else None, **options
        )

    def reference(x: Any, weight: Any, bias: Any, target: Any, k: Any) -> Any:
        return linear_cross_entropy_reference(x, weight, target, bias, class_weights=k if weigh else None, **options)

    weigh = options.pop("weigh", False)
    return op, reference


def log_probabilities(backend: str | None, outputs: Any = OUTPUTS, **options: Any) -> Case:
    def op(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        return linear_logprob(x, weight, target.clamp(min=0), bias, outputs=outputs, backend=backend, **options)

    def reference(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        return linear_logprob_reference(x, weight, target.clamp(min=0), bias, outputs=outputs, **options)

    return op, reference


def grpo(backend: str | None) -> Case:
    """Planned: the gradient is formed while a chunk's logits are alive; with an entropy bonus."""
    options = GrpoOptions(loss_type="dapo", beta=0.1, entropy_coef=0.05)
    drawn = torch.Generator().manual_seed(4)
    advantages, old = torch.randn(ROWS, generator=drawn), -4 - torch.rand(ROWS, 1, generator=drawn)
    given = {"options": options, "old_log_prob": old, "ref_log_prob": old - 0.1}

    def op(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        ids, keep = target.clamp(min=0).unsqueeze(1), (target >= 0).unsqueeze(1)
        out = fused_linear_grpo_loss(
            x.unsqueeze(1), weight, ids, advantages, bias, completion_mask=keep, backend=backend, **given
        )
        return out.loss, out.log_prob, out.entropy

    def reference(x: Any, weight: Any, bias: Any, target: Any, _: Any) -> Any:
        ids, keep = target.clamp(min=0).unsqueeze(1), (target >= 0).unsqueeze(1)
        out = fused_linear_grpo_loss_reference(
            x.unsqueeze(1), weight, ids, advantages, bias, completion_mask=keep, **given
        )
        return out.loss, out.log_prob, out.entropy

    return op, reference


SMOOTH = {"label_smoothing": 0.1, "weigh": True, "softcap": 6.0, "logit_scale": 0.7, "z_loss": 1e-2, "reduction": "sum"}


def ops() -> None:
    """Every op, in each dtype, with ids where they are hardest."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for ids in ("mixed", "first", "last"):
            agree(*cross_entropy(None), ids, dtype)
        agree(*cross_entropy(None, **SMOOTH), "mixed", dtype)
        agree(*cross_entropy(None, reduction="none"), "last", dtype, biased=False)
        agree(*log_probabilities(None, temperature=0.7), "mixed", dtype)
        agree(*grpo(None), "mixed", dtype)
    agree(*cross_entropy(None), "ignored", torch.float32)
    agree(*cross_entropy(None, label_smoothing=0.1), "first", torch.float32)
    agree(*log_probabilities(None, ("entropy",)), "first", torch.float32)
    agree(*log_probabilities(None, ()), "mixed", torch.float32, biased=False, frozen=True)
    for case in (cross_entropy("triton", **SMOOTH), log_probabilities("triton"), grpo("triton")):
        agree(*case, "mixed", torch.float32)


def predictions() -> None:
    """What is no gradient: the greatest logit, wherever it is."""
    given = inputs("mixed", torch.float32)
    mine = slice(0, FIRST) if MESH.get_local_rank() == 0 else slice(FIRST, VOCAB)
    with torch.no_grad():
        out: Any = fused_linear_cross_entropy(
            given["x"], shared(given["weight"][mine]), given["target"], shared(given["bias"][mine]),
            outputs=("token_accuracy", "predicted_ids"),
        )  # fmt: skip
        expected = torch.nn.functional.linear(given["x"], given["weight"], given["bias"]).argmax(-1)
    valid = given["target"] != -100
    assert torch.equal(out.predicted_ids, expected.masked_fill(~valid, -100))
    assert out.predicted_ids.max() >= FIRST > out.predicted_ids[valid].min()
    right = (expected == given["target"])[valid].float().mean()
    torch.testing.assert_close(out.token_accuracy, right)


def told(dtype: torch.dtype) -> tuple[list[tuple[str, int]], int]:
    """What the ranks say to each other for one loss and its gradients, and the products of this rank."""
    given = inputs("mixed", dtype)
    mine = slice(0, FIRST) if MESH.get_local_rank() == 0 else slice(FIRST, VOCAB)
    weight = shared(given["weight"].detach()[mine].requires_grad_())
    with FlopCounterMode(display=False) as flops, Said() as said:
        loss = fused_linear_cross_entropy(given["x"], weight, given["target"])
        loss.backward()  # type: ignore[union-attr]
    return said.calls, flops.get_total_flops()


# ---------------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------------

own, merged, total = VocabSlice.own, VocabSlice.merged, VocabSlice.total


def counts_every_id(self: Any, ids: Any) -> Any:
    return own(self, ids)[0], torch.ones_like(ids, dtype=torch.bool)


def greatest_not_merged(self: Any, row_max: Any, *rest: Any) -> Any:
    return (row_max, *merged(self, torch.zeros_like(row_max), *rest)[1:])


def sums_not_brought_together(self: Any, row_max: Any, *rest: Any) -> Any:
    return (merged(self, row_max, *rest)[0], *merged(self, torch.zeros_like(row_max), *rest)[1:])


def keeps(position: int) -> Callable[..., Any]:
    """One of the numbers stays this rank's."""

    def fault(self: Any, *given: Any) -> Any:
        found = list(merged(self, *given))
        found[position] = found[position] if given[position] is None else given[position]
        return tuple(found)

    return fault


def of_the_first_columns(self: Any, values: Any) -> Any:
    return values[: self.width]


def uniform_over_a_slice(self: Any, weight: Any, class_weights: Any) -> Any:
    return None if class_weights is not None else 1.0 / weight.shape[0]


EVERYTHING = functools.partial(agree, *log_probabilities(None), "mixed", torch.float32)
LOSS = functools.partial(agree, *cross_entropy(None), "mixed", torch.float32)
FAULTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "an id of another rank counts": (VocabSlice, "own", counts_every_id, LOSS),
    "the greatest is not merged": (VocabSlice, "merged", greatest_not_merged, LOSS),
    "sums have their own maximum": (VocabSlice, "merged", sums_not_brought_together, LOSS),
    "the sum is not merged": (VocabSlice, "merged", keeps(1), LOSS),
    "entropy is not merged": (VocabSlice, "merged", keeps(2), EVERYTHING),
    "the mean is not merged": (VocabSlice, "merged", keeps(3), EVERYTHING),
    "squares are not merged": (VocabSlice, "merged", keeps(4), EVERYTHING),
    "the argmax is a column": (VocabSlice, "merged", keeps(5), predictions),
    "the logit of the id is not merged": (VocabSlice, "merged", keeps(6), LOSS),
    "dx is not added up": (VocabSlice, "total", lambda self, d: d, LOSS),
    "dx is added up twice": (VocabSlice, "total", lambda self, d: total(self, total(self, d)), LOSS),
    "class weights of other ids": (VocabSlice, "of_columns", of_the_first_columns, functools.partial(
        agree, *cross_entropy(None, weigh=True, label_smoothing=0.1), "mixed", torch.float32)),
    "smoothing over a slice": (_Call, "uniform", uniform_over_a_slice, functools.partial(
        agree, *cross_entropy(None, label_smoothing=0.1), "mixed", torch.float32)),
}  # fmt: skip


def unseen() -> list[str]:
    """Faults that no rank has seen."""
    found = []
    for name, (owner, attribute, fault, case) in FAULTS.items():
        seen = False
        with mock.patch.object(owner, attribute, fault):
            try:
                case()
            except AssertionError:
                seen = True
        if not any(everywhere(seen)):
            found.append(name)
    return found


def everywhere(value: Any) -> list[Any]:
    """A value of each rank."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def forwards(model: Any) -> list[Any]:
    """What is called when modules are, down to what plans call inside."""
    found: list[Any] = []
    for module in model.modules():
        forward = vars(module).get("forward")
        cells = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
        found.append((type(module), forward, [c for c in cells if callable(c)]))
    return found


def loaded(folder: Path, dtype: torch.dtype = torch.float32, experts: int = 1) -> Any:
    config = DistributedConfig(tp_size=distributed.get_world_size(), ep_size=experts)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=dtype).train()


def saved(folder: Path, name: str, **overrides: Any) -> tuple[Path, Any]:
    """A small model in a folder that all ranks read from."""
    model = small_model(name, **overrides)
    if distributed.get_rank() == 0:
        model.save_pretrained(folder / name)
    distributed.barrier()
    return folder / name, model


def padded() -> dict[str, torch.Tensor]:
    given = batch(rows=4)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][1, 9:] = 0
    given["labels"][1, 9:] = -100
    return given


@contextlib.contextmanager
def patched(model: Any, kernels: bool) -> Iterator[Any]:
    """All ops, also those that models on a CPU do without; the forwards are what they were afterwards."""
    if not kernels:
        yield None
        return
    before = forwards(model)
    with apply_npu_kernels(model, ops=OPS) as handle:
        handle.refresh()
        yield handle
    assert forwards(model) == before


OPS = ("rms_norm", "add_rms_norm", "swiglu", "rope", "moe_experts", "varlen_attention", "linear_cross_entropy",
       "linear_logprob")  # fmt: skip


def by_hand(folder: Path, name: str, task: str, experts: int, kernels: bool) -> tuple[Any, Any, list[Any]]:
    """The parameters after three steps, the report, and what ranks have said in the last of them."""
    model, given = loaded(folder, experts=experts), padded()
    if task == "trl":
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with patched(model, kernels) as handle:
        for _ in range(3):
            with Said() as said:
                if task == "trl":
                    out = model(**given, fused_lm_head=True)
                    loss = out.loss + 0.01 * out.entropy.sum()
                else:
                    out = model(**given, use_cache=False)
                    # Of logits that somebody reads: they are formed after all.
                    loss = out.loss if task == "labels" else out.loss + 1e-3 * out.logits.square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            model(**given)
        report = None if handle is None else handle.report()
    return parameters(model), report, said.calls


def models(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases = [
        ("llama", "labels", 1), ("llama-tied", "trl", 1), ("qwen3", "labels", 1), ("qwen3-moe", "labels", 1),
        ("qwen3-moe", "labels", 2), ("gemma2", "logits", 1),
    ]  # fmt: skip
    for name, task, experts in cases:
        options = {"output_router_logits": False, "experts_implementation": "grouped_mm"} if "moe" in name else {}
        path, start = saved(folder, name, **options)
        plain, _, _ = by_hand(path, name, task, experts, False)
        ours, report, said = by_hand(path, name, task, experts, True)
        declined = [f"{d.op}: {d.reason}" for d in report.declined]
        largest = max(numbers for _, numbers in said)
        mine = (apart(plain, dict(start.named_parameters())), apart(plain, ours), dict(report.ran), declined, largest)
        moved, distance, ran, reasons, sizes = zip(*everywhere(mine), strict=True)
        assert ran[0] == ran[1] and reasons[0] == reasons[1]
        found[f"{name} {task} {experts}"] = {
            "moved": min(moved), "apart": max(distance), "ran": ran[0], "declined": reasons[0],
            "largest": max(sizes), "gathers": Counter(kind for kind, _ in said)["allgather"],
        }  # fmt: skip
    return found


def in_bf16(folder: Path) -> None:
    """Loss and gradients of a step, beside the model's own, and the truth of a whole model."""
    path, start = saved(folder, "llama-tied")
    given = padded()

    def outcome(model: Any) -> list[torch.Tensor]:
        loss = model(**given, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(whole(p.grad) for p in model.parameters())]

    with in_double():
        exact = small_model("llama-tied").double()
        exact.load_state_dict({n: t.to(torch.bfloat16).double() for n, t in start.state_dict().items()})
        truth = outcome(exact)
    plain = outcome(loaded(path, torch.bfloat16))
    model = loaded(path, torch.bfloat16)
    with apply_npu_kernels(model, ops=["linear_cross_entropy"]) as handle:
        ours = outcome(model)
        assert handle.report().ran == {"linear_cross_entropy": 1}
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, a, r, t in zip(names, ours, plain, truth, strict=True):
        assert_as_close(a, r, t, name)


def trainers(folder: Path) -> dict[str, Any]:
    """Trainer and TRL's GRPOTrainer, which has to draw the same completions on all ranks of a model."""
    found = {}
    for task in ("sft", "grpo"):
        path, start = saved(folder, "qwen3")
        plain, _ = trained(path, task, False)
        ours, ran = trained(path, task, True)
        found[task] = {
            "moved": apart(plain, dict(start.named_parameters())), "apart": max(everywhere(apart(plain, ours))),
            "ran": ran,
        }  # fmt: skip
    return found


def trained(path: Path, task: str, kernels: bool) -> tuple[Any, Any]:
    common: dict[str, Any] = {
        "output_dir": str(path), "max_steps": 3, "per_device_train_batch_size": 4, "optim": "sgd",
        "learning_rate": 1e-1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "bf16": False, "max_grad_norm": 0.0, "seed": 3,
    }  # fmt: skip
    if task == "grpo":
        common |= {"num_generations": 4, "max_completion_length": 6, "gradient_checkpointing": False}
    args = TrainingArguments(**common) if task == "sft" else GRPOConfig(**common)
    _ = args.device  # which sets the state up
    # accelerate knows of tensor parallelism on accelerators alone; everything else stays on the CPU.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    model = loaded(path)
    trainer: Any
    if task == "sft":
        data = batch(rows=24)
        rows = [{name: values[i].tolist() for name, values in data.items()} for i in range(24)]
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[NpuKernelsCallback()] if kernels else [])
    else:
        prompts = Dataset.from_dict({"prompt": ["1+2=", "3+44=", "5+6=", "71+8="] * 4})
        trainer = (GRPOTrainer if kernels else TrlGRPOTrainer)(
            model, reward_funcs=reward, args=args, train_dataset=prompts, processing_class=tokenizer()
        )
    set_seed(3)  # TRL has given each rank another one
    trainer.train()
    found = parameters(model)
    handle = next((c.handle for c in trainer.callback_handler.callbacks if isinstance(c, NpuKernelsCallback)), None)
    return found, None if handle is None else dict(handle.report().ran)


def main(target: str) -> None:
    global MESH
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    PartialState(cpu=True)
    MESH = init_device_mesh("cpu", (distributed.get_world_size(),))
    folder = Path(target).parent
    with mock.patch.object(tiling, "head_chunk", lambda n, *args, **kwargs: min(max(n, 1), CHUNK)):
        ops()
        predictions()
        found: dict[str, Any] = {"told": [told(d) for d in (torch.float32, torch.bfloat16)], "faults": unseen()}
    in_bf16(folder)
    found |= {"models": models(folder), "trainers": trainers(folder)}
    if distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
