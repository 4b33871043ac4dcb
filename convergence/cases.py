"""The table of cases. A new model family or loss of the package gets a row here."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "NOISE_RUNS", "SHOWCASE", "Case", "Text", "WarmUp", "find"]

# The noise floor is the range of several runs, and with five runs it is sometimes too narrow. For llama-lm with 30
# seeds and 12 sets of noisy runs each, an unpatched run exceeded 3 floors of five runs in 1 of 360 (4.0), the patched
# one in 3 (4.3); no run exceeded 3 floors of ten runs (2.5, 1.8). There are many cases, so the suite uses ten. `verify`
# uses five, for large models.
NOISE_RUNS = 10

TASKS = ("lm", "sft", "dpo", "grpo")


@dataclass(frozen=True)
class Text:
    """Real text for a large model: the sources and documentation of Python's standard library.

    Attributes:
        vocabulary: the vocabulary of a tokenizer that is trained on the text.
        length: the tokens of a sequence.
        characters: the maximum number of characters.
    """

    vocabulary: int
    length: int
    characters: int


@dataclass(frozen=True)
class WarmUp:
    """Supervised steps on sums before reinforcement learning. `clip`: the maximum gradient norm; 0: no clipping."""

    steps: int = 120
    learning_rate: float = 2e-3
    clip: float = 0.0


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: the case's name on the command line, in the table and in file names.
        family: a key of `tests.models.FAMILIES`.
        task: "lm" (`transformers.Trainer`), or one of TRL's trainers.
        precision: one of `verify.PRECISIONS`.
        backend: the backend for `apply_npu_kernels`; "device": the default choice, on a CPU torch for every op.
        steps: the number of optimizer steps.
        quick: whether the case belongs to the subset that is run for every change.
        model: overrides of the family's small configuration.
        options: overrides of `runs.TASK_OPTIONS`, the arguments of the task's config class.
        held_out: the number of rows of the held-out batch; None: all.
        lora: whether an adapter is trained instead of the model.
        text: the training text instead of the small text (task "lm").
        warm_up: the warm-up of a model that is trained on sums.
        ragged: whether lengths vary strongly: texts after a common prefix, or random completions.
        tiled_mlp: the maximum number of tokens that a gated MLP computes at once; 0: all.
        capture: whether decoder layers are captured and replayed (on a CPU from tapes).
        seeds: if not 0, rollouts are not replayed: this many runs with and without the kernels sample freely, and their
            mean rewards are compared.
    """

    name: str
    family: str
    task: str
    precision: str = "fp32"
    backend: str = "device"
    steps: int = 50
    quick: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    held_out: int | None = None
    lora: bool = False
    text: Text | None = None
    warm_up: WarmUp = WarmUp()
    ragged: bool = False
    tiled_mlp: int = 0
    capture: str = "off"
    seeds: int = 0

    @property
    def is_large(self) -> bool:
        """Whether the case has a large model, which has its own text or warm-up."""
        return self.text is not None or self.warm_up != WarmUp()

    def __hash__(self) -> int:
        return hash(self.name)


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# Triton's interpreter runs the grid as a Python loop, so these cases have few steps on few rows.
FEW = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}

