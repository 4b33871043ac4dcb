"""The table: which ops are measured at which shapes, on which inputs, against which floor and which truth.

A row of the table is a `OpCase`. What an op needs is an `OpSpec`: inputs, the plain PyTorch reference, the result in
higher precision, and the fewest operations and bytes that any implementation must spend.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from npu_trainer_kernels.descriptions import FORMS, Form, Inputs, Tensors, Work, Workload

__all__ = ["OPS", "OpCase", "grpo_tokens", "peak", "table", "work_of"]

# Rows of x that are raised at once: 64 MiB in fp32 at H=4096.
PEAKED_ROWS = 4096


@dataclass(frozen=True)
class OpCase(Workload):
    """A row of the table.

    Attributes:
        group: `"ops"`, or `"scaling-<axis>"` for a curve over one size.
        modes: what is timed.
        peaked: the logits are like a trained model's (`peak`), not all of one size (ops at the LM head).
    """

    group: str = "ops"
    modes: tuple[str, ...] = ("forward", "backward", "both")
    peaked: bool = False

    @property
    def shape(self) -> str:
        return super().shape + (" peaked" if self.peaked else "")

    @property
    def key(self) -> str:
        return f"{self.group}/{self.op}/{self.shape}/{self.dtype}"


Truth = tuple[tuple[Tensor, ...], dict[str, Tensor]]


# ---------------------------------------------------------------------------------------------------------------------
# LM head
# ---------------------------------------------------------------------------------------------------------------------


def grpo_tokens(t: Tensors) -> tuple[Tensor, ...]:
    """(mask, x, ids, old, ref, advantages) of the unmasked tokens alone."""
    mask = t["mask"]
    advantages = t["advantages"].unsqueeze(1).expand(mask.shape)
    return mask, t["x"][mask], t["ids"][mask], t["old"][mask], t["ref"][mask], advantages[mask]


def peak(x: Tensor, weight: Tensor, seed: int = 4) -> Tensor:
    """Makes a head's inputs, in place, into such as a trained model has, and returns the ids `[N]` to predict.

    Ids are as frequent as words are: the k-th most frequent one in proportion to 1 / (k + 2.7). The first column of `x`
    is 1 and that of `weight` the logarithm of the frequencies, so that the head knows them; and each row's logit at its
    own id is raised, by 0 to 24. With a vocabulary of 128256 the loss is near 2, and half of the ids are predicted with
    more than 0.9. Flat inputs have a gradient above 2**-12, below which cut-cross-entropy skips a tile in bf16, in half
    of all tiles of 128 x 128 logits, since the largest of so many normal numbers is near 4; these in an eighth.
    """
    rows, vocabulary = x.shape[0], weight.shape[0]
    drawn = torch.Generator().manual_seed(seed)
    frequency = 1.0 / (torch.arange(vocabulary, dtype=torch.float64) + 3.7)
    frequency = (frequency / frequency.sum())[torch.randperm(vocabulary, generator=drawn)]
    ids = torch.multinomial(frequency, rows, replacement=True, generator=drawn).to(x.device)
    raised = (24 * torch.rand(rows, generator=drawn)).to(x.device)
    with torch.no_grad():
        weight[:, 0] = frequency.log().to(weight)
        x[:, 0] = 0
        for part in torch.arange(rows, device=x.device).split(PEAKED_ROWS):
            own = weight[ids[part]].float()
            own[:, 0] = 0
            x[part] += (own * (raised[part] / own.square().sum(1)).unsqueeze(1)).to(x.dtype)
        x[:, 0] = 1
    return ids


def _peaked(form: Form, target: str) -> Form:
    """The form with inputs as `peak` makes them, in the cases that ask for them."""

    def build(work: Workload, device: torch.device) -> Inputs:
        inputs = form.build(work, device)
        if isinstance(work, OpCase) and work.peaked:
            inputs.tensors[target] = peak(inputs.tensors["x"], inputs.tensors["weight"])
        return inputs

    return replace(form, build=build)


_TARGETS = {"linear_cross_entropy": "target", "linear_logprob": "ids"}
OPS: dict[str, Form] = {
    name: _peaked(form, _TARGETS[name]) if name in _TARGETS else form
    for name, form in FORMS.items()
    if form.work is not None
}
"""The forms that are measured, those whose least work is known."""


def work_of(case: OpCase) -> dict[str, Work]:
    """The least that each mode of a case costs."""
    work = OPS[case.op].work
    assert work is not None
    return work(case)


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


def _accelerator_cases() -> list[OpCase]:
    rows = [OpCase("linear_cross_entropy", {"BT": bt, "H": 4096, "V": 128256}) for bt in (4096, 8192, 16384)]
    # What depends on the values: cut-cross-entropy skips tiles whose gradients are all small.
    rows += [OpCase("linear_cross_entropy", {"BT": bt, "H": 4096, "V": 128256}, peaked=True) for bt in (8192, 16384)]
    rows += [OpCase("fused_linear_grpo_loss", {"B": 8, "T": t, "H": 2048, "V": 151936}) for t in (1024, 4096)]
    rows += [OpCase("rms_norm", {"N": n, "H": h}) for n, h in ((8192, 4096), (16384, 8192))]
    rows += [
        OpCase("add_rms_norm", {"N": 8192, "H": 4096}),
        OpCase("embedding", {"N": 16384, "V": 151936, "D": 4096}),
    ]
    # A gated norm of 8192 tokens in Qwen3-Next, 32 heads each, and one as wide as Bamba's; Command R's layer norm.
    rows += [OpCase("gated_rms_norm", {"N": n, "H": h}) for n, h in ((262144, 128), (8192, 8192))]
    rows += [OpCase("layer_norm", {"N": 8192, "H": 8192})]
    rows += [
        OpCase("swiglu", {"N": 8192, "I": 14336}),
        OpCase("rope", {"S": 8192, "Q": 32, "K": 8, "D": 128}),
    ]
    # Gemma-3-4B's gate, and GLM-4-9B's rotation.
    rows += [
        OpCase("geglu", {"N": 8192, "I": 10240}),
        OpCase("rope_by_turns", {"S": 8192, "Q": 32, "K": 2, "D": 128}),
    ]
    rows += [OpCase("linear_logprob", {"BT": 8192, "H": 4096, "V": 128256})]
    # The second row has a student of 1.7B and a teacher of 8B, both Qwen3.
    rows += [OpCase("linear_divergence", {"BT": 8192, "H": 4096, "V": 128256})]
    both = {"BT": 8192, "H": 2048, "H2": 4096, "V": 151936}
    rows += [OpCase(op, both) for op in ("linear_divergence", "linear_divergence_kl")]
    # Qwen3-0.6B's heads: completions of which 37% and 78% of the positions are live, and a prompt that all rows share.
    heads = {"Q": 16, "K": 8, "D": 128}
    rows += [OpCase("varlen_attention", {"B": 8, "T": 4224, "live": live, "shared": 0, **heads}) for live in (37, 78)]
    rows += [OpCase("varlen_attention", {"B": 8, "T": 3072, "live": 37, "shared": 2048, **heads})]
    # A token of each of 8 and of 64 rows.
    rows += [
        OpCase("decode_attention", {"B": b, "T": t, **heads}, modes=("forward",))
        for b, t in ((8, 1024), (64, 1024), (8, 8192))
    ]
    # Queries, keys and values of Qwen3-Next; LFM2's; Mamba 2's.
    rows += [OpCase("causal_conv1d", {"N": 16384, "C": c, "K": k}) for c, k in ((8192, 4), (2048, 3), (4352, 4))]
    # A small mixture of experts, and Qwen3-30B-A3B's.
    rows += [OpCase("moe_experts", {"N": 16384, "H": 1024, "I": 512, "E": 64, "k": 8})]
    rows += [OpCase("moe_experts", {"N": 16384, "H": 2048, "I": 768, "E": 128, "k": 8})]
    return rows


def _cpu_cases() -> list[OpCase]:
    """Shapes of the models in `examples/`: what a laptop runs."""
    rows = [
        OpCase("linear_cross_entropy", {"BT": 2048, "H": 160, "V": 8009}),
        OpCase("linear_cross_entropy", {"BT": 2048, "H": 160, "V": 8009}, peaked=True),
        OpCase("linear_cross_entropy", {"BT": 512, "H": 128, "V": 258}),
        # A vocabulary as large as a real one's: memory is what a CPU gains there.
        OpCase("linear_cross_entropy", {"BT": 4096, "H": 512, "V": 50000}),
        OpCase("fused_linear_grpo_loss", {"B": 128, "T": 4, "H": 128, "V": 258}),
        OpCase("fused_linear_grpo_loss", {"B": 8, "T": 128, "H": 160, "V": 8009}),
        OpCase("rms_norm", {"N": 2048, "H": 160}),
        OpCase("rms_norm", {"N": 4096, "H": 1024}),
        OpCase("add_rms_norm", {"N": 2048, "H": 160}),
        OpCase("gated_rms_norm", {"N": 2048, "H": 160}),
        OpCase("layer_norm", {"N": 2048, "H": 160}),
        OpCase("embedding", {"N": 2048, "V": 8009, "D": 160}),
        OpCase("swiglu", {"N": 2048, "I": 432}),
        OpCase("geglu", {"N": 2048, "I": 432}),
        OpCase("rope", {"S": 2048, "Q": 5, "K": 5, "D": 32}),
        OpCase("rope_by_turns", {"S": 2048, "Q": 5, "K": 5, "D": 32}),
        OpCase("linear_logprob", {"BT": 2048, "H": 160, "V": 8009}),
        OpCase("linear_divergence", {"BT": 2048, "H": 160, "V": 8009}),
        OpCase("linear_divergence_kl", {"BT": 2048, "H": 160, "H2": 320, "V": 8009}),
        *(
            OpCase("varlen_attention", {"B": 8, "T": 256, "live": live, "shared": shared, "Q": 5, "K": 5, "D": 32})
            for live, shared in ((37, 0), (78, 0), (37, 128))
        ),
        OpCase("decode_attention", {"B": 8, "T": 256, "Q": 5, "K": 5, "D": 32}, modes=("forward",)),
        OpCase("causal_conv1d", {"N": 2048, "C": 512, "K": 4}),
        OpCase("moe_experts", {"N": 2048, "H": 160, "I": 96, "E": 8, "k": 2}),
    ]
    return [replace(c, dtype="float32") for c in rows]


def _scaling(bts: tuple[int, ...], vocabs: tuple[int, ...], hiddens: tuple[int, ...], base: Mapping[str, int],
             dtype: str) -> list[OpCase]:  # fmt: skip
    def curve(op: str, axis: str, values: tuple[int, ...], fixed: Mapping[str, int]) -> list[OpCase]:
        return [OpCase(op, {**fixed, axis: v}, dtype, f"scaling-{axis}", ("both",)) for v in values]

    rows = curve("linear_cross_entropy", "BT", bts, base)
    rows += curve("linear_cross_entropy", "V", vocabs, base)
    rows += curve("linear_cross_entropy", "H", hiddens, base)
    rows += curve("rms_norm", "H", hiddens, {"N": base["BT"], "H": 0})
    return rows


def table(kind: str) -> list[OpCase]:
    """Every row for a kind of device, the most wanted first.

    Args:
        kind: `"npu"`, `"cuda"` or `"cpu"`.
    """
    if kind == "cpu":
        sizes = {"BT": 512, "H": 128, "V": 2048}
        return _cpu_cases() + _scaling((256, 1024, 4096), (1024, 4096, 16384), (64, 256, 1024), sizes, "float32")
    sizes = {"BT": 8192, "H": 2048, "V": 128256}
    powers = tuple(1024 << i for i in range(7))
    return _accelerator_cases() + _scaling(
        powers, (32768, 65536, 131072, 262144), (1024, 2048, 4096, 8192, 16384), sizes, "bfloat16"
    )
