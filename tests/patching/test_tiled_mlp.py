"""Gated MLPs over slices of the sequence: the same loss and gradients, one slice's memory, and what is refused."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_trainer_kernels import NpuKernelsArguments, NpuKernelsCallback, apply_npu_kernels
from npu_trainer_kernels.ops.slices import in_slices
from npu_trainer_kernels.patching.modules import mlps
from tests.closeness import assert_as_close, rounded
from tests.models import assert_outcome_close, batch, in_double, loss_and_gradients, small_model

# Of 34 tokens, seven slices.
TOKENS = 5


def checkpointed(model: Any, reentrant: bool | None) -> Any:
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def sliced(handle: Any) -> tuple[int, dict[str, int]]:
    """How many calls ran in slices, and why others did not."""
    found = [site.progress for site in handle.report().sites if site.op == "swiglu"]
    whole = {reason: calls for each in found for reason, calls in each.whole.items()}
    return sum(each.ran for each in found), whole


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "phi3"])
def test_loss_and_gradients_are_the_models_own(family, reentrant):
    inputs, model = batch(), small_model(family)
    names = ["loss", *(n for n, _ in model.named_parameters())]

    def values(of: nn.Module) -> dict[str, torch.Tensor]:
        return dict(zip(names, loss_and_gradients(of, inputs), strict=True))

    with in_double():
        truth = values(small_model(family).double())
    checkpointed(model, reentrant)
    expected, moved = values(model), rounded(lambda: values(model))
    with apply_npu_kernels(model, tiled_mlp=TOKENS) as kernels:
        patched = values(model)
        # A reentrant checkpoint runs its layers twice; the other one stops before an MLP that nothing is saved after.
        again = {None: 0, False: 2 if family == "gemma2" else 0, True: 2}[reentrant]
        assert sliced(kernels) == (2 + again, {})
        assert f"{2 + again} of them in slices of {TOKENS} tokens" in kernels.report().text()
    for name in names:
        assert_as_close(patched[name], expected[name], truth[name], f"{family} {name}", [m[name] for m in moved])


@pytest.mark.parametrize("reentrant", [None, False])
def test_left_padding(reentrant, monkeypatch):
    """The body is handed one row of live tokens; slices are of those."""
    inputs: dict[str, Any] = batch(rows=4, ignored=13)
    mask = torch.ones_like(inputs["input_ids"])
    for row, padding in enumerate((0, 3, 9, 12)):
        mask[row, :padding] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    inputs = {**inputs, "use_cache": False, "attention_mask": mask, "labels": labels}
    model, plain = (checkpointed(small_model("llama"), reentrant) for _ in range(2))
    expected = loss_and_gradients(plain, inputs)
    truth = loss_and_gradients(checkpointed(small_model("llama").double(), reentrant), inputs)
    lengths: list[int] = []
    original = mlps.swiglu_linear

    def swiglu_linear(gate: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lengths.append(gate.shape[0])
        return original(gate, *args, **kwargs)

    # A hook would see rows, and the body would leave padding in.
    monkeypatch.setattr(mlps, "swiglu_linear", swiglu_linear)
    with apply_npu_kernels(model, tiled_mlp=16) as kernels:
        found = loss_and_gradients(model, inputs)
        assert sliced(kernels) == (2, {})
        assert kernels.report().ran["varlen_attention"] == 1
    # 44 live tokens of 68, in two layers, forward and backward.
    assert lengths == [15, 15, 14] * 4
    assert_outcome_close(model, found, expected, truth, lambda: loss_and_gradients(plain, inputs))


def lora(dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj", "q_proj"], r=3, lora_dropout=dropout,
                        init_lora_weights=False)  # fmt: skip
    model = get_peft_model(small_model("llama"), config)
    # A reentrant checkpoint of older transformers needs an input with a gradient.
    model.enable_input_require_grads()
    return model


def trained_values(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("reentrant", [None, False])
def test_adapters(reentrant):
    model = checkpointed(lora(), reentrant)
    expected = trained_values(model, batch())
    moved = rounded(lambda: trained_values(model, batch()))
    truth = trained_values(checkpointed(lora().double(), reentrant), batch())
    with apply_npu_kernels(model, tiled_mlp=TOKENS) as kernels:
        found = trained_values(model, batch())
        assert sliced(kernels)[0] == 2
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_as_close(value, expected[name], truth[name], name, [m[name] for m in moved])


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_dropout_of_adapters_is_drawn_again_as_it_was(reentrant):
    """Beside the same slices by hand, which autograd keeps."""

    def by_hand(mlp: nn.Module) -> None:
        forward = mlp.forward
        mlp.forward = lambda x: torch.cat([forward(x.flatten(0, 1)[i : i + 5]) for i in range(0, 34, 5)]).view(x.shape)

    runs = []
    for tiled in (False, True):
        model = checkpointed(lora(dropout=0.5), reentrant)
        if not tiled:
            for layer in model.base_model.model.model.layers:
                by_hand(layer.mlp)
        else:
            apply_npu_kernels(model, ops=["swiglu"], tiled_mlp=TOKENS)
        torch.manual_seed(3)
        runs.append(trained_values(model, batch()))
        runs[-1]["next number"] = torch.rand(1)
    torch.testing.assert_close(runs[1], runs[0])


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_autocast(reentrant):
    def step(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch()).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    model, plain = small_model("llama"), small_model("llama")
    truth = loss_and_gradients(small_model("llama").double(), batch())
    expected = step(checkpointed(model, reentrant))
    dtypes: list[torch.dtype] = []
    layer: Any = model.model.layers[0]
    with apply_npu_kernels(model, ops=["swiglu"], tiled_mlp=TOKENS) as kernels:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        found = step(model)
        assert sliced(kernels)[0] > 0
    # Forward, backward, and a reentrant checkpoint's own.
    assert dtypes == [torch.bfloat16] * 7 * (3 if reentrant else 2)
    assert_outcome_close(model, found, expected, truth, lambda: step(plain))


def test_a_weight_that_autocast_has_cast_in_slices_keeps_its_gradient_elsewhere():
    """In one autocast a call in slices, and one that is too short for that."""
    mlp = small_model("llama").model.layers[0].mlp
    long, short = torch.randn(34, 48), torch.randn(3, 48)

    def gradients() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            total = mlp(long).float().sum() + mlp(short).float().sum()
        return list(torch.autograd.grad(total, list(mlp.parameters())))

    expected = gradients()
    with apply_npu_kernels(mlp, ops=["swiglu"], tiled_mlp=TOKENS):
        for found, wanted in zip(gradients(), expected, strict=True):
            assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("frozen", ["input", "weights", "one weight"])
def test_what_is_frozen(frozen):
    mlp = small_model("llama").model.layers[0].mlp
    x = torch.randn(34, 48, requires_grad=frozen != "input")
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(frozen == "input" or (frozen == "one weight" and "up" not in name))
    wanted = [t for t in (x, *mlp.parameters()) if t.requires_grad]
    upstream = torch.randn(34, 48)
    expected = torch.autograd.grad(mlp(x), wanted, upstream)
    with apply_npu_kernels(mlp, tiled_mlp=TOKENS) as kernels:
        out = mlp(x)
        twice = [torch.autograd.grad(out, wanted, upstream, retain_graph=keep) for keep in (True, False)]
        assert sliced(kernels)[0] == 1
    for found in twice:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_over_slices_rounds_once(dtype):
    """Thirty-two slices err no more than one: a sum in the weights' own dtype does."""
    torch.manual_seed(0)
    mlp = small_model("llama").model.layers[0].mlp
    x, upstream = torch.randn(1024, 48), 1 + torch.randn(1024, 48)

    def errors(tokens: int) -> list[float]:
        of = type(mlp)(small_model("llama").config).to(dtype)
        of.load_state_dict(mlp.state_dict())
        exact = type(mlp)(small_model("llama").config).double()
        exact.load_state_dict(of.state_dict())
        exact(x.to(dtype).double()).backward(upstream.to(dtype).double())
        with apply_npu_kernels(of, tiled_mlp=tokens) as kernels:
            of(x.to(dtype)).backward(upstream.to(dtype))
            assert sliced(kernels)[0] == (tokens < 1024)
        pairs = zip(of.parameters(), exact.parameters(), strict=True)
        return [((p.grad.double() - e.grad).norm() / e.grad.norm()).item() for p, e in pairs]

    for many, one in zip(errors(32), errors(1024), strict=True):
        assert many <= 1.2 * one


