"""Every op on drawn input, good and bad: the reference's answer, or a `ValueError` or `TypeError` naming an argument.

A case is first drawn as the docstring of its op allows it (sizes from 0 on, any strides, NaN and infinities, ids at
both ends of the vocabulary, masks of any dtype); it must be answered as the reference answers. Then, in most cases, one
thing is spoiled: a dtype, a shape, a device, an id, an option, the type of an argument. Such a call may be refused, but
only with one of the two errors; answered otherwise than by the reference it may not be.
"""

import copy
import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from npu_trainer_kernels import ops
from npu_trainer_kernels.ops.gates import ACTIVATIONS, JOINED
from npu_trainer_kernels.ops.head.grpo_formula import LEVELS, LOSS_TYPES
from npu_trainer_kernels.ops.norms.rms_kernels import CASTINGS as NORM_CASTINGS
from npu_trainer_kernels.ops.rope import CASTINGS, PAIRS, TABLES
from tests.closeness import assert_as_close, rounded, run
from tests.ops.test_varlen_attention import Layout, tree
from tests.ops.test_varlen_attention import check as check_attention

FUZZ = settings(
    derandomize=True, database=None, deadline=None, print_blob=False, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16)
SIZES = (0, 1, 2, 3, 5)
# In the interpreter 130 columns are three blocks of a norm, and several steps and a tail of the head's kernels.
WIDTHS = (1, 2, 3, 8, 33, 130)


@dataclasses.dataclass
class Case:
    """A call: tensors that the fp64 run converts, and everything else, by argument name.

    Attributes:
        floats: differentiated tensors.
        others: ids, masks, numbers per token; None where an argument is left out.
        options: what is no tensor.
        ours: options that the reference does not know, as they must not change the answer.
        vocab: the range of the ids, where there are any.
        refusable: whether it was spoiled.
    """

    floats: dict[str, Any]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    ids: str | None = None
    vocab: int = 0
    refusable: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# Good tensors
# ---------------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "every second element": lambda t: torch.stack((t, t), -1)[..., 0],
    "rows apart": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "first row repeated": lambda t: t[:1].expand(t.shape),
    "at an offset": lambda t: torch.cat((t.reshape(-1)[:1], t.reshape(-1)))[min(1, t.numel()) :].view(t.shape),
}


