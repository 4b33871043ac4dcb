"""The table of the Ascend gate: every op, with the options that change its kernels, at production shapes and dtypes.

A row of `TABLE` is an op with options, the sizes it is tested at, and a function that calls it forward and backward.
A `gate.GateCase` calls the same function twice: on `meta` tensors of the production shape, where the op's host code and
tiling choose the launches; and on CPU tensors with one core's share of the rows (for heads two rows of logits), where
the bytes moved are counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from .. import device
from ..descriptions import (
    GATE,
    GATE_DTYPES,
    GateEntry,
    GateTensors,
    ModelShapes,
    is_rotation,
    rope_of,
    rotation_entry,
)  # fmt: skip
from .gate import FewRows, GateCase, Minimum

__all__ = ["DTYPES", "HEAD_DIMS", "HIDDEN", "MINIMA", "ROWS", "TABLE", "VOCABULARIES", "GateEntry", "Tensors", "cases",
           "is_rotation", "model_cases", "rotation_entry"]  # fmt: skip

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
HIDDEN = (512, 896, 1024, 1536, 2048, 2560, 3584, 4096, 5120, 8192)
VOCABULARIES = (32000, 49152, 128256, 151936, 152064, 262144)
HEAD_DIMS = (64, 96, 128, 256)
NORMED_HEAD_DIMS = tuple(range(32, 257, 8))
# Sizes whose rows are computed in two halves, or in blocks.
WIDE = (6144, 7168, 12288, 16384)
ROWS = 4096
"""The number of tokens of a micro-batch."""
_BACKEND = "ascend-lowering"

# The limits allow for the bytes that kernels move in addition to rows: weights, each core's weight gradients, scalars
# per row; for experts also their biases.
_ROW_LIMIT = 1.05
_EXPERTS_LIMIT = 1.10
# The kernels of statistics and gradient together: 2.05 reads and 1 write of a row of logits.
_HEAD_LIMIT = 3.05 / 3


@dataclass(frozen=True)
class Tensors:
    """Creates an op's arguments on `meta` or on the CPU.

    Attributes:
        dtype: the dtype of floating-point tensors.
        where: the device, `"meta"` or `"cpu"`.
    """

    dtype: torch.dtype
    where: str

    def floats(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = True) -> torch.Tensor:
        """Returns a tensor of normally distributed numbers (on meta without values)."""
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.where)
        return (made if made.is_meta else made.normal_()).requires_grad_(grad)

    def ids(self, *shape: int, below: int) -> torch.Tensor:
        """Returns integers in [0, below), always the same, since the number of repetitions decides the traffic."""
        made = torch.zeros(shape, dtype=torch.int64, device=self.where)
        return made if made.is_meta else made.random_(0, below, generator=torch.Generator().manual_seed(0))

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize


# Calls an op with (tensors, rows, size); returns the minimum of bytes that each kernel must move, by kernel name.
Call = Callable[[Tensors, int, int], Mapping[str, int]]
# Returns for (size, bytes of an element, device) why the op does not serve calls of this size there, or None.
Unserved = Callable[[int, int, device.DeviceSpec], str | None]

    def run() -> None:
        entry.call(GateTensors(dtype, "cpu" if entry.reads_values else "meta"), entry.rows, size)

    def run_share() -> Mapping[str, int]:
        chip = device.spec(torch.device("cpu"))
        rows = entry.share or entry.rows // chip.vector_cores
        with device.use_spec(replace(chip, vector_cores=1)):
            return entry.call(GateTensors(dtype, "cpu"), rows, size)

    Attributes:
        op: the op's name, with the options in words.
        sizes: production values of the size that its kernels depend on.
        label: the name of that size, for example `"hidden"`.
        call: calls the op forward and backward.
        rows: the number of rows of the production shape.
        share: the number of rows of one core's share; None: `rows` divided by the chip's vector cores.
        dtypes: names of `DTYPES`.
        max_traffic: the maximum of bytes moved / minimum of bytes; None: the traffic is reported without a limit.
        reads_values: whether the op's host code reads masks: then launches are recorded on CPU tensors with few rows.
        follows_ids: whether the trip counts of its kernels' loops depend on ids, which a trace then needs.
        part: the fraction of a head that rotates; below 1 the entry is for models that rotate this fraction.
        unserved: the op's rule for the calls that it does not serve; None: it serves all.
    """

    def run_few() -> None:
        entry.call(GateTensors(dtype, "cpu" if entry.reads_values or entry.follows_ids else "meta"), few, size)

    def cases(self) -> Iterator[GateCase]:
        """Returns one case for each size and dtype."""
        for size in self.sizes:
            for name in self.dtypes:
                yield self._case(size, name)

    def _case(self, size: int, name: str) -> GateCase:
        dtype = DTYPES[name]

        def run() -> None:
            self.call(Tensors(dtype, "cpu" if self.reads_values else "meta"), self.rows, size)

        def run_share() -> Mapping[str, int]:
            chip = device.spec(torch.device("cpu"))
            rows = self.share or self.rows // chip.vector_cores
            with device.use_spec(replace(chip, vector_cores=1)):
                return self.call(Tensors(dtype, "cpu"), rows, size)

        # The number of rows must be a multiple of 16, as a micro-batch's is: the compiler specializes on that.
        few = 16 if self.share else self.rows // 32

        def run_few() -> None:
            self.call(Tensors(dtype, "cpu" if self.reads_values or self.follows_ids else "meta"), few, size)

        # fp16 moves as many bytes as bf16.
        measured = None if name == "fp16" else run_share
        minima = {kernel: minimum for (op, kernel), minimum in MINIMA.items() if op == self.op}
        unserved = None if self.unserved is None else partial(self.unserved, size, dtype.itemsize)
        return GateCase(self.op, f"{self.rows} x {size} ({self.label})", name, run, measured, self.max_traffic,
                    FewRows(run_few, few, few * size), minima, unserved)  # fmt: skip