def test_parameters_that_share_a_gradient():
    a, b, x = (torch.randn(*shape, requires_grad=True) for shape in ((7, 5), (7, 5), (12, 5)))

    def product(rows: torch.Tensor) -> torch.Tensor:
        return rows @ (a + b).t()

    expected = torch.autograd.grad(product(x).square().sum(), (x, a, b))
    out = in_slices(product, x, lambda: [a, b], tokens=4, width=7, draws=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (x, a, b)), expected)


def test_parameters_that_are_exchanged_before_backward():
    """As `torch.func.functional_call` does where backward comes after it."""
    mlp = small_model("llama").model.layers[0].mlp
    with apply_npu_kernels(mlp, tiled_mlp=TOKENS):
        others = {name: p.detach().clone().requires_grad_() for name, p in mlp.named_parameters()}
        out = torch.func.functional_call(mlp, others, torch.randn(34, 48))
        with pytest.raises(RuntimeError, match=r"\(tiled_mlp\) were exchanged between forward and backward"):
            out.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# What it saves, and what it costs
# ---------------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made under it and live, and the most that ever did."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.known |= {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out


def most_beside_input_and_output(mlp: nn.Module, rows: int) -> int:
    """Forward and backward; input, output and their gradients are tensors of H."""
    x, upstream = torch.randn(rows, 48, requires_grad=True), torch.randn(rows, 48)
    mlp.zero_grad()
    gc.collect()
    with LiveBytes() as live:
        mlp(x).backward(upstream)
    # The output and the gradient of x were made under it, too.
    return live.most - 2 * rows * 48 * 4