@st.composite
def tensors(draw, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0, odd: bool = True) -> torch.Tensor:
    """Random numbers in some layout; with `odd` now and then one of them is NaN, infinite, huge or tiny."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    t = (scale * torch.randn(tuple(shape), generator=generator)).to(dtype)
    special = draw(st.sampled_from((None, None, None, math.nan, math.inf, -math.inf, 3e4, 1e-7, 0.0)))
    if odd and special is not None and t.numel():
        t.view(-1)[draw(st.integers(0, t.numel() - 1))] = special
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    return LAYOUTS[layout](t) if t.dim() else t


@st.composite
def id_tensors(draw, shape: Sequence[int], vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    ids = torch.randint(0, vocab, tuple(shape), generator=generator)
    if ids.numel() >= 2 and draw(st.booleans()):
        ids.view(-1)[0], ids.view(-1)[-1] = 0, vocab - 1
    ids = ids.to(draw(st.sampled_from((torch.int64, torch.int32))))
    return LAYOUTS[draw(st.sampled_from(("contiguous", "transposed")))](ids) if ids.dim() else ids


@st.composite
def masks(draw, shape: Sequence[int], dtypes: Sequence[torch.dtype | None] = (None, *MASKS)) -> torch.Tensor | None:
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    # Some integers beyond 1, as a mask that counts would have.
    values = torch.randint(0, 4, tuple(shape), generator=generator)
    return None if dtype is None else (values > 0 if dtype is torch.bool else values.to(dtype))


dtypes, sizes, widths = st.sampled_from(FLOATS), st.sampled_from(SIZES), st.sampled_from(WIDTHS)


def leading(most: int = 2) -> st.SearchStrategy[list[int]]:
    return st.lists(sizes, max_size=most)


# ---------------------------------------------------------------------------------------------------------------------
# Good calls
# ---------------------------------------------------------------------------------------------------------------------


def norm_options(draw, weighted: bool) -> dict[str, Any]:
    return {
        "eps": draw(st.sampled_from((1e-6, 0.0, 1.0))),
        "offset": draw(st.sampled_from((0.0, 1.0))) if weighted else 0.0,
        "casting": draw(st.sampled_from(NORM_CASTINGS)),
    }


@st.composite
def rms_norm(draw) -> Case:
    width = draw(widths)
    x = draw(tensors([*draw(leading()), width], draw(dtypes)))
    weight = draw(st.none() | dtypes.flatmap(lambda d: tensors([width], d)))
    return Case({"x": x, "weight": weight}, options=norm_options(draw, weight is not None))


@st.composite
def add_rms_norm(draw) -> Case:
    case = draw(rms_norm())
    x, weight = case.floats.values()
    residual = draw(tensors(x.shape, draw(dtypes)))
    mode = draw(st.sampled_from(("pre", "post")))
    added = {"mode": mode, "multiplier": draw(st.sampled_from((1.0, 1.0, 0.22)))}
    return Case({"x": x, "residual": residual, "weight": weight}, options={**case.options, **added})


@st.composite
def embedding(draw) -> Case:
    vocab = draw(widths)
    options = {
        "padding_idx": draw(st.none() | st.integers(-vocab, vocab - 1)),
        "scale": draw(st.sampled_from((None, 2.5, 0.0))),
    }
    weight = draw(tensors([vocab, draw(widths)], draw(dtypes)))
    return Case({"weight": weight}, {"ids": draw(id_tensors(draw(leading()), vocab))}, options, {}, "ids", vocab)


@st.composite
def layer_norm(draw) -> Case:
    # The norm of one number does not depend on it, that of two has the same two values: gradients are all rounding.
    shape, dtype = [*draw(leading()), draw(widths.filter(lambda width: width > 2))], draw(dtypes)
    floats = {"x": draw(tensors(shape, dtype)), "weight": draw(st.none() | tensors(shape[-1:], draw(dtypes)))}
    if floats["weight"] is not None:
        floats["bias"] = draw(st.none() | tensors(shape[-1:], draw(dtypes)))
    options = {"eps": draw(st.sampled_from((1e-5, 1e-2)))}
    if floats["weight"] is not None:
        options["offset"] = draw(st.sampled_from((0.0, 1.0)))
    return Case(floats, options=options)


@st.composite
def gated_rms_norm(draw) -> Case:
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    width, dtype = groups * draw(widths.filter(lambda width: width > 1)), draw(dtypes)
    shape = [*draw(leading()), width]
    floats = {
        "x": draw(tensors(shape, dtype)),
        "gate": draw(st.none() | tensors(shape, draw(dtypes))),
        "weight": draw(tensors([width], draw(dtypes))),
    }
    return Case(floats, options={
        "eps": draw(st.sampled_from((1e-6, 1e-2))),
        "offset": draw(st.sampled_from((0.0, 1.0))),
        "order": draw(st.sampled_from(("norm_first", "gate_first"))),
        "activation": draw(st.sampled_from(("silu", "sigmoid"))),
        "casting": draw(st.sampled_from(("llama", "gemma"))),
        "groups": groups,
    })  # fmt: skip


@st.composite
def swiglu(draw) -> Case:
    shape, dtype = [*draw(leading()), draw(widths)], draw(dtypes)
    activation, joined = draw(st.sampled_from(ACTIVATIONS)), draw(st.sampled_from((None, *JOINED)))
    options = {
        "activation": activation,
        "alpha": draw(st.sampled_from((1.0, 1.702))) if activation == "silu" else 1.0,
        "limit": draw(st.sampled_from((None, 0.5, 7.0))),
        "offset": draw(st.sampled_from((0.0, 1.0))),
        "joined": joined,
    }
    if joined is not None:
        return Case({"gate": draw(tensors([*shape[:-1], 2 * shape[-1]], dtype)), "up": None}, options=options)
    return Case({"gate": draw(tensors(shape, dtype)), "up": draw(tensors(shape, dtype))}, options=options)


@st.composite
def swiglu_linear(draw) -> Case:
    case = draw(swiglu())
    floats, rows = case.floats, draw(widths)
    gate = floats["gate"]
    width = gate.shape[-1] if case.options["joined"] is None else gate.shape[-1] // 2
    floats["weight"] = draw(tensors([rows, width], gate.dtype, 0.3))
    floats["bias"] = draw(st.none() | tensors([rows], gate.dtype))
    return Case(floats, options=case.options, ours={"overwrite": draw(st.booleans())})


@st.composite
def moe_experts(draw) -> Case:
    # In fp32: of a few numbers in 16 bits, in another order of rounding, the reference's own error is a matter of luck.
    dtype = torch.float32
    n, slots, experts = draw(sizes), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    hidden, inner = draw(widths), draw(widths)
    gated, transposed = draw(st.booleans()), draw(st.booleans())
    activation = draw(st.sampled_from(ACTIVATIONS))
    columns = 2 * inner if gated else inner
    up, down = (experts, columns, hidden), (experts, hidden, inner)
    if transposed:
        up, down = (experts, hidden, columns), (experts, inner, hidden)
    # All of them: an infinity meets zeros and other infinities in another order, and a NaN in an expert's last bias,
    # which a product with a matrix of the weights adds, is everybody's.
    finite = functools.partial(tensors, dtype=dtype, odd=False)
    floats = {
        "x": draw(finite([n, hidden])),
        "gate_up": draw(finite(up, scale=0.3)),
        "down": draw(finite(down, scale=0.3)),
        "gate_up_bias": draw(st.none() | finite([experts, columns])),
        "down_bias": draw(st.none() | finite([experts, hidden])),
    }
    options = {
        "gate": activation,
        "alpha": draw(st.sampled_from((1.0, 1.702))) if activation == "silu" else 1.0,
        "limit": draw(st.sampled_from((None, 0.5, 7.0))) if gated else None,
        "offset": draw(st.sampled_from((0.0, 1.0))) if gated else 0.0,
        "gated": gated,
        "interleaved": gated and draw(st.booleans()),
        "transposed": transposed,
    }
    # From the number of experts on nobody is here.
    ids = draw(id_tensors([n, slots], experts + 2))
    # A routing weight's gradient is one long sum: of one such number, too, the reference's error is a matter of luck.
    others = {"expert_ids": ids, "expert_weights": draw(finite([n, slots]))}
    return Case(floats, others, options, ids="expert_ids", vocab=experts)


@st.composite
def linear_rms_norm(draw) -> Case:
    # The norm of a single number does not depend on it: all of its gradient is rounding.
    hidden, size, dtype = draw(widths), draw(widths.filter(lambda width: width > 1)), draw(dtypes)
    rows = size * draw(st.integers(1, 3))
    floats = {
        "x": draw(tensors([*draw(leading()), hidden], dtype)),
        "weight": draw(tensors([rows, hidden], dtype, 0.3)),
        "norm_weight": draw(tensors([size], draw(dtypes))),
        "bias": draw(st.none() | tensors([rows], dtype)),
    }
    return Case(floats, options=norm_options(draw, True))


@st.composite
def rope(draw) -> Case:
    batch, tokens, pairs = draw(sizes), draw(sizes), draw(st.sampled_from((1, 3, 8)))
    options = {"pairs": draw(st.sampled_from(PAIRS)), "heads": draw(st.sampled_from((1, 2)))}
    options["tables"] = draw(st.sampled_from(TABLES if options["pairs"] != "regrouped" else TABLES[1:]))
    options["casting"] = draw(st.sampled_from(CASTINGS))
    size = 2 * pairs + draw(st.sampled_from((0, 0, 1, 6)))

    def heads(count: int) -> list[int]:
        return [batch, count, tokens, size] if options["heads"] == 1 else [batch, tokens, count, size]

    floats = {"q": draw(tensors(heads(draw(sizes)), draw(dtypes)))}
    floats["k"] = draw(st.none() | tensors(heads(draw(sizes)), draw(dtypes)))
    shape = [draw(st.sampled_from((1, batch))), tokens, pairs if options["tables"] == "pair" else 2 * pairs]
    return Case(floats, {name: draw(tensors(shape, draw(dtypes))) for name in ("cos", "sin")}, options)


def head(draw, shape: Sequence[int], ids: str) -> Case:
    vocab, hidden = draw(widths), draw(st.sampled_from((1, 3, 8)))
    floats = {
        "x": draw(tensors([*shape, hidden], draw(dtypes))),
        "weight": draw(tensors([vocab, hidden], draw(dtypes))),
        "bias": draw(st.none() | dtypes.flatmap(lambda d: tensors([vocab], d))),
    }
    options = {
        "softcap": draw(st.sampled_from((None, 3.0))),
        "logit_scale": draw(st.sampled_from((1.0, 0.25, 0.0))),
    }
    return Case(floats, {ids: draw(id_tensors(shape, vocab))}, options, {}, ids, vocab)


@st.composite
def linear_logprob(draw) -> Case:
    case = head(draw, draw(leading()), "ids")
    case.options["temperature"] = draw(st.sampled_from((1.0, 0.5)))
    wanted = ("entropy", "is_top1", "mean_logit", "log_sum_sq_probs")
    case.options["outputs"] = draw(st.lists(st.sampled_from(wanted), unique=True))
    return case


@st.composite
def linear_divergence(draw) -> Case:
    shape = draw(leading())
    case = head(draw, shape, "ids")
    # A vocabulary of the same size in most cases, and one that begins with the smaller one in others.
    vocab, hidden = draw(st.sampled_from((case.vocab, case.vocab, 40))), draw(st.sampled_from((1, 3, 8)))
    # Whose gradients are absent, here and in the reference.
    case.floats.update(
        teacher_x=draw(tensors([*shape, hidden], draw(dtypes))),
        teacher_weight=draw(tensors([vocab, hidden], draw(dtypes))),
        teacher_bias=draw(st.none() | dtypes.flatmap(lambda d: tensors([vocab], d))),
    )
    case.others["mask"] = draw(masks(shape, (None, *MASKS[:6])))
    if case.vocab > vocab:
        case.others["ids"] = case.others["ids"] % vocab
        case.vocab = vocab
    reduction = draw(st.sampled_from(("mean", "sum", "none")))
    wanted = ("log_prob", "entropy", "teacher_log_prob", "teacher_entropy")
    case.options.update(
        beta=draw(st.sampled_from((0, 0.25, 0.5, 1.0))),
        reduction=reduction,
        num_items=draw(st.sampled_from((None, 7, 2.5))) if reduction == "mean" else None,
        temperature=draw(st.sampled_from((1.0, 0.5))),
        teacher_temperature=draw(st.sampled_from((None, 2.0))),
        teacher_softcap=draw(st.sampled_from((None, 3.0))),
        teacher_logit_scale=draw(st.sampled_from((1.0, 0.25))),
        outputs=draw(st.lists(st.sampled_from(wanted), unique=True)),
    )
    return case


@st.composite
def linear_cross_entropy(draw) -> Case:
    case = head(draw, draw(leading()), "target")
    target, reduction = case.others["target"], draw(st.sampled_from(("mean", "sum", "none")))
    ignored = draw(st.sampled_from((-100, 0, 1 << 30)))
    case.others["target"] = torch.where(draw(masks(target.shape, (torch.bool,))), target, ignored).to(target.dtype)
    weights = draw(st.none() | tensors([case.vocab], torch.float32, odd=False))
    case.others["class_weights"] = None if weights is None else weights.abs()
    case.options.update(
        ignore_index=ignored,
        reduction=reduction,
        num_items=draw(st.sampled_from((None, 7, 2.5))) if reduction == "mean" else None,
        label_smoothing=draw(st.sampled_from((0.0, 0.1, 1.0))),
        z_loss=draw(st.sampled_from((0.0, 1e-2))),
    )
    # A few chunks: sums of many add up more rounding than the reference's one sum does.
    case.ours["chunk_rows"] = draw(st.sampled_from((None, max(1, target.numel() // 3))))
    return case


def grpo(draw, case: Case) -> Case:
    shape = list(case.others["ids"].shape)
    beta = draw(st.sampled_from((0.0, 0.1)))
    options = ops.GrpoOptions(
        draw(st.sampled_from(LOSS_TYPES)), draw(st.sampled_from(LEVELS)), beta=beta,
        bias_corrected_kl=beta > 0 and draw(st.booleans()), entropy_coef=draw(st.sampled_from((0.0, 0.1))),
    )  # fmt: skip
    per_token = [shape, shape[:1], [shape[0], 1]]
    case.others.update(
        advantages=draw(tensors(draw(st.sampled_from(per_token)), torch.float32, odd=False)),
        completion_mask=draw(masks(shape)),
        tool_mask=draw(masks(shape)),
        entropy_mask=draw(masks(shape)),
        old_log_prob=draw(st.none() | tensors(shape, torch.float32, 0.3, odd=False)),
        ref_log_prob=draw(tensors(shape, torch.float32, 0.3, odd=False)) if beta else None,
    )
    case.options.update(
        options=options,
        max_completion_length=11 if options.loss_type == "dr_grpo" else None,
        num_items=draw(st.sampled_from((None, 17))) if options.loss_type in ("dapo", "cispo", "vespo") else None,
        entropy=draw(st.booleans()),
    )
    return case


@st.composite
def fused_linear_grpo_loss(draw) -> Case:
    return grpo(draw, head(draw, [draw(sizes), draw(sizes)], "ids"))


@st.composite
def grpo_loss(draw) -> Case:
    shape, vocab = [draw(sizes), draw(sizes)], draw(widths)
    logits = draw(tensors([*shape, vocab], draw(dtypes)))
    case = Case({"logits": logits}, {"ids": draw(id_tensors(shape, vocab))}, {}, {}, "ids", vocab)
    return grpo(draw, case)


Op = Callable[..., Any]


def in_dtype_of_x(reference: Op) -> Op:
    """The head's ops take weight and bias in other dtypes than x's, and cast them."""

    def call(**given: Any) -> Any:
        for prefix in ("", "teacher_"):
            for name in (f"{prefix}weight", f"{prefix}bias"):
                if isinstance(given.get(name), torch.Tensor):
                    given[name] = given[name].to(given[f"{prefix}x"].dtype)
        return reference(**given)

    return call


OPS: dict[str, tuple[Op, Op, st.SearchStrategy[Case]]] = {
    "rms_norm": (ops.rms_norm, ops.rms_norm_reference, rms_norm()),
    "add_rms_norm": (ops.add_rms_norm, ops.add_rms_norm_reference, add_rms_norm()),
    "gated_rms_norm": (ops.gated_rms_norm, ops.gated_rms_norm_reference, gated_rms_norm()),
    "layer_norm": (ops.layer_norm, ops.layer_norm_reference, layer_norm()),
    "embedding": (ops.embedding, ops.embedding_reference, embedding()),
    "swiglu": (ops.swiglu, ops.swiglu_reference, swiglu()),
    "swiglu_linear": (ops.swiglu_linear, ops.swiglu_linear_reference, swiglu_linear()),
    "moe_experts": (ops.moe_experts, ops.moe_experts_reference, moe_experts()),
    "linear_rms_norm": (ops.linear_rms_norm, ops.linear_rms_norm_reference, linear_rms_norm()),
    "rope": (ops.rope, ops.rope_reference, rope()),
    "linear_logprob": (ops.linear_logprob, in_dtype_of_x(ops.linear_logprob_reference), linear_logprob()),
    "linear_divergence": (ops.linear_divergence, in_dtype_of_x(ops.linear_divergence_reference), linear_divergence()),
    "fused_linear_cross_entropy": (
        ops.fused_linear_cross_entropy, in_dtype_of_x(ops.linear_cross_entropy_reference), linear_cross_entropy(),
    ),
    "fused_linear_grpo_loss": (
        ops.fused_linear_grpo_loss, in_dtype_of_x(ops.fused_linear_grpo_loss_reference), fused_linear_grpo_loss(),
    ),
    "grpo_loss": (ops.grpo_loss, ops.grpo_loss_reference, grpo_loss()),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Spoiling
# ---------------------------------------------------------------------------------------------------------------------

BAD_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float64": lambda t: t.double(),
    "int16": lambda t: t.nan_to_num(0).to(torch.int16),
    "bool": lambda t: t.bool(),
    "float32": lambda t: t.float(),
    "complex": lambda t: t.to(torch.complex64),
    "on meta": lambda t: t.to("meta"),
    "a dimension more": lambda t: t.unsqueeze(0),
    "a dimension less": lambda t: t.reshape(-1)[:1].squeeze(0) if t.dim() < 2 else t.flatten(0, 1),
    "a column less": lambda t: t[..., :-1] if t.dim() else t,
    "a row more": lambda t: torch.cat((t, t[:1])) if t.dim() else t,
    "one element": lambda t: t.reshape(-1)[:1],
    "no element": lambda t: t.reshape(-1)[:0],
    "a list": lambda t: t.tolist(),
    "a string": lambda t: "x",
    "None": lambda t: None,
    "an array": lambda t: t.float().numpy(),
}
BAD_IDS = (-1, -100, 1 << 31, (1 << 31) - 1, -(1 << 63), (1 << 63) - 1)
BAD_OPTIONS = (None, math.nan, math.inf, -1.0, -1, 0, "x", "1.0", [1], {}, True, 10**400)


@st.composite
def spoiled(draw, strategy: st.SearchStrategy[Case]) -> Case:
    case = draw(strategy)
    how = draw(st.sampled_from(("not", "tensor", "tensor", "id", "option")))
    given_tensors = [*((case.floats, n) for n in case.floats), *((case.others, n) for n in case.others)]
    given_tensors = [(where, name) for where, name in given_tensors if where[name] is not None]
    options = [*((case.options, n) for n in case.options), *((case.ours, n) for n in case.ours)]
    if how == "tensor":
        where, name = draw(st.sampled_from(given_tensors))
        # A lone tensor on meta is a good call, without numbers to compare.
        kinds = sorted(BAD_TENSORS.keys() - ({"on meta"} if len(given_tensors) == 1 else set()))
        kind = draw(st.sampled_from(kinds))
        note(f"{name}: {kind}")
        where[name] = BAD_TENSORS[kind](where[name])
    elif how == "id" and case.ids is not None and case.others[case.ids].numel():
        ids = case.others[case.ids].long().contiguous()
        ids.view(-1)[draw(st.integers(0, ids.numel() - 1))] = draw(st.sampled_from((*BAD_IDS, case.vocab)))
        case.others[case.ids] = ids
    elif how == "option" and options:
        where, name = draw(st.sampled_from(options))
        where[name] = draw(st.sampled_from(BAD_OPTIONS))
    else:
        return case
    case.refusable = True
    return case


# ---------------------------------------------------------------------------------------------------------------------
# The property
# ---------------------------------------------------------------------------------------------------------------------


def upstream(outputs: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The sum of all that can be differentiated, weighted differently from element to element."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output is not None and output.requires_grad:
            weights = torch.linspace(0.5, 1.5, output.numel()).view(output.shape)
            total = total + (output * weights.to(output.dtype)).sum(dtype=torch.float64)
    return total


def answer(op: Op, case: Case, extra: dict[str, Any], dtype: torch.dtype | None = None) -> list[torch.Tensor | None]:
    """Outputs, and gradients of the tensors in `case.floats`; undifferentiated where they are no tensors."""
    leaves = [v.detach().requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
              for v in case.floats.values()]  # fmt: skip

    def call(*values: Any) -> Any:
        return op(**dict(zip(case.floats, values, strict=True)), **case.others, **case.options, **extra)

    return run(call, leaves, upstream, dtype)


def largest(values: Sequence[Any]) -> float:
    """The largest finite magnitude among tensors."""
    found = [
        t.nan_to_num(0, 0, 0).abs().max().item()
        for t in values
        if isinstance(t, torch.Tensor) and t.numel() and t.is_floating_point()
    ]
    return max(found, default=0.0)


def compare(
    ours: Sequence[Any], same: Sequence[Any], truth: Sequence[Any], moved: Callable[[], Sequence[Sequence[Any]]],
    n_grads: int, floor: float,
) -> None:  # fmt: skip
    """The rule of closeness, but for what is below `floor`: of a few numbers the reference's own error is a matter of
    luck, and none at all where a gradient cancels to zero (a vocabulary of one id, a norm over one column)."""
    assert len(ours) == len(same) == len(truth)
    for i, (a, r, t) in enumerate(zip(ours, same, truth, strict=True)):
        what = f"result {i} of {len(ours)}"
        if r is None or a is None:
            # A gradient that is zero everywhere may be absent.
            assert all(v is None or (i >= len(ours) - n_grads and not v.any()) for v in (a, r)), what
            continue
        if i >= len(ours) - n_grads:
            # Rows that do not count are never read, so their NaN stays out of a gradient that PyTorch multiplies by 0.
            a = torch.where(r.isfinite(), a, r)
        else:
            # An infinite logit makes a row infinite or NaN, as the order of its sums has it.
            assert not (r.isnan() & ~a.isnan()).any(), f"{what}: NaN in the reference alone"
        if a.shape == t.shape and a.dtype == r.dtype and a.is_floating_point():
            a = torch.where((a.double() - t).abs() <= floor, r, a)
        assert_as_close(a, r, t, what, lambda i=i: [values[i] for values in moved()])


def check(name: str, case: Case, backend: str) -> None:
    op, reference, _ = OPS[name]
    note(str(case))
    # Copies: an op may overwrite what it was given leave to.
    given_to_us = copy.deepcopy(case)
    with warnings.catch_warnings():
        # NumPy's, of which Triton's interpreter is made.
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        try:
            ours = answer(op, given_to_us, {**case.ours, "backend": backend})
        except (ValueError, TypeError) as error:
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        words = {*case.floats, *case.others, *case.options, *case.ours}
        words |= {field.name for field in dataclasses.fields(ops.GrpoOptions)}
        assert case.refusable, f"a good call was refused: {refusal}"
        assert words & set(re.findall(r"\w+", refusal)), f"names no argument: {refusal}"
        return
    n_grads = sum(isinstance(v, torch.Tensor) and v.is_floating_point() for v in case.floats.values())
    same, truth = answer(reference, case, {}), answer(reference, case, {}, torch.float64)
    moved = functools.cache(lambda: rounded(lambda: answer(reference, case, {})))
    floor = 4 * torch.finfo(torch.float32).eps * largest([*case.floats.values(), *truth])
    if case.options.get("activation") == "relu2":
        # PyTorch's ReLU hands a gate below 0 no gradient; here its slope of 0 is a factor, which leaves a NaN as it is.
        first = len(ours) - n_grads
        grads = zip(ours[first:], same[first:], strict=True)
        ours = [*ours[:first], *(a if a is None else a.masked_fill(a.isnan() & (r == 0), 0) for a, r in grads)]
    compare(ours, same, truth, moved, n_grads, floor)


@pytest.mark.parametrize("name", OPS)
def test_torch(name):
    @settings(FUZZ, max_examples=100)
    @given(spoiled(OPS[name][2]))
    def property_holds(case):
        check(name, case, "torch")

    property_holds()


@pytest.mark.parametrize("name", OPS)
def test_triton(name):
    @settings(FUZZ, max_examples=15)
    @given(spoiled(OPS[name][2]))
    def property_holds(case):
        check(name, case, "triton")

    property_holds()


# ---------------------------------------------------------------------------------------------------------------------
# Attention by segments, whose layout is no tensor and no option
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def segmented(draw) -> tuple[Layout, list[torch.Tensor], dict[str, Any]]:
    lengths = draw(st.lists(st.sampled_from((1, 2, 3, 5, 9)), min_size=1, max_size=5))
    layout = tree(*(draw(st.sampled_from((None, *range(i)))) for i in range(len(lengths))), lengths=tuple(lengths))
    dtype, size = draw(dtypes), draw(st.sampled_from((3, 8, 16)))
    # Of few heads the error of a sink's gradient, one number each, is a matter of luck.
    heads, shared = draw(st.sampled_from(((6, 6), (8, 2), (6, 1))))
    shapes = [[layout.n, heads, size], [layout.n, shared, size], [layout.n, shared, draw(st.sampled_from((size, 4)))]]
    given_tensors = [draw(tensors(shape, dtype, odd=False)) for shape in shapes]
    if draw(st.booleans()):
        given_tensors.append(draw(tensors([heads], dtype, odd=False)))
    return layout, [t.detach().requires_grad_() for t in given_tensors], {
        "scale": draw(st.sampled_from((None, 0.3))),
        "window": draw(st.sampled_from((None, 1, 2, 4, 100))),
        "softcap": draw(st.sampled_from((None, 1.5))),
    }  # fmt: skip


def test_attention_by_segments():
    @settings(FUZZ, max_examples=100)
    @given(segmented())
    def property_holds(case):
        layout, given_tensors, options = case
        check_attention(layout, given_tensors, **options)

    property_holds()