def _backward(*outputs: torch.Tensor | None) -> None:
    """Runs backward with a contiguous gradient for each output, as the layers above an op produce them."""
    given = [output for output in outputs if output is not None]
    torch.autograd.backward(given, [torch.ones_like(output) for output in given])


# ---------------------------------------------------------------------------------------------------------------- norms
def _sums(hidden: int, itemsize: int, count: int = 1) -> dict[str, int]:
    """Returns the bytes of summing partial weight gradients (of one core, where traffic is measured) into `count`
    parameters' gradients."""
    return {"_sum_kernel": count * hidden * (4 + itemsize)}


def _rms_norm(**options: Any) -> Call:
    def call(t: Tensors, rows: int, hidden: int) -> Mapping[str, int]:
        weight = t.floats(hidden) if options.get("has_weight", True) else None
        given = {key: value for key, value in options.items() if key != "has_weight"}
        _backward(ops.rms_norm(t.floats(rows, hidden), weight, backend=_BACKEND, **given))
        row = rows * hidden * t.itemsize
        return {"_forward_kernel": 2 * row, "_backward_kernel": 3 * row, **_sums(hidden, t.itemsize)}

    return call


def _fp32_weight(t: Tensors, rows: int, hidden: int) -> Mapping[str, int]:
    """With Llama's casting an fp32 weight makes y and its gradient fp32."""
    _backward(ops.rms_norm(t.floats(rows, hidden), t.floats(hidden, dtype=torch.float32), backend=_BACKEND))
    elements = rows * hidden
    least = {"_forward_kernel": elements * (t.itemsize + 4), "_backward_kernel": elements * (2 * t.itemsize + 4)}
    return least | _sums(hidden, 4)


def _add_rms_norm(**options: Any) -> Call:
    def call(t: Tensors, rows: int, hidden: int) -> Mapping[str, int]:
        x, residual, weight = t.floats(rows, hidden), t.floats(rows, hidden), t.floats(hidden)
        outputs = ops.add_rms_norm(x, residual, weight, backend=_BACKEND, **options)
        _backward(*(outputs if isinstance(outputs, tuple) else (outputs,)))
        row = rows * hidden * t.itemsize
        # Forward of "pre" reads x and residual and writes y and S; backward reads S, dy and dS, and writes one gradient
        # for both inputs. "post" does not write S, and reads x and residual again instead.
        least = {"_forward_kernel": (3 if options.get("mode") == "post" else 4) * row, "_backward_kernel": 4 * row}
        return least | _sums(hidden, t.itemsize)

    return call


def _layer_norm(weighted: bool = True, biased: bool = True) -> Call:
    def call(t: Tensors, rows: int, hidden: int) -> Mapping[str, int]:
        weight = t.floats(hidden) if weighted else None
        bias = t.floats(hidden) if biased else None
        _backward(ops.layer_norm(t.floats(rows, hidden), weight, bias, backend=_BACKEND))
        row = rows * hidden * t.itemsize
        sums = _sums(hidden, t.itemsize, weighted + biased)
        return {"_forward_kernel": 2 * row, "_backward_kernel": 3 * row, **sums}

    return call


