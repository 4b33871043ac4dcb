"""A kernel that fails hands its op to torch, once and loudly; under `strict` it raises."""

from importlib import import_module

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from npu_trainer_kernels import KernelError, NpuKernelsArguments, apply_npu_kernels, backends, ops
from npu_trainer_kernels.device import is_out_of_memory
from npu_trainer_kernels.ops import fallback
from npu_trainer_kernels.ops.fallback import falls_back
from npu_trainer_kernels.ops.head import divergence, gradient, grpo_formula, statistics
from npu_trainer_kernels.ops.launch import launch
from npu_trainer_kernels.ops.norms import general_kernels, rms_kernels


def _norm_case(device, backend):
    x, r, w = (torch.randn(s, device=device, requires_grad=True) for s in ((5, 24), (5, 24), (24,)))
    y, s = ops.add_rms_norm(x, r, w, backend=backend)
    return (y * s).sum(), (x, r, w)


def _general_norm_case(device, backend):
    x, gate, w = (torch.randn(s, device=device, requires_grad=True) for s in ((5, 24), (5, 24), (24,)))
    return ops.gated_rms_norm(x, gate, w, backend=backend).square().sum(), (x, gate, w)


def _embedding_case(device, backend):
    w = torch.randn(7, 24, device=device, requires_grad=True)
    return ops.embedding(torch.tensor([[0, 6, 6]], device=device), w, backend=backend).square().sum(), (w,)


def _swiglu_case(device, backend):
    gate, up = (torch.randn(5, 24, device=device, requires_grad=True) for _ in range(2))
    return ops.swiglu(gate, up, backend=backend).square().sum(), (gate, up)


def _rope_case(device, backend):
    q, k = (torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(2))
    cos, sin = torch.randn(2, 1, 5, 8, device=device)
    a, b = ops.rope(q, k, cos, sin, backend=backend)
    return (a * b).sum(), (q, k)


def _head_case(device, backend):
    x, w = torch.randn(6, 8, device=device, requires_grad=True), torch.randn(40, 8, device=device, requires_grad=True)
    ids = torch.arange(6, device=device)
    log_prob, entropy = ops.linear_logprob(x, w, ids, outputs=["entropy"], backend=backend)[:2]
    return (log_prob * entropy).sum(), (x, w)


def _divergence_case(device, backend):
    x, w = torch.randn(6, 8, device=device, requires_grad=True), torch.randn(40, 8, device=device, requires_grad=True)
    return ops.linear_divergence(x, w, x.detach().flip(0), w.detach(), beta=0.5, backend=backend), (x, w)


def _grpo_case(device, backend):
    x, w = (torch.randn(s, device=device, requires_grad=True) for s in ((1, 6, 8), (40, 8)))
    ids, advantages = torch.arange(6, device=device).unsqueeze(0), torch.ones(1, device=device)
    return ops.fused_linear_grpo_loss(x, w, ids, advantages, backend=backend).loss, (x, w)


# The package's names for these are the functions.
embedding, rope, swiglu = (import_module(f"npu_trainer_kernels.ops.{n}") for n in ("embedding", "rope", "swiglu"))
CASES = {
    "norm forward": (rms_kernels, "_forward_kernel", _norm_case, "add_rms_norm"),
    "norm backward": (rms_kernels, "_backward_kernel", _norm_case, "add_rms_norm"),
    "general norm forward": (general_kernels, "_forward_kernel", _general_norm_case, "gated_rms_norm"),
    "general norm backward": (general_kernels, "_backward_kernel", _general_norm_case, "gated_rms_norm"),
    "embedding forward": (embedding, "_gather_kernel", _embedding_case, "embedding"),
    "swiglu forward": (swiglu, "_forward_kernel", _swiglu_case, "swiglu"),
    "swiglu backward": (swiglu, "_backward_kernel", _swiglu_case, "swiglu"),
    "rope": (rope, "_rotate_pair_kernel", _rope_case, "rope"),
    "head statistics": (statistics, "_row_statistics_kernel", _head_case, "linear_logprob"),
    "head gradient": (gradient, "_row_gradient_kernel", _head_case, "linear_logprob"),
    "divergence": (divergence, "_row_divergence_kernel", _divergence_case, "linear_divergence"),
    "arithmetic of grpo_loss": (grpo_formula, "_token_kernel", _grpo_case, "grpo_loss"),
}


