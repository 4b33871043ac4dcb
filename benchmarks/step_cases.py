"""The training steps that `endtoend.py` times, and their variants."""

from dataclasses import dataclass
from typing import Any

from . import flash
from .models import MODELS

__all__ = ["VARIANTS", "StepVariant", "StepWorkload", "variants_of", "workloads"]


@dataclass(frozen=True)
class StepVariant:
    """A way to run a step.

    Attributes:
        package: the distribution that distinguishes it, whose version belongs to a row.
        packs: whether our package skips padding.
        shares: whether our package computes common prefixes of rows once.
        attention: transformers' name for the attention; None: its default.
        module: a module that must be importable, or "".
        compiled: whether the Trainer's `torch_compile` is on.
        options: further options of `NpuKernelsArguments`.
    """

    package: str
    packs: bool = True
    shares: bool = True
    attention: str | None = None
    module: str = ""
    compiled: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.package == "npu_trainer_kernels"


VARIANTS = {
    "plain": StepVariant("transformers"),
    "flag": StepVariant("npu_trainer_kernels"),
    # Decoder layers are captured as graphs in any case, or never; `flag` decides by what the device waits for.
    "flag-captured": StepVariant("npu_trainer_kernels", options=(("npu_kernels_capture", "on"),)),
    "flag-eager": StepVariant("npu_trainer_kernels", options=(("npu_kernels_capture", "off"),)),
    "flag-padded": StepVariant("npu_trainer_kernels", packs=False),
    "flag-unshared": StepVariant("npu_trainer_kernels", shares=False),
    # For rows so long that a layer's MLP needs too much memory.
    "flag-tiled": StepVariant("npu_trainer_kernels", options=(("npu_kernels_tiled_mlp", 8192),)),
    # Rows stay on the rank that has generated them.
    "flag-unbalanced": StepVariant("npu_trainer_kernels", options=(("npu_kernels_balance", False),)),
    "liger": StepVariant("liger-kernel", module="liger_kernel"),
    # A library around TRL's trainer that skips padding and computes a shared prompt once.
    "unsloth": StepVariant("unsloth", module="unsloth"),
    # transformers' flash attention, which leaves padding out in each layer's attention.
    "plain-flash": StepVariant("transformers", attention=flash.NAME),
    "liger-flash": StepVariant("liger-kernel", attention=flash.NAME, module="liger_kernel"),
    "plain-compiled": StepVariant("transformers", compiled=True),
    "flag-compiled": StepVariant("npu_trainer_kernels", compiled=True),
}


# From this number of tokens on, a step counts as long.
_LONG = 1 << 16


@dataclass(frozen=True)
class StepWorkload:
    """A training step.

    Attributes:
        name: `"sft-trainer"` (transformers), `"sft-trl"`, `"grpo-trl"` or `"dpo-trl"`.
        size: a key of `MODELS`.
        batch: the sequences of a step; in DPO pairs of sequences.
        length: the tokens of a sequence; in GRPO of its completion, in DPO of the longest possible completion.
        prompt: the prompt tokens (GRPO and DPO).
        least: the tokens of the shortest completion; lengths are random from here to `length` (only DPO).
        lengths: a key of `DISTRIBUTIONS`, for sequences (in GRPO completions) of at most `length` tokens; "": all have
            this length.
        group: the completions of one prompt (GRPO). With `lengths` the prompts of a batch also differ in length, up to
            `prompt`, and are padded on the left.
        lora: the rank of an adapter that is trained instead of the model; 0: the model is trained.
        checkpointing: whether layers are checkpointed (SFT with the Trainer; GRPO always does it in bf16).
    """

    name: str
    size: str
    batch: int
    length: int
    prompt: int = 0
    least: int = 0
    lengths: str = ""
    group: int = 8
    lora: int = 0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.checkpointing and self.name not in ("sft", "sft-trainer"):
            raise ValueError(f"checkpointing is a choice of 'sft' and 'sft-trainer' alone; got it with {self.name!r}")

    @property
    def shape(self) -> str:
        adapter = (f" lora {self.lora}" if self.lora else "") + (" checkpointed" if self.checkpointing else "")
        if self.least:
            return f"{self.size} {self.batch}x2x({self.prompt}+{self.least}..{self.length}){adapter}"
        longest = f"..{self.length} {self.lengths}" if self.lengths else str(self.length)
        if not self.prompt:
            return f"{self.size} {self.batch}x{longest}{adapter}"
        prompts = f", {self.group} a prompt" if self.lengths else ""
        return f"{self.size} {self.batch}x({self.prompt}+{longest}){prompts}{adapter}"

    @property
    def has_padding(self) -> bool:
        """Whether the rows of a batch differ in length."""
        return bool(self.lengths or self.least)

    @property
    def is_long(self) -> bool:
        """Whether a step takes seconds. Then few steps are enough, since the memory matters most."""
        return self.batch * (self.prompt + self.length) >= _LONG

    @property
    def key(self) -> str:
        return f"end-to-end/{self.name}/{self.shape}/{MODELS[self.size][2]}"