def _gated_rms_norm(**options: Any) -> Call:
    def call(t: Tensors, rows: int, hidden: int) -> Mapping[str, int]:
        x, gate, weight = t.floats(rows, hidden), t.floats(rows, hidden), t.floats(hidden)
        _backward(ops.gated_rms_norm(x, gate, weight, backend=_BACKEND, **options))
        row = rows * hidden * t.itemsize
        return {"_forward_kernel": 3 * row, "_backward_kernel": 5 * row, **_sums(hidden, t.itemsize)}

    return call


# ------------------------------------------------------------------------------------------ SwiGLU, rotation, embedding
_PROJECTED = 16


def _swiglu(strided: bool = False, **options: Any) -> Call:
    def call(t: Tensors, rows: int, size: int) -> Mapping[str, int]:
        gate, up = _gate_and_up(t, rows, size, **options)
        if strided:  # two views of one projection's output
            gate, up = t.floats(rows, 2 * size).chunk(2, -1)
        _backward(ops.swiglu(gate, up, backend=_BACKEND, **options))
        row = rows * size * t.itemsize
        return {"_forward_kernel": 3 * row, "_backward_kernel": 5 * row}

    return call


def _gate_and_up(
    t: Tensors, rows: int, size: int, joined: str | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (t.floats(rows, size), t.floats(rows, size)) if joined is None else (t.floats(rows, 2 * size), None)


def _swiglu_linear(**options: Any) -> Call:
    """Backward computes the product again, and overwrites its inputs with its results."""

    def call(t: Tensors, rows: int, size: int) -> Mapping[str, int]:
        # The gate examines only the activation's kernels, so the width of the projection does not matter.
        weight = t.floats(_PROJECTED, size)
        gate, up = _gate_and_up(t, rows, size, **options)
        _backward(ops.swiglu_linear(gate, up, weight, overwrite=True, backend=_BACKEND, **options))
        row = rows * size * t.itemsize
        return {"_forward_kernel": 3 * row, "_backward_kernel": 6 * row}

    return call


def _rope(part: float = 1.0, table: torch.dtype | None = None, **options: Any) -> Call:
    """Heads are views of the projection `[B, T, H D]`, as in models, transposed unless the heads' axis is 2; `part` of
    each rotates. `table`: the dtype of the tables, if it differs from the heads'."""

    def call(t: Tensors, rows: int, size: int) -> Mapping[str, int]:
        heads, kv_heads = 32, 8
        q, k = (t.floats(1, rows, n * size).view(1, rows, n, size) for n in (heads, kv_heads))
        if options.get("heads", 1) == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        kind = options.get("tables", "each")
        width = int(part * size) // (2 if kind == "pair" else 1)
        cos, sin = (t.floats(1, rows, width, dtype=table, grad=False) for _ in range(2))
        _backward(*ops.rope(q, k, cos, sin, backend=_BACKEND, **options))
        # Forward and backward each read and write every head of q and k, and read cos and sin once for all heads.
        read = width // 2 if kind == "first_half" else width
        return {"_rotate_kernel": 2 * rows * (2 * (heads + kv_heads) * size * t.itemsize + 2 * read * cos.itemsize)}

    return call


def _share(part: float) -> str:
    return {0.25: "a quarter", 0.5: "half", 0.75: "three quarters"}.get(part, f"{part:g} of a head")


def _rope_of(part: float, sizes: tuple[int, ...], form: str = "rope", **options: Any) -> GateEntry:
    rule = _rope_rule(part, options.get("pairs", "halves"))
    return GateEntry(f"{form}, {_share(part)}", sizes, "head", _rope(part, **options), part=part, unserved=rule)


def _rope_rule(part: float, pairs: str) -> Unserved:
    def unserved(size: int, itemsize: int, spec: device.DeviceSpec) -> str | None:
        half = int(part * size) // 2
        return tiling.rope_unserved(half, size - 2 * half, itemsize, pairs != "halves", spec)

    return unserved


_ONE_BY_ONE = {"halves": "", "interleaved": "by turns", "regrouped": "regrouped"}
_OF_TABLES = {"each": "", "pair": "tables of pairs", "first_half": "tables of which half is read"}


def rotation_entry(part: float, pairs: str, tables: str, casting: str) -> GateEntry:
    """Returns an entry without sizes for a model's rotation.

    Args:
        part: the fraction of a head that rotates.
        pairs, tables, casting: options of `ops.rope`.
    """
    words = (_ONE_BY_ONE[pairs], _OF_TABLES[tables])
    op = ", ".join(["rope", *filter(None, words), *([] if part == 1 else [_share(part)])])
    call = _rope(part, pairs=pairs, tables=tables, casting=casting)
    return GateEntry(op, (), "head", call, part=part, unserved=_rope_rule(part, pairs))


def _embedding(scale: float | None) -> Call:
    def call(t: Tensors, rows: int, hidden: int) -> Mapping[str, int]:
        vocabulary = 32000 if t.where == "meta" else 500
        ids = t.ids(rows, below=vocabulary)
        _backward(ops.embedding(ids, t.floats(vocabulary, hidden), scale=scale, backend=_BACKEND))
        row = hidden * t.itemsize
        distinct = rows if t.where == "meta" else ids.unique().numel()
        return {"_gather_kernel": 2 * rows * row, "_scatter_kernel": (rows + distinct) * row}

    return call


# ------------------------------------------------------------------------------------------------------------- experts
# The value of the size that an entry does not vary; rows of 512 are long compared with the scalars of each row.
_INNER, _HIDDEN = 64, 512


def _moe_experts(
    experts: int, slots: int, of_hidden: bool, biased: bool = False, own_gate: bool = False, **options: Any
) -> Call:
    """The entry's size is the hidden size, or the width of the gate; the other of the two is small, to keep the matrix
    products on the CPU small. With `own_gate` the gate is a function, for which the op computes one step at a time."""

    def call(t: Tensors, rows: int, size: int) -> Mapping[str, int]:
        # One core's rows belong to few experts.
        n = experts if t.where == "meta" else min(experts, 4)
        hidden, inner = (size, _INNER) if of_hidden else (_HIDDEN, size)
        parts = 2 if options.get("gated", True) else 1
        biases: dict[str, Any] = {}
        if biased:
            biases = {"gate_up_bias": t.floats(n, parts * inner), "down_bias": t.floats(n, hidden)}
        own: dict[str, Any] = {"gate": lambda h: h[:, :inner] * h[:, inner:]} if own_gate else {}
        ids = t.ids(rows, slots, below=n)
        _backward(ops.moe_experts(
            t.floats(rows, hidden), ids, t.floats(rows, slots, dtype=torch.float32),
            t.floats(n, parts * inner, hidden), t.floats(n, hidden, inner), backend=_BACKEND, **biases,
            **own, **options,
        ))  # fmt: skip
        moved, all_rows = (slots + 1) * rows * hidden * t.itemsize, rows * slots
        # `_clear_kernel` clears the gradients of experts without rows. These ids leave no expert without rows, so it
        # only reads where each expert's rows end.
        least = {"_clear_kernel": 2 * 2 * 4 * n, "_sums_kernel": 2 * moved}
        if own_gate:
            # There are no rows without an expert to clear either.
            tail = {"_clear_tail_kernel": 5 * 4}
            return (
                least
                | tail
                | {"_to_rows_kernel": moved, "_sums_backward_kernel": moved + all_rows * hidden * t.itemsize}
            )
        gate = all_rows * inner * t.itemsize
        if biased:
            least |= {"_expert_sums_kernel": parts * (gate + n * inner * t.itemsize)}
            # It also reads the product of routing weights and biases, in fp32.
            least["_sums_kernel"] += rows * hidden * 4
        # It gathers x, then the gradient, and x again.
        least |= {"_to_rows_kernel": 3 * moved}
        return least | {"_gate_kernel": (parts + 1) * gate, "_gate_backward_kernel": 2 * (parts + 1) * gate}

    return call


def _experts_of(
    name: str, experts: int, slots: int, hidden: int, inner: int, **options: Any
) -> tuple[GateEntry, GateEntry]:
    """Returns two entries for a model's experts: one for the kernels that move rows, one for the gate."""
    return (
        GateEntry(f"moe_experts, {name}, rows", (hidden,), "hidden", _moe_experts(experts, slots, True, **options),
              max_traffic=_EXPERTS_LIMIT, follows_ids=True),
        GateEntry(f"moe_experts, {name}, gate", (inner,), "intermediate",
                  _moe_experts(experts, slots, False, **options), max_traffic=_EXPERTS_LIMIT, follows_ids=True),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- LM head
# The kernels read logits, so the hidden size does not matter.
_HEAD_HIDDEN = 16


def _head_bytes(t: Tensors, rows: int, vocabulary: int) -> Mapping[str, int]:
    row = rows * vocabulary * t.itemsize
    return {"_row_statistics_kernel": row, "_row_gradient_kernel": 2 * row}


def _cross_entropy(has_weights: bool = False, **options: Any) -> Call:
    def call(t: Tensors, rows: int, vocabulary: int) -> Mapping[str, int]:
        x, weight = t.floats(rows, _HEAD_HIDDEN), t.floats(vocabulary, _HEAD_HIDDEN)
        class_weights = t.floats(vocabulary, dtype=torch.float32, grad=False) if has_weights else None
        everything = torch.arange(rows, device=t.where)  # without `rows` the op reads values, which meta lacks
        result = ops.fused_linear_cross_entropy(
            x, weight, t.ids(rows, below=vocabulary),
            rows=everything, class_weights=class_weights, backend=_BACKEND, **options,
        )  # fmt: skip
        _backward(result if isinstance(result, torch.Tensor) else result.loss)
        return _head_bytes(t, rows, vocabulary)

    return call


def _logprob(**options: Any) -> Call:
    def call(t: Tensors, rows: int, vocabulary: int) -> Mapping[str, int]:
        x, weight = t.floats(rows, _HEAD_HIDDEN), t.floats(vocabulary, _HEAD_HIDDEN)
        result = ops.linear_logprob(x, weight, t.ids(rows, below=vocabulary), backend=_BACKEND, **options)
        _backward(result.log_prob, result.entropy, result.mean_logit)
        return _head_bytes(t, rows, vocabulary)

    return call


def _grpo(fused: bool, **options: Any) -> Call:
    """With a KL term (`beta`), each token has all the numbers that the op takes."""

    def call(t: Tensors, rows: int, vocabulary: int) -> Mapping[str, int]:
        ids = t.ids(1, rows, below=vocabulary)
        numbers = ["old_log_prob", *(("ref_log_prob", "importance_ratio") if "beta" in options else ())]
        given: dict[str, Any] = {
            **{name: torch.zeros(1, rows) for name in numbers},
            "options": ops.GrpoOptions(**options),
            "temperature": 0.9,
            "entropy": True,
            "backend": _BACKEND,
        }
        if fused:
            x, weight = t.floats(1, rows, _HEAD_HIDDEN), t.floats(vocabulary, _HEAD_HIDDEN)
            result = ops.fused_linear_grpo_loss(x, weight, ids, torch.ones(1), **given)
        else:
            result = ops.grpo_loss(t.floats(1, rows, vocabulary), ids, torch.ones(1), **given)
        _backward(result.loss)
        # The kernel also reads each token's log_prob, advantage and weight, and writes its loss and gradient.
        return {**_head_bytes(t, rows, vocabulary), "_token_kernel": (len(numbers) + 5) * 4 * rows}

    return call


def _head(op: str, call: Call, max_traffic: float | None = _HEAD_LIMIT) -> GateEntry:
    return GateEntry(op, VOCABULARIES, "vocabulary", call, share=2, max_traffic=max_traffic)


def _head_of_values(op: str, call: Call, sizes: tuple[int, ...] = VOCABULARIES) -> GateEntry:
    return GateEntry(op, sizes, "vocabulary", call, 16, share=2, max_traffic=_HEAD_LIMIT, reads_values=True)


_EVERYTHING: dict[str, Any] = {
    "softcap": 30.0,
    "label_smoothing": 0.1,
    "z_loss": 1e-4,
    "outputs": ("token_accuracy", "predicted_ids"),
}

# Sizes: for gelu_tanh those of Gemma 3 1B, 4B and 27B; for each other activation one; 8192 for those added later.
_GATES: dict[str, tuple[int, ...]] = {"gelu_tanh": (6912, 10240, 21504), "gelu": (14336,), "relu2": (6912,)}
_GATES |= {name: (8192,) for name in ACTIVATIONS if name not in _GATES and name != "silu"}

_OTHER_HEAD_DIMS = tuple(size for size in range(32, 257, 8) if size not in HEAD_DIMS)

_GPT_OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}

_CORRECTED_KL: dict[str, Any] = {"beta": 0.1, "bias_corrected_kl": True}

TABLE: tuple[GateEntry, ...] = (
    GateEntry("rms_norm", HIDDEN, "hidden", _rms_norm()),
    GateEntry("rms_norm, gemma", HIDDEN, "hidden", _rms_norm(casting="gemma", offset=1.0)),
    GateEntry("rms_norm, none", HIDDEN, "hidden", _rms_norm(casting="none")),
    GateEntry("rms_norm, no weight", HIDDEN, "hidden", _rms_norm(has_weight=False)),
    GateEntry("rms_norm, fp32 weight", HIDDEN, "hidden", _fp32_weight, dtypes=("bf16",)),
    # Norms of queries and keys have many short rows.
    GateEntry("rms_norm, of heads", HEAD_DIMS, "head", _rms_norm(), rows=32 * ROWS),
    GateEntry("rms_norm, of heads of any size", NORMED_HEAD_DIMS, "head", _rms_norm(), rows=8 * ROWS, dtypes=("bf16",)),
    # Rows of an odd number of 32-byte units (fp32), or of no whole number of them (fp16).
    GateEntry("rms_norm, of heads of odd units", (72, 104), "head", _rms_norm(), rows=8 * ROWS,
              dtypes=("fp32", "fp16")),
    GateEntry("rms_norm, wide", WIDE, "hidden", _rms_norm(), dtypes=("bf16",)),
    GateEntry("add_rms_norm, pre, wide", WIDE[:2], "hidden", _add_rms_norm(), dtypes=("bf16",)),
    GateEntry("add_rms_norm, pre", HIDDEN, "hidden", _add_rms_norm()),
    GateEntry("add_rms_norm, pre, gemma", HIDDEN, "hidden", _add_rms_norm(casting="gemma", offset=1.0)),
    GateEntry("add_rms_norm, post", HIDDEN, "hidden", _add_rms_norm(mode="post")),
    GateEntry("add_rms_norm, post, gemma", HIDDEN, "hidden", _add_rms_norm(mode="post", casting="gemma", offset=1.0)),
    # Granite 4.
    GateEntry("add_rms_norm, pre, multiplier", (1536, 4096), "hidden", _add_rms_norm(multiplier=0.22)),
    # Cohere; GPT-2, StableLM, Starcoder2 and similar models; OLMo.
    GateEntry("layer_norm, no bias", (4096, 8192, 12288), "hidden", _layer_norm(biased=False)),
    GateEntry("layer_norm", (768, 1024, 2048, 4096, 6144), "hidden", _layer_norm()),
    GateEntry("layer_norm, no weight", (2048, 4096), "hidden", _layer_norm(weighted=False, biased=False)),
    # Per head: Qwen3-Next and Kimi-Linear. Gate first: Bamba, Granite 4 and Mamba 2. In groups: Nemotron-H.
    GateEntry("gated_rms_norm, of heads", (64, 128, 256), "head", _gated_rms_norm(), rows=32 * ROWS),
    GateEntry("gated_rms_norm, of heads, gemma, sigmoid", (128,), "head",
          _gated_rms_norm(casting="gemma", activation="sigmoid"), rows=32 * ROWS),
    GateEntry("gated_rms_norm, gate first", (3072, 4096, 8192), "hidden", _gated_rms_norm(order="gate_first")),
    GateEntry("gated_rms_norm, gate first, 8 groups", (8192,), "hidden",
          _gated_rms_norm(order="gate_first", groups=8)),
    GateEntry("swiglu", (4864, 8192, 14336, 18944), "intermediate", _swiglu()),
    # From the smallest size to the largest, a tile has several rows, one row, or a half to a quarter of a row.
    GateEntry("swiglu, halves of one projection", (1408, 2880, 4864, 8192, 11008, 14336, 18944), "intermediate",
          _swiglu(strided=True)),
    *(GateEntry(f"swiglu, {name}", sizes, "intermediate", _swiglu(activation=name)) for name, sizes in _GATES.items()),
    # GPT-OSS 20B; Phi-3 mini and GLM-4 9B.
    GateEntry("swiglu, alpha, limit, offset", (2880,), "intermediate", _swiglu(**_GPT_OSS)),
    GateEntry("swiglu, joined in halves", (8192, 13696), "intermediate", _swiglu(joined="halves")),
    GateEntry("swiglu, joined by turns", (8192,), "intermediate", _swiglu(joined="interleaved"),
          unserved=tiling.swiglu_unserved),
    GateEntry("swiglu, joined by turns, alpha, limit, offset", (2880,), "intermediate",
          _swiglu(joined="interleaved", **_GPT_OSS), unserved=tiling.swiglu_unserved),
    GateEntry("swiglu_linear", (4864, 8192, 14336, 18944), "intermediate", _swiglu_linear()),
    GateEntry("swiglu_linear, gelu_tanh", (6912, 10240, 21504), "intermediate", _swiglu_linear(activation="gelu_tanh")),
    GateEntry("swiglu_linear, gelu", (14336,), "intermediate", _swiglu_linear(activation="gelu")),
    GateEntry("swiglu_linear, joined in halves", (8192, 13696), "intermediate", _swiglu_linear(joined="halves")),
    GateEntry("swiglu_linear, joined by turns, alpha, limit, offset", (2880,), "intermediate",
          _swiglu_linear(joined="interleaved", **_GPT_OSS), unserved=tiling.swiglu_unserved),
    GateEntry("rope", HEAD_DIMS, "head", _rope()),
    # The halves of some of these heads are not a multiple of 32 bytes.
    GateEntry("rope, any head", _OTHER_HEAD_DIMS, "head", _rope(), share=64, dtypes=("bf16",)),
    # The vision encoders of Qwen3-VL and Qwen2.5-VL: the tokens' axis before the heads', fp32 tables with bf16 heads.
    GateEntry("rope, of images", (64, 72, 80), "head", _rope(table=torch.float32, casting="fp32", heads=2),
          dtypes=("bf16",)),
    # Pythia and Qwen3-Next; GLM-4.5; Phi-4 mini.
    _rope_of(0.25, (128, 256)),
    _rope_of(0.5, (64, 128, 256)),
    _rope_of(0.75, (128,)),
    # GPT-OSS; Cohere; GLM-4; Ernie 4.5; the rotating part of a head of DeepSeek-V3.
    GateEntry("rope, tables of pairs", (64, 128), "head", _rope(tables="pair")),
    GateEntry("rope, by turns", (64, 128, 256), "head", _rope(pairs="interleaved", casting="fp32")),
    _rope_of(0.5, (128,), "rope, by turns", pairs="interleaved", tables="first_half"),
    GateEntry("rope, by turns, tables of pairs", (64, 128), "head", _rope(pairs="interleaved", tables="first_half")),
    GateEntry("rope, regrouped", (64, 128), "head", _rope(pairs="regrouped", tables="first_half")),
    GateEntry("embedding", HIDDEN, "hidden", _embedding(None), follows_ids=True),
    GateEntry("embedding, scaled", HIDDEN, "hidden", _embedding(45.25), follows_ids=True),
    *_experts_of("Qwen3 30B", 128, 8, 2048, 768),
    *_experts_of("GPT-OSS 20B", 32, 4, 2880, 2880, biased=True, interleaved=True, **_GPT_OSS),
    # The experts of one device under expert parallelism.
    *_experts_of("DeepSeek-V3", 32, 8, 7168, 2048),
    *_experts_of("Mixtral", 8, 2, 4096, 14336),
    GateEntry("moe_experts, no gate", (1856,), "intermediate", _moe_experts(8, 2, False, gated=False, gate="relu2"),
          max_traffic=_EXPERTS_LIMIT, follows_ids=True),
    GateEntry("moe_experts, a gate of its own", (2048,), "hidden", _moe_experts(8, 2, True, own_gate=True),
          max_traffic=_EXPERTS_LIMIT, follows_ids=True),
    _head("linear_cross_entropy", _cross_entropy()),
    _head("linear_cross_entropy, softcap", _cross_entropy(softcap=30.0, logit_scale=0.5)),
    _head("linear_cross_entropy, label smoothing, z-loss", _cross_entropy(label_smoothing=0.1, z_loss=1e-4)),
    _head("linear_cross_entropy, accuracy", _cross_entropy(outputs=("token_accuracy",))),
    # A row of fp32 class weights is read with each row of logits. To gather only the weights that differ from 1, the
    # host would have to wait for their number.
    _head("linear_cross_entropy, class weights", _cross_entropy(True, label_smoothing=0.1), None),
    _head("linear_cross_entropy, everything", _cross_entropy(True, **_EVERYTHING), None),
    _head("linear_logprob", _logprob()),
    _head("linear_logprob, entropy", _logprob(temperature=0.7, outputs=("entropy",))),
    _head("linear_logprob, everything", _logprob(softcap=30.0, temperature=0.7, outputs=(
        "entropy", "is_top1", "mean_logit", "log_sum_sq_probs"))),
    _head_of_values("grpo_loss", _grpo(fused=False)),
    _head_of_values("grpo_loss, fused with the projection", _grpo(fused=True)),
    # These differ only in the arithmetic on each token's numbers, so one vocabulary is enough.
    _head_of_values("grpo_loss, fused, everything", _grpo(True, delta=2.0, **_CORRECTED_KL), VOCABULARIES[:1]),
    _head_of_values("grpo_loss, fused, cispo", _grpo(True, loss_type="cispo", **_CORRECTED_KL), VOCABULARIES[:1]),
    _head_of_values("grpo_loss, fused, sapo", _grpo(True, loss_type="sapo", **_CORRECTED_KL), VOCABULARIES[:1]),
)  # fmt: skip


# Vector instructions per element, counted by hand. For each logit the kernel converts it to fp32, updates the running
# maximum of its lane, subtracts the maximum, takes exp and adds to the sum; a softcap is
# 2 outer sigmoid(2 inner x) - outer.
_STATISTICS, _GRADIENT = "_row_statistics_kernel", "_row_gradient_kernel"
_SOFTCAP = "scale, exp, + 1, divide, - outer"
MINIMA: dict[tuple[str, str], Minimum] = {
    ("linear_cross_entropy", _STATISTICS): Minimum(5, "convert, maximum, subtract, exp, sum"),
    ("linear_cross_entropy, label smoothing, z-loss", _STATISTICS): Minimum(6, "plain, and the sum of logits"),
    ("linear_logprob, entropy", _STATISTICS): Minimum(8, "plain, scale by the temperature, p z and its sum"),
    ("linear_cross_entropy, accuracy", _STATISTICS): Minimum(8, "plain, compare, select a place, least place"),
    ("linear_cross_entropy, softcap", _STATISTICS): Minimum(10, f"plain and the softcap: {_SOFTCAP}"),
    ("linear_cross_entropy, softcap", _GRADIENT): Minimum(
        # With w = z + outer, which is there before outer is subtracted, 1 - (z / outer)^2 is w (2 outer - w) / outer^2.
        12,
        "convert, scale, exp, + 1, divide, subtract, exp, scale, times w (2 outer - w) (3), convert",
    ),
    ("linear_logprob, everything", _STATISTICS): Minimum(
        18, "softcap (10), p z and its sum, the sum of logits, p^2 and its sum, the maximum's place (3)"
    ),
    ("swiglu", "_backward_kernel"): Minimum(
        15,
        "3 in, 2 out to convert; a = g / (1 + exp(-g)) (4); du = dy a; dg = dy u (1 + (g - a)) / (1 + exp(-g)) (5)",
    ),
}
"""The minima, by the `op` of an entry and the name of a kernel."""


def is_rotation(entry: GateEntry) -> bool:
    """Whether an entry is for `ops.rope`."""
    return entry.op.partition(",")[0] == "rope"


def cases() -> list[GateCase]:
    """Returns all cases of the table."""
    return [case for entry in TABLE for case in entry.cases()]


def model_cases(shapes: ModelShapes, dtype: str, rotations: Sequence[Mapping[str, str]] = ()) -> list[GateCase]:
    """Returns the table's cases at a model's shapes instead of the table's, for compilation without traffic counts. It
    omits entries for sizes that the model does not have, and for other rotations than the model's.

    Args:
        shapes: the model's shapes.
        dtype: a key of `DTYPES`.
        rotations: the rotations in the model's code, each as options of `ops.rope` (`pairs`, `tables`, `casting`);
            empty: they are unknown, and the result has every rotation of whole heads or of the model's fraction.
    """
    sizes = {
        "hidden": shapes.hidden,
        "head": shapes.head_dim,
        "intermediate": shapes.intermediate,
        "vocabulary": shapes.vocabulary,
    }
    known = {entry.part for entry in GATE}
    if rotations:
        own = [rotation_entry(shapes.rotated, **form) for form in rotations]
        table = (*(entry for entry in GATE if not is_rotation(entry)), *own)
    else:
        table = GATE if shapes.rotated in known else (*GATE, rope_of(shapes.rotated, ()))
    entries = (e for e in table if dtype in e.dtypes and sizes[e.label] and e.part in (1.0, shapes.rotated))
    fitted = (replace(e, sizes=(sizes[e.label],), dtypes=(dtype,)) for e in entries)
    return [replace(case, run_small=None, few=None) for entry in fitted for case in cases_of(entry)]
