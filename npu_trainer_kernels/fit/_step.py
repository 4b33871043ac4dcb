"""One training step of a model on tensors without memory, as Trainer and TRL's trainers take it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ._card import LIBRARIES, NoValues, scratch, standing_in
from ._ledger import Ledger

__all__ = ["TRAINERS", "Prediction", "Setup", "predict"]

GIB = 1 << 30

TRAINERS = ("trainer", "sft", "grpo", "dpo")
"""transformers' Trainer, and TRL's for SFT, GRPO and DPO."""

# What TRL's trainers ask of its head.
_OUTPUTS = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "grpo": ("log_probs", "entropy"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
}


@dataclass(frozen=True)
class Setup:
    """What is trained, and how.

    Attributes:
        trainer: one of `TRAINERS`.
        batch: sequences of a micro-batch (`per_device_train_batch_size`); pairs of them in DPO.
        length: tokens of a sequence; of its completion in GRPO and DPO.
        prompt: prompt tokens (GRPO and DPO).
        dtype: of the weights.
        autocast: the Trainer's `bf16`.
        kernels: with the kernels of this package.
        checkpointing: the Trainer's `gradient_checkpointing`.
        lora: the rank of an adapter that is trained instead of the model; 0: the model.
        memory: bytes of a device; the kernels size their chunks by it.
    """

    trainer: str = "sft"
    batch: int = 1
    length: int = 1024
    prompt: int = 0
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    kernels: bool = False
    checkpointing: bool = False
    lora: int = 0
    memory: int = 80 * GIB

    @property
    def rows(self) -> int:
        return self.batch * (2 if self.trainer == "dpo" else 1)


@dataclass(frozen=True)
class Prediction:
    """Peak memory of one device.

    Attributes:
        parts: bytes at the moment of the peak, by `PARTS`.
    """

    parts: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def _built(config: Any, setup: Setup) -> nn.Module:
    """The model, on no device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=setup.dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    if setup.trainer != "trainer":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=_OUTPUTS[setup.trainer])
    if setup.lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(
            r=setup.lora, lora_alpha=2 * setup.lora, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        with torch.device("meta"):
            model = get_peft_model(model, adapter)
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if setup.lora:
            model.enable_input_require_grads()
    return model.train()


def _materialise(model: nn.Module, ledger: Ledger) -> None:
    """Gives the model's tensors storages, without numbers."""
    made: dict[int, torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made[id(tensor)]

    with ledger.within("weights"):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    value = like(parameter)
                    if not isinstance(value, nn.Parameter):
                        value = made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    module._parameters[name] = value  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = like(buffer)


def _mark_attention(model: nn.Module, ledger: Ledger) -> None:
    """What attention modules make is attention's."""

    def enter(module: nn.Module, args: Any) -> None:
        module._fit_region = ledger.within("attention")  # type: ignore[assignment]
        module._fit_region.__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        module._fit_region.__exit__(None, None, None)

    for module in model.modules():
        if type(module).__name__.endswith("Attention") or "Attention" in type(module).__name__.split("NpuKernels")[0]:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)


def _loss(model: Any, reference: Any, ids: torch.Tensor, setup: Setup) -> torch.Tensor:
    if setup.trainer == "trainer":
        return model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel()).loss
    labels = ids
    if setup.prompt:
        labels = ids.clone()
        labels[:, : setup.prompt] = -100
    log_probs = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    if setup.trainer == "sft":
        return -log_probs.sum() / ids.numel()
    if setup.trainer == "dpo":
        with torch.no_grad():
            if reference is None:
                with model.disable_adapter():
                    before = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
            else:
                before = reference(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        chosen, rejected = (log_probs - before).sum(1).chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()
    ratio = (log_probs - log_probs.detach()).exp()
    return -torch.min(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5).sum() / ids.numel()


class _GrpoPlan:
    """The plan that GRPO's trainer hands over for TRL's default loss, on-policy."""

    def mismatch(self, share: float) -> None:
        """Never asked: without numbers a plan holds."""

    def for_rows(self, rows: int, weight: torch.Tensor, itemsize: int) -> Any:
        """See `HeadPlan`."""
        from ..ops._grpo_formula import GrpoOptions, GrpoTokens
        from ..ops.grpo_loss import planned

        if not weight.requires_grad:
            return None
        values = torch.zeros(rows, dtype=torch.float32)
        sequence = torch.arange(rows)
        tokens = GrpoTokens(values, values, values, None, None, None, None, None, sequence, values)
        return planned(
            lambda: tokens, GrpoOptions(), True, lambda: [1] * rows, *weight.shape[:1], itemsize, weight.device
        )


@contextlib.contextmanager
def _kernels(model: nn.Module, setup: Setup) -> Iterator[None]:
    """The kernels in a model, and their head knowing what it knows after the first steps."""
    if not setup.kernels:
        yield
        return
    from ..patching import apply_npu_kernels
    from ..patching._call import use_plan
    from ..patching._learned import LearnedPlan

    plan = _GrpoPlan() if setup.trainer == "grpo" else None
    with apply_npu_kernels(model) as handle, use_plan(plan):
        # What two backward passes have shown: SFT's gradient is that of every token, DPO's is each row's own.
        handle.settings.learned = LearnedPlan.settled(setup.trainer == "sft")
        yield


def predict(config: Any, setup: Setup, libraries: int = LIBRARIES) -> Prediction:
    """Peak memory of a step in which the optimiser has its state already.

    Args:
        config: of a causal language model of transformers.
        setup: what is trained, and how.
        libraries: bytes that they hold.
    """
    model = _built(config, setup)
    reference = _built(config, setup) if setup.trainer == "dpo" and not setup.lora else None
    kept = setup.rows * (setup.length if setup.prompt else setup.length - 1)
    ledger = Ledger(config.get_text_config().vocab_size, scratch)
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with standing_in(setup.memory), contextlib.ExitStack() as applied:
        for each in filter(None, (model, reference)):
            applied.enter_context(_kernels(each, setup))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with one_thread, fake, NoValues(kept), ledger:
            ledger.hold("other", libraries)
            return _stepped(model, reference, setup, ledger)


def _stepped(model: Any, reference: Any, setup: Setup, ledger: Ledger) -> Prediction:
    for each in filter(None, (model, reference)):
        _materialise(each, ledger)
        _mark_attention(each, ledger)
    if reference is not None:
        reference.eval().requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]

    def arrived(parameter: torch.Tensor) -> None:
        ledger.belongs(parameter.grad, "gradients")

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(arrived)
    optimizer = torch.optim.AdamW(trained, fused=True)
    with ledger.within("gradients"):
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    with ledger.within("optimiser"):
        optimizer.step()
    optimizer.zero_grad()
    ledger.forget_peak()
    ids = torch.empty(setup.rows, setup.prompt + setup.length, dtype=torch.int64, device="cpu")
    autocast = torch.autocast("cpu", torch.bfloat16) if setup.autocast else contextlib.nullcontext()
    with autocast:
        loss = _loss(model, reference, ids, setup)
    loss.backward()
    del loss
    nn.utils.clip_grad_norm_(trained, 1.0)
    with ledger.within("optimiser"):
        optimizer.step()
    optimizer.zero_grad()
    return Prediction(dict(ledger.peak))