class Broken:
    """A kernel whose compiler refuses it."""

    __name__ = "broken"

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        def launch(*args, **constexprs):
            self.launches += 1
            raise ValueError("the buffer overflows")

        return launch


@pytest.fixture(autouse=True)
def _lenient(monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_STRICT", "0")
    yield
    backends.forget_failures()


def broken(monkeypatch, device, name):
    module, kernel, case, op = CASES[name]
    if kernel == "_rotate_pair_kernel" and device.type != "cuda":
        kernel = "_rotate_kernel"
    bad = Broken()
    monkeypatch.setattr(module, kernel, bad)
    return bad, case, op


def outcome(case, device, backend):
    torch.manual_seed(0)
    value, leaves = case(device, backend)
    return value, *torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("name", CASES)
def test_torch_takes_over_once(monkeypatch, device, name):
    bad, case, op = broken(monkeypatch, device, name)
    expected = outcome(case, device, "torch")
    with pytest.warns(RuntimeWarning, match=f"{op}.*torch takes over.*the buffer overflows") as warned:
        first = outcome(case, device, "triton")
    second = outcome(case, device, "triton")
    # Triton's interpreter warns of its own use of numpy.
    assert sum(issubclass(each.category, RuntimeWarning) for each in warned) == bad.launches == 1
    # The steps before the failure may have run in Triton.
    torch.testing.assert_close(first, expected)
    assert all(torch.equal(a, b) for a, b in zip(second, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_strict_raises(monkeypatch, device, name):
    bad, case, _ = broken(monkeypatch, device, name)
    monkeypatch.setenv("NPU_KERNELS_STRICT", "1")
    with pytest.raises(
        KernelError, match=r"kernel broken\(.*float32\[.* over grid \(.*ValueError: the buffer overflows"
    ):
        outcome(case, device, "triton")
    assert bad.launches == 1
    assert not backends.failures()


def test_the_choice_and_its_reason_follow(monkeypatch, device):
    _, case, _ = broken(monkeypatch, device, "norm forward")
    with pytest.warns(RuntimeWarning):
        outcome(case, device, "triton")
    for op in ("rms_norm", "add_rms_norm"):
        assert backends.choose(op, device, "triton") == "torch"
        assert "the buffer overflows" in backends.explain(op, device)[1]
    assert backends.choose("swiglu", device, "triton") == "triton"


def test_an_error_of_another_kind_is_not_caught(monkeypatch, device):
    def step(x, backend):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        falls_back("swiglu")(step)(torch.ones(1, device=device), "triton")


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity)"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("EL0004: Failed to allocate memory. Possible Cause: Available memory is insufficient."),
    RuntimeError("NPU function error: aclrtMalloc, error code is 207001"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
@pytest.mark.parametrize("backend", ["vendor", "triton"])
def test_memory_that_has_run_out_is_no_fault_of_a_kernel(monkeypatch, device, backend, error):
    """A smaller batch comes next, and is the kernel's again."""
    left = [error]

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid):
            def run(*args):
                if left:
                    raise left.pop()

            return run

    @falls_back("swiglu")
    def step(x, backend):
        if backend == "triton":
            launch(Kernel(), (1,), (x,), {})
        elif backend == "vendor":
            Kernel()[(1,)](x)
        return backend

    with pytest.raises(RuntimeError) as caught:
        step(torch.ones(1, device=device), backend)
    assert str(error) in str(caught.value)
    # Of a launch it has PyTorch's type, by which those who make do with less know it.
    assert backend == "vendor" or isinstance(caught.value, torch.OutOfMemoryError)
    assert backends.failures() == {}
    assert step(torch.ones(1, device=device), backend) == backend


# torch_npu 2.13's words where a task of its queue has failed.
OF_THE_QUEUE = (
    "The Inner error is reported as above. The process exits for this inner error, and the current working operator "
    "name is aclnnMatmul.\nSince the operator is called asynchronously, the stacktrace may be inaccurate."
)


@pytest.mark.parametrize("backend", ["vendor", "triton"])
def test_an_earlier_operators_failure_retires_no_kernel_and_says_how_to_find_it(device, backend):
    """A later call raises it. torch must not go on with what the operator has not written."""

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid):
            def run(*args):
                raise RuntimeError(OF_THE_QUEUE)

            return run

    @falls_back("swiglu")
    def step(x, backend):
        if backend == "triton":
            launch(Kernel(), (1,), (x,), {})
        elif backend == "vendor":
            Kernel()[(1,)](x)
        return backend

    with pytest.raises(RuntimeError) as caught:
        step(torch.ones(1, device=device), backend)
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == OF_THE_QUEUE
    (note,) = caught.value.__notes__
    assert "ASCEND_LAUNCH_BLOCKING=1" in note
    assert backends.failures() == {}


@pytest.mark.parametrize("text", ["the buffer overflows", "out of resource: shared memory, Required: 300000"])
def test_a_kernel_that_wants_too_much_of_the_chip_is_at_fault(text):
    assert not is_out_of_memory(KernelError(text))
    assert not is_out_of_memory(KernelError("kernel k(float32[207001, 64]) over grid (1,)"))


def _model():
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def test_report_names_it(monkeypatch, device):
    monkeypatch.setattr(rms_kernels, "_forward_kernel", Broken())
    model = _model().to(device)
    with apply_npu_kernels(model, backend="rms_norm=triton,add_rms_norm=triton") as handle:
        with pytest.warns(RuntimeWarning):
            model(input_ids=torch.zeros(1, 3, dtype=torch.int64, device=device))
        assert any("rms_norm runs in torch" in n and "the buffer overflows" in n for n in handle.report().notes)


def test_each_model_has_its_own_strict(monkeypatch, device):
    """What one of them asked for is nothing to the other, also after the kernel has failed for that one."""
    monkeypatch.setenv("NPU_KERNELS_STRICT", "0")
    monkeypatch.setattr(rms_kernels, "_forward_kernel", Broken())
    ids = torch.zeros(1, 3, dtype=torch.int64, device=device)
    lenient, strict = _model().to(device), _model().to(device)
    override = "rms_norm=triton,add_rms_norm=triton"
    with apply_npu_kernels(lenient, backend=override), apply_npu_kernels(strict, backend=override, strict=True):
        with pytest.warns(RuntimeWarning, match="torch takes over"):
            lenient(input_ids=ids)
        with pytest.raises(KernelError, match="the buffer overflows"):
            strict(input_ids=ids)
        lenient(input_ids=ids)
    with apply_npu_kernels(strict, backend=override):
        strict(input_ids=ids)
    with apply_npu_kernels(lenient), pytest.raises(ValueError, match="strict=False"):
        apply_npu_kernels(lenient, strict=True)


def test_strict_by_argument():
    (callback,) = NpuKernelsArguments(use_npu_kernels=True, npu_kernels_strict=True).callbacks()
    assert callback._strict
    with pytest.raises(ValueError, match="npu_kernels_strict"):
        NpuKernelsArguments(npu_kernels_strict=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_debug_finds_a_number_that_is_not_finite(monkeypatch, device, in_place):
    monkeypatch.setattr(fallback, "debug", lambda: True)

    @falls_back("swiglu")
    def halve(x, ok, backend):
        y = x if in_place else x.clone()
        y.mul_(0.5 if ok or backend == "torch" else float("nan"))
        return None if in_place else y

    halve(torch.ones(3, device=device), True, "triton")
    # What torch cannot do better is no fault of the kernel.
    halve(torch.full((3,), float("inf"), device=device), False, "triton")
    with pytest.raises(FloatingPointError, match=r"swiglu: halve .*'triton'"):
        halve(torch.ones(3, device=device), False, "triton")