# The variants for mixtures of experts, where the difference is in the experts' rows.
_OF_EXPERTS = ("plain", "flag", "flag-captured", "flag-eager", "flag-padded", "liger")
_OF_LONG = ("plain", "flag", "flag-tiled", "liger")
# Without padding transformers' default is a kernel of this kind already.
_OF_PADDING = ("plain-flash", "liger-flash")


def variants_of(workload: StepWorkload) -> list[str]:
    """Returns the variants that differ for a workload: sequences of a batch share prefixes only in GRPO and DPO, and
    flash attention leaves out padding where there is some, in 16 bits."""
    if workload.is_long:
        return list(_OF_LONG)
    by_flash = _OF_PADDING if workload.has_padding and MODELS[workload.size][2] in flash.DTYPES else ()
    # The models of CPUs, where a tape takes the place of a graph, are in 32 bits.
    never = set() if MODELS[workload.size][2] in flash.DTYPES else {"flag-captured", "flag-eager"}
    if "num_experts" in MODELS[workload.size][1]:
        return [name for name in (*_OF_EXPERTS, *by_flash) if name not in never]
    without = {"flag-tiled", "flag-unbalanced", *_OF_PADDING} - set(by_flash) | never
    # Unsloth is compared in GRPO with these models; it was not tried elsewhere.
    if workload.name != "grpo-trl" or workload.size not in ("qwen3-0.6b", "qwen3-4b"):
        without.add("unsloth")
    return [
        name for name in VARIANTS
        if name not in without and (name != "flag-unshared" or workload.name in ("grpo-trl", "dpo-trl"))
    ]  # fmt: skip


def workloads(kind: str) -> list[StepWorkload]:
    """Returns the workloads for a kind of device, the most important first."""
    if kind == "cpu":
        return [
            StepWorkload("sft-trainer", "demo-llama", 8, 256),
            StepWorkload("grpo-trl", "demo-qwen3", 128, 4, 8),
            StepWorkload("grpo-trl", "demo-qwen3", 8, 256, 32, lengths="exponential", group=2),
            StepWorkload("grpo-trl", "demo-qwen3", 8, 256, 32, lengths="even", group=2),
            StepWorkload("grpo-trl", "demo-qwen3", 8, 64, 256, lengths="exponential"),
            StepWorkload("grpo-trl", "demo-qwen3", 8, 64, 256, lengths="exponential", lora=8),
            StepWorkload("sft-trainer", "demo-llama", 8, 256, lengths="exponential"),
            StepWorkload("sft-trl", "demo-llama", 8, 256),
            StepWorkload("sft-trainer", "demo-gemma3", 8, 256),
            StepWorkload("sft-trainer", "demo-qwen3-moe", 8, 256),
            StepWorkload("dpo-trl", "demo-llama", 4, length=240, prompt=16, least=14),
        ]
    return [
        StepWorkload("sft-trainer", "llama-1b", 8, 2048),
        StepWorkload("grpo-trl", "qwen3-0.6b", 8, 4096, 128),
        StepWorkload("grpo-trl", "qwen3-0.6b", 8, 4096, 128, lengths="exponential", group=2),
        StepWorkload("grpo-trl", "qwen3-0.6b", 8, 4096, 128, lengths="even", group=2),
        # One prompt for all rows.
        StepWorkload("grpo-trl", "qwen3-0.6b", 8, 1024, 2048, lengths="exponential"),
        StepWorkload("grpo-trl", "qwen3-4b", 8, 1024, 2048, lengths="exponential", lora=16),
        StepWorkload("sft-trainer", "llama-1b", 8, 2048, lengths="exponential"),
        StepWorkload("sft-trainer", "llama-1b", 4, 2048, lengths="exponential"),
        StepWorkload("sft-trainer", "qwen3-moe", 8, 2048),
        StepWorkload("sft-trainer", "qwen3-moe", 8, 2048, lengths="exponential"),
        StepWorkload("grpo-trl", "qwen3-moe", 8, 1024, 128),
        # Long enough that the device, not the host, should limit the step both plain and with the kernels.
        StepWorkload("grpo-trl", "qwen3-moe", 8, 4096, 128),
        StepWorkload("sft-trl", "llama-1b", 8, 2048),
        StepWorkload("sft-trainer", "gemma3-1b", 4, 2048),
        # Sequences of 30 to 900 tokens.
        StepWorkload("dpo-trl", "llama-1b", 8, length=884, prompt=16, least=14),
        # A step that materializes logits needs 63 GiB for them alone in fp32; with half the tokens the rest fits too.
        StepWorkload("sft-trainer", "llama-1b", 1, 131072, checkpointing=True),
        StepWorkload("sft-trainer", "llama-1b", 1, 65536, checkpointing=True),
    ]