def test_memory_does_not_grow_with_the_sequence():
    mlp = small_model("llama", intermediate_size=320).model.layers[0].mlp
    plain = [most_beside_input_and_output(mlp, rows) for rows in (256, 1024)]
    with apply_npu_kernels(mlp, ops=["swiglu"], backend="torch", tiled_mlp=64):
        tiled = [most_beside_input_and_output(mlp, rows) for rows in (256, 1024)]
    assert tiled[0] == tiled[1]
    assert plain[1] - plain[0] > 3 * 768 * 320 * 4
    # A slice's gate, up and product with what backward needs beside them, the sums and one slice's shares.
    weights = 3 * 48 * 320 * 4
    assert tiled[1] < 8 * 64 * 320 * 4 + 3 * weights


def products(model: Any, reentrant: bool | None, tiled: int) -> int:
    """How many tokens go through the last projection of the first layer's MLP in one step."""
    seen: list[int] = []
    model = checkpointed(model, reentrant)
    layer: Any = model.model.layers[0]

    def count(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        seen.append(args[0].numel() // args[0].shape[-1])

    with apply_npu_kernels(model, ops=["swiglu"], tiled_mlp=tiled):
        hook = layer.mlp.down_proj.register_forward_pre_hook(count)
        loss_and_gradients(model, batch())
        hook.remove()
    return sum(seen) // 34


@pytest.mark.parametrize(
    ("family", "reentrant", "plain", "ours"),
    [("llama", None, 1, 2), ("llama", False, 2, 2), ("llama", True, 2, 3), ("gemma2", False, 2, 3)],
)
def test_how_often_an_mlp_runs(family, reentrant, plain, ours):
    """Within a checkpoint that stops early, as often as without slices, where the layer saves nothing after it."""
    assert products(small_model(family), reentrant, 0) == plain
    assert products(small_model(family), reentrant, TOKENS) == ours


def test_slices_are_few_and_of_about_one_length():
    mlp = small_model("llama").model.layers[0].mlp
    seen: list[int] = []
    with apply_npu_kernels(mlp, ops=["swiglu"], tiled_mlp=16), torch.no_grad():
        mlp.gate_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
        for rows in (0, 1, 16, 17, 33, 48):
            assert mlp(torch.randn(rows, 48)).shape == (rows, 48)
    assert seen == [0, 1, 16, 9, 8, 11, 11, 11, 16, 16, 16]


# ---------------------------------------------------------------------------------------------------------------------
# Asked for, told of, taken back
# ---------------------------------------------------------------------------------------------------------------------


def test_restore():
    model = small_model("llama")
    before = [type(module) for module in model.modules()]
    handle = apply_npu_kernels(model, tiled_mlp=TOKENS)
    loss_and_gradients(model, batch())
    handle.restore()
    assert [type(module) for module in model.modules()] == before
    ran = sliced(handle)
    loss_and_gradients(model, batch())
    assert sliced(handle) == ran == (2, {})


def test_report_before_and_without():
    model = small_model("llama")
    with apply_npu_kernels(model, tiled_mlp=64) as kernels:
        assert "2 LlamaMLP; longer ones than 64 tokens in slices" in kernels.report().text()
        loss_and_gradients(model, batch())
        assert sliced(kernels) == (0, {})
    with apply_npu_kernels(model) as kernels:
        assert "slices" not in kernels.report().text(full=True)


class Widening(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).double()


@pytest.mark.parametrize(("family", "served"), [("llama", True), ("qwen3-moe", False)])
def test_a_model_without_a_gated_mlp_is_named(family, served):
    with apply_npu_kernels(small_model(family), tiled_mlp=TOKENS) as kernels:
        notes = kernels.report().notes
    assert notes == ([] if served else ["tiled_mlp=5 does nothing: swiglu serves no module of this model"])


def test_what_returns_another_dtype_runs_whole():
    mlp = small_model("llama").model.layers[0].mlp
    mlp.down_proj.__class__ = Widening
    x = torch.randn(34, 48)
    expected = mlp(x)
    with apply_npu_kernels(mlp, tiled_mlp=TOKENS) as kernels:
        found = mlp(x)
        assert sliced(kernels) == (0, {"its projections return another dtype": 1})
        assert "1 not: its projections return another dtype" in kernels.report().text()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)


def test_a_projection_without_a_parameter_runs_whole():
    """As FSDP's first version leaves it: what is trained is not the module's."""
    mlp = small_model("llama").model.layers[0].mlp
    x = torch.randn(34, 48)
    with apply_npu_kernels(mlp, tiled_mlp=TOKENS) as kernels:
        weight = mlp.up_proj.weight
        del mlp.up_proj.weight
        mlp.up_proj.weight = weight.view(weight.shape)
        (gradient,) = torch.autograd.grad(mlp(x).sum(), [weight])
        assert sliced(kernels) == (0, {"its up_proj has no parameter of its own": 1})
    assert gradient.norm() > 0


def test_projections_that_are_gathered_one_by_one_run_whole():
    """As DeepSpeed's ZeRO-3 does it: around its own forward alone a projection has its weight."""
    mlp = small_model("llama").model.layers[0].mlp
    x = torch.randn(34, 48)
    with torch.no_grad():
        expected = mlp(x)
    for name in ("gate_proj", "up_proj", "down_proj"):
        projection: Any = mlp.get_submodule(name)
        whole, projection.weight.ds_id = projection.weight.data, name

        def gathers(module: Any, args: Any, whole: torch.Tensor = whole) -> None:
            module.weight.data = whole

        def releases(module: Any, args: Any, out: Any) -> None:
            module.weight.data = torch.empty(0)

        projection.register_forward_pre_hook(gathers)
        projection.register_forward_hook(releases)
        projection.weight.data = torch.empty(0)
    with apply_npu_kernels(mlp, tiled_mlp=TOKENS) as kernels, torch.no_grad():
        found = mlp(x)
        assert sliced(kernels) == (0, {"DeepSpeed gathers its projections one by one": 1})
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", [-1, 8.0, "8192", True, None])
def test_nonsense_is_refused(wrong):
    model = small_model("llama")
    with pytest.raises(ValueError, match=r"^tiled_mlp must be a number of tokens, or 0 for all at once; got "):
        apply_npu_kernels(model, tiled_mlp=wrong)
    with pytest.raises(ValueError, match="tiled_mlp must be a number of tokens"):
        NpuKernelsCallback(tiled_mlp=wrong)
    with pytest.raises(ValueError, match="npu_kernels_tiled_mlp must be a number of tokens"):
        NpuKernelsArguments(use_npu_kernels=True, npu_kernels_tiled_mlp=wrong)


def test_it_goes_with_its_op_and_with_the_flag():
    model = small_model("llama")
    with pytest.raises(ValueError, match=r"tiled_mlp=8 needs swiglu among ops; got \['rms_norm'\]"):
        apply_npu_kernels(model, ops=["rms_norm"], tiled_mlp=8)
    with pytest.raises(ValueError, match="needs swiglu among ops"):
        NpuKernelsCallback(ops=["rms_norm"], tiled_mlp=8)
    with pytest.raises(ValueError, match="npu_kernels_tiled_mlp does nothing without --use_npu_kernels"):
        NpuKernelsArguments(npu_kernels_tiled_mlp=8)
    with apply_npu_kernels(model, tiled_mlp=8), pytest.raises(ValueError, match=r"patched already .*tiled_mlp=8"):
        apply_npu_kernels(model)


def test_from_flag_and_environment(monkeypatch):
    (callback,) = NpuKernelsArguments(use_npu_kernels=True, npu_kernels_tiled_mlp=8).callbacks()
    model = small_model("llama")
    callback._apply(model)
    assert "longer ones than 8 tokens" in callback.report().text()
    callback.restore()
    monkeypatch.setenv("NPU_KERNELS_TILED_MLP", "4096")
    assert NpuKernelsArguments.from_environment().npu_kernels_tiled_mlp == 4096
    monkeypatch.setenv("NPU_KERNELS_TILED_MLP", "many")
    with pytest.raises(ValueError, match=r"npu_kernels_tiled_mlp must be a number of tokens.*got 'many'"):
        NpuKernelsArguments.from_environment()
