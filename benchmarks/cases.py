"""The table of ops and shapes that are measured, with their inputs, floors and truths.

A row of the table is an `OpCase`. An `OpSpec` describes an op: its inputs, the plain PyTorch reference, the result in
higher precision, and the minimum of operations and bytes that any implementation needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from npu_trainer_kernels.descriptions import FORMS, Form, Inputs, Tensors, Work, Workload

__all__ = ["OPS", "OpCase", "grpo_tokens", "peak", "table", "work_of"]

# Rows of x that `peak` changes at once: 64 MiB in fp32 at H=4096.
PEAKED_ROWS = 4096


@dataclass(frozen=True)
class OpCase(Workload):
    """A row of the table.

    Attributes:
        group: `"ops"`, or `"scaling-<axis>"` for a curve over one size.
        modes: the modes that are timed.
        peaked: whether the logits are like a trained model's (`peak`), or all of similar size (for ops at the LM head).
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


@dataclass(frozen=True)
class Work:
    """The minimum cost of a mode: operations on the matrix unit, and bytes to and from memory."""

    flops: float = 0.0
    bytes: float = 0.0


Truth = tuple[tuple[Tensor, ...], dict[str, Tensor]]


@dataclass(frozen=True)
class OpSpec:
    """The description of an op for the runner.

    Attributes:
        build: returns the inputs of a case on a device.
        reference: the plain PyTorch function from tensors to output(s).
        work: returns the minimum cost of each mode.
        products: returns (rows, hidden, vocabulary) of the head's matrix products, whose time is the floor; None: the
            floor follows from `work`.
        row_truth: for ops at the LM head, a function of (a chunk's logits in high precision, the inputs, the chunk's
            rows) that returns (per-row outputs or None, the scalar to differentiate), so that the truth needs no
            `[N, V]` logits.
    """

    build: Callable[[Workload, torch.device], Inputs]
    reference: Callable[[Tensors], Outputs]
    work: Callable[[OpCase], dict[str, Work]]
    products: Callable[[OpCase], tuple[int, int, int]] | None = None
    row_truth: Callable[[Tensor, Inputs, Tensor], tuple[Tensor | None, Tensor]] | None = None


def _itemsize(case: OpCase) -> int:
    return case.torch_dtype.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# LM head
# ---------------------------------------------------------------------------------------------------------------------


def grpo_tokens(t: Tensors) -> tuple[Tensor, ...]:
    """Returns the mask, and x, ids, old, ref and advantages of the unmasked tokens only."""
    mask = t["mask"]
    advantages = t["advantages"].unsqueeze(1).expand(mask.shape)
    return mask, t["x"][mask], t["ids"][mask], t["old"][mask], t["ref"][mask], advantages[mask]