CASES: tuple[Case, ...] = (
    Case("llama-lm", "llama", "lm", quick=True, model=UNTIED),
    Case("llama-lm-tied", "llama", "lm", model=TIED),
    Case("llama-lm-bf16", "llama", "lm", "bf16", model=UNTIED),
    Case("llama-lm-autocast", "llama", "lm", "bf16-autocast", model=UNTIED),
    # Long enough that runs diverge: at the end the losses of any two differ by percents.
    Case(
        "llama-lm-long", "llama", "lm", "bf16-autocast", steps=300, model={"num_hidden_layers": 6, **UNTIED},
        options={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    ),
    Case("llama-lm-captured", "llama", "lm", model=UNTIED, capture="on"),
    Case("llama-sft-captured", "llama", "sft", ragged=True, capture="on"),
    Case("qwen3-sft-captured", "qwen3", "sft", "bf16-autocast", ragged=True, capture="on"),
    Case("qwen3-grpo-captured", "qwen3", "grpo", quick=True, options={"loss_type": "dapo"}, capture="on"),
    Case(
        "llama-grpo-captured", "llama", "grpo", options={"loss_type": "dapo", "gradient_checkpointing": True},
        capture="on",
    ),
    Case("mistral-lm", "mistral", "lm"),
    Case("qwen2-lm", "qwen2", "lm"),
    Case("qwen3-lm", "qwen3", "lm", model=TIED),
    Case("qwen3-lm-autocast", "qwen3", "lm", "bf16-autocast", model=TIED),
    Case("qwen3-lm-checkpointing", "qwen3", "lm", model=TIED, options={"gradient_checkpointing": True}),
    Case("qwen3-moe-lm", "qwen3-moe", "lm"),
    Case("gpt-oss-lm", "gpt-oss", "lm"),
    Case("gemma2-lm", "gemma2", "lm"),
    Case("gemma2-lm-bf16", "gemma2", "lm", "bf16"),
    Case("gemma3-lm", "gemma3", "lm"),
    Case("cohere-lm", "cohere", "lm"),
    Case("mamba2-lm", "mamba2", "lm", model={"num_heads": 8}),
    Case("llama-sft-packing", "llama", "sft", options={"packing": True}),
    Case("qwen3-sft-padding-free", "qwen3", "sft", options={"padding_free": True, "max_length": None}),
    Case("qwen2-sft-autocast", "qwen2", "sft", "bf16-autocast"),
    Case("gemma2-sft", "gemma2", "sft"),
    Case("mistral-sft-ragged", "mistral", "sft", model={"sliding_window": 9}, ragged=True),
    Case("qwen3-moe-sft", "qwen3-moe", "sft"),
    Case("gpt-oss-sft", "gpt-oss", "sft"),
    Case("llama-dpo", "llama", "dpo"),
    Case("qwen3-grpo-dapo", "qwen3", "grpo", options={"loss_type": "dapo"}),
    Case(
        "qwen3-grpo-checkpointing", "qwen3", "grpo", options={"loss_type": "dapo", "gradient_checkpointing": True}
    ),
    Case("qwen3-grpo-grpo-kl", "qwen3", "grpo", options={"loss_type": "grpo", "beta": 0.04}),
    Case("qwen3-grpo-dr-grpo", "qwen3", "grpo", options={"loss_type": "dr_grpo"}),
    Case(
        "qwen3-grpo-gspo", "qwen3", "grpo", options={"loss_type": "grpo", "importance_sampling_level": "sequence"}
    ),
    Case("qwen3-grpo-cispo", "qwen3", "grpo", options={"loss_type": "cispo", "epsilon_high": 5.0}),
    Case("qwen3-grpo-sapo", "qwen3", "grpo", options={"loss_type": "sapo"}),
    Case("qwen3-grpo-lora", "qwen3", "grpo", options={"loss_type": "dapo"}, lora=True),
    Case("llama-grpo-autocast-kl", "llama", "grpo", "bf16-autocast", options={"loss_type": "dapo", "beta": 0.04}),
    Case("qwen2-grpo-dapo", "qwen2", "grpo", options={"loss_type": "dapo"}),
    Case("gemma3-grpo-dapo", "gemma3", "grpo", options={"loss_type": "dapo"}),
    # As in a checkpoint: TRL requests the routers' logits itself and adds their loss; generation would fail if the
    # configuration also requested them.
    Case(
        "qwen3-moe-grpo-dapo", "qwen3-moe", "grpo", model={"output_router_logits": False}, options={"loss_type": "dapo"}
    ),
    Case(
        "qwen3-grpo-ragged", "qwen3", "grpo", ragged=True,
        # A prompt's rows are in several micro-batches, until the kernels' trainer groups them.
        options={
            "loss_type": "dapo", "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2,
            "max_completion_length": 40,
        },
    ),
    Case("qwen3-grpo-free", "qwen3", "grpo", steps=40, options={"loss_type": "dapo"}, seeds=6),
    Case("llama-grpo-free", "llama", "grpo", steps=40, options={"loss_type": "dapo"}, seeds=6),
    Case("gemma3-grpo-free", "gemma3", "grpo", steps=40, options={"loss_type": "dapo"}, seeds=6),
    Case("llama-lm-triton", "llama", "lm", backend="triton", steps=2, quick=True, options=FEW, held_out=2),
    Case("gemma2-lm-triton", "gemma2", "lm", backend="triton", steps=2, options=FEW, held_out=2),
    Case(
        "qwen3-grpo-triton", "qwen3", "grpo", backend="triton", steps=2, quick=True,
        options={"loss_type": "dapo", "per_device_train_batch_size": 4, "num_generations": 4}, held_out=4,
    ),
    Case("llama-lm-ascend", "llama", "lm", backend="ascend-lowering", steps=3, options=FEW, held_out=2),
)  # fmt: skip


# Well-known shapes and lengths for an accelerator, not part of the full suite: 124 million parameters, as the smallest
# GPT-2, with 2 million tokens; and Qwen3's smallest model with its full vocabulary, of which sums use the first 258
# ids. Its rewards are those of the reference run's completions, which all runs replay.
#
# The text has 8 x 256 labels in a step, a power of two. Under bf16 autocast an untrained model's gradient at each label
# is about 1 / number of labels, which bf16 rounds by up to 0.4%, equally at every label and in every unpatched run: the
# noise floor does not include this error, and kernels that divide later differ by it. (A tiny model with 248 labels is
# 7 floors away, one with 256 labels 0.2.)
SHOWCASE: tuple[Case, ...] = (
    Case(
        "llama-124m-text", "llama", "lm", "bf16-autocast", steps=1000, held_out=4, text=Text(50257, 257, 16_000_000),
        model={
            "vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
            "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "max_position_embeddings": 1024,
            **TIED,
        },
        options={
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 3e-4,
            "lr_scheduler_type": "cosine", "warmup_steps": 50,
        },
    ),
    Case(
        "qwen3-0.6b-sums", "qwen3", "grpo", "bf16-autocast", steps=300, held_out=16,
        model={
            "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1024,
            **TIED,
        },
        options={"loss_type": "dapo", "learning_rate": 5e-6}, warm_up=WarmUp(300, 1e-4, 1.0),
    ),
)  # fmt: skip


def find(name: str) -> Case:
    """Returns the case of that name. Raises `ValueError` if there is none."""
    for case in (*CASES, *SHOWCASE):
        if case.name == name:
            return case
    names = ", ".join(case.name for case in (*CASES, *SHOWCASE))
    raise ValueError(f"case must be one of {names}; got {name!r}")