def peak(x: Tensor, weight: Tensor, seed: int = 4) -> Tensor:
    """Changes a head's inputs in place to resemble a trained model's, and returns the ids `[N]` to predict.

    Ids have the frequencies of words: the k-th most frequent id is proportional to 1 / (k + 2.7). The first column of
    `x` is 1 and that of `weight` the logarithm of the frequencies, so the head predicts them; and the logit of each
    row's target is raised by 0 to 24. With a vocabulary of 128256 the loss is near 2, and half of the targets have a
    probability above 0.9. cut-cross-entropy skips a tile in bf16 if its gradient is below 2**-12. With random normal
    inputs half of all tiles of 128 x 128 logits are above that, since the largest of so many normal numbers is near 4;
    with these inputs an eighth.
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


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise ops
# ---------------------------------------------------------------------------------------------------------------------


def _passes(
    per_mode: tuple[int, int], elements: Callable[[Mapping[str, int]], int]
) -> Callable[[OpCase], dict[str, Work]]:
    """Returns the work of an op that reads or writes tensors of so many elements `per_mode` times, forward and
    backward."""

    def work(case: OpCase) -> dict[str, Work]:
        size = float(elements(case.sizes) * _itemsize(case))
        forward, backward = per_mode[0] * size, per_mode[1] * size
        return {
            "forward": Work(bytes=forward),
            "backward": Work(bytes=backward),
            "both": Work(bytes=forward + backward),
        }

    return work


def _embedding_work(case: OpCase) -> dict[str, Work]:
    s = case.sizes
    rows, weight = float(s["N"] * s["D"] * _itemsize(case)), float(s["V"] * s["D"] * _itemsize(case))
    forward, backward = 2 * rows, rows + weight
    return {"forward": Work(bytes=forward), "backward": Work(bytes=backward), "both": Work(bytes=forward + backward)}


def _attention_work(case: OpCase) -> dict[str, Work]:
    """Returns two matrix products forward and five backward over the visible positions, and the bytes of q, k, v, o and
    their gradients."""
    s = case.sizes
    lengths = attention_lengths(s["B"], s["T"], s["live"], s["shared"])
    # Every token sees itself and the tokens before it in its row; tokens that rows share are computed once.
    seen = s["shared"] * (s["shared"] + 1) / 2 + sum(n * s["shared"] + n * (n + 1) / 2 for n in lengths)
    product = 2.0 * seen * s["Q"] * s["D"]
    size = float((s["shared"] + sum(lengths)) * s["D"] * _itemsize(case))
    forward, backward = size * 2 * (s["Q"] + s["K"]), size * 4 * (s["Q"] + s["K"])
    return {
        "forward": Work(2 * product, forward),
        "backward": Work(5 * product, backward),
        "both": Work(7 * product, forward + backward),
    }


def _experts_work(case: OpCase) -> dict[str, Work]:
    """Returns the matrix products of every row with its expert's two matrices, and the bytes of x, o, the matrices, h,
    which backward needs, and gradients. Other tensors between the products do not count, although no known
    implementation avoids all of them."""
    s = case.sizes
    rows, size = s["N"] * s["k"], float(_itemsize(case))
    product = 6.0 * rows * s["H"] * s["I"]
    matrices, tokens, kept = 3 * s["E"] * s["H"] * s["I"] * size, s["N"] * s["H"] * size, 2 * rows * s["I"] * size
    forward, backward = 2 * tokens + matrices + kept, 3 * tokens + 2 * matrices + kept
    return {
        "forward": Work(product, forward),
        "backward": Work(2 * product, backward),
        "both": Work(3 * product, forward + backward),
    }


def _spec(op: str, *args: Any) -> OpSpec:
    target = {"linear_cross_entropy": "target", "linear_logprob": "ids"}.get(op)
    build = WORKLOADS[op].build if target is None else _peaked(op, target)
    return OpSpec(build, WORKLOADS[op].reference, *args)


OPS: dict[str, OpSpec] = {
    "linear_cross_entropy": _spec(
        "linear_cross_entropy", _head_work(_head_products), _head_products, _cross_entropy_rows
    ),
    "fused_linear_grpo_loss": _spec("fused_linear_grpo_loss", _head_work(_grpo_products), _grpo_products, _grpo_rows),
    "linear_logprob": _spec("linear_logprob", _head_work(_head_products), _head_products, _logprob_rows),
    # Forward reads x and writes y; backward reads x and dy and writes dx.
    "rms_norm": _spec("rms_norm", _passes((2, 3), lambda s: s["N"] * s["H"])),
    # Forward reads x and residual, writes y and S; backward reads S, dy and dS, writes one gradient for both inputs.
    "add_rms_norm": _spec("add_rms_norm", _passes((4, 4), lambda s: s["N"] * s["H"])),
    # As rms_norm, and the gate is read in both modes and its gradient written.
    "gated_rms_norm": _spec("gated_rms_norm", _passes((3, 5), lambda s: s["N"] * s["H"])),
    "layer_norm": _spec("layer_norm", _passes((2, 3), lambda s: s["N"] * s["H"])),
    # Backward writes the whole weight gradient.
    "embedding": _spec("embedding", _embedding_work),
    # Forward reads gate and up, writes one; backward reads both and dy, writes two.
    "swiglu": _spec("swiglu", _passes((3, 5), lambda s: s["N"] * s["I"])),
    "geglu": _spec("geglu", _passes((3, 5), lambda s: s["N"] * s["I"])),
    "rope": _spec("rope", _passes((2, 2), lambda s: s["S"] * (s["Q"] + s["K"]) * s["D"])),
    "rope_by_turns": _spec("rope_by_turns", _passes((2, 2), lambda s: s["S"] * (s["Q"] + s["K"]) * s["D"])),
    "varlen_attention": _spec("varlen_attention", _attention_work),
    "moe_experts": _spec("moe_experts", _experts_work),
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
    # Peaked inputs matter for cut-cross-entropy, which skips tiles whose gradients are all small.
    rows += [OpCase("linear_cross_entropy", {"BT": bt, "H": 4096, "V": 128256}, peaked=True) for bt in (8192, 16384)]
    rows += [OpCase("fused_linear_grpo_loss", {"B": 8, "T": t, "H": 2048, "V": 151936}) for t in (1024, 4096)]
    rows += [OpCase("rms_norm", {"N": n, "H": h}) for n, h in ((8192, 4096), (16384, 8192))]
    rows += [
        OpCase("add_rms_norm", {"N": 8192, "H": 4096}),
        OpCase("embedding", {"N": 16384, "V": 151936, "D": 4096}),
    ]
    # The gated norms of Qwen3-Next (8192 tokens with 32 heads each) and of Bamba's width; Command R's layer norm.
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
    # Qwen3-0.6B's heads: completions with 37% and 78% live positions, and a prompt that all rows share.
    heads = {"Q": 16, "K": 8, "D": 128}
    rows += [OpCase("varlen_attention", {"B": 8, "T": 4224, "live": live, "shared": 0, **heads}) for live in (37, 78)]
    rows += [OpCase("varlen_attention", {"B": 8, "T": 3072, "live": 37, "shared": 2048, **heads})]
    # A small mixture of experts, and Qwen3-30B-A3B's.
    rows += [OpCase("moe_experts", {"N": 16384, "H": 1024, "I": 512, "E": 64, "k": 8})]
    rows += [OpCase("moe_experts", {"N": 16384, "H": 2048, "I": 768, "E": 128, "k": 8})]
    return rows


def _cpu_cases() -> list[OpCase]:
    """Returns cases with the shapes of the models in `examples/`, for a laptop."""
    rows = [
        OpCase("linear_cross_entropy", {"BT": 2048, "H": 160, "V": 8009}),
        OpCase("linear_cross_entropy", {"BT": 2048, "H": 160, "V": 8009}, peaked=True),
        OpCase("linear_cross_entropy", {"BT": 512, "H": 128, "V": 258}),
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
        *(
            OpCase("varlen_attention", {"B": 8, "T": 256, "live": live, "shared": shared, "Q": 5, "K": 5, "D": 32})
            for live, shared in ((37, 0), (78, 0), (37, 128))
        ),
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
    """Returns every row for a kind of device, the most important first.

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
