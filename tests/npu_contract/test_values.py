"""Values and gradients of the ops on the vendor's backend, with the operators' documented meaning on the CPU
(`operators.py`): what the package does around them is held to the ops' references."""

from collections.abc import Iterator

import pytest
import torch
import transformers

from npu_trainer_kernels import apply_npu_kernels, backends, ops
from npu_trainer_kernels import device as devices
from npu_trainer_kernels import vendor as vendor_module
from tests import closeness, models
from tests.npu_contract import operators
from tests.npu_contract.calls import CASES, NAMES, Call, Recorder, upstream

FORWARD, BACKWARD = vendor_module.SERVED["rms_norm"].operators
BY_NAME = ",".join(f"{op}=vendor" for op in ("rms_norm", "add_rms_norm", "swiglu", "rope", "linear_cross_entropy"))


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    with operators.on_cpu():
        yield


@pytest.mark.parametrize(("call", "dtype"), CASES, ids=NAMES)
def test_values_and_gradients(call: Call, dtype: torch.dtype, vendor: str):
    def op(*given):
        return call.op(*given, backend=vendor)

    closeness.assert_op_close(op, call.reference, call.inputs(dtype), upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_round_where_their_casting_says(dtype: torch.dtype, vendor: str):
    # The closeness rule forgives one rounding more. Here the operators round as the reference does: bit for bit.
    x, residual, weight = (torch.randn(*shape, dtype=dtype) for shape in ((64, 33), (64, 33), (33,)))
    gemma = {"casting": "gemma", "offset": 1.0}
    assert torch.equal(ops.rms_norm(x, weight, **gemma, backend=vendor), ops.rms_norm_reference(x, weight, **gemma))
    y, s = ops.add_rms_norm(x, residual, weight, offset=1.0, backend=vendor)
    expected_y, expected_s = ops.add_rms_norm_reference(x, residual, weight, offset=1.0)
    assert torch.equal(y, expected_y)
    assert torch.equal(s, expected_s)


@pytest.mark.parametrize("used", [(0,), (1,)], ids=["normed value alone", "sum alone"])
def test_add_rms_norm_with_one_of_its_results(used: tuple[int, ...], vendor: str):
    x, residual, weight = (torch.randn(*shape, requires_grad=True) for shape in ((4, 33), (4, 33), (33,)))

    def part(results):
        return upstream([results[i] for i in used])

    def op(*given):
        return ops.add_rms_norm(*given, backend=vendor)

    closeness.assert_op_close(op, ops.add_rms_norm_reference, [x, residual, weight], part)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_leaves_ignored_targets_out(reduction: str, vendor: str):
    x, weight = torch.randn(10, 9, requires_grad=True), torch.randn(33, 9, requires_grad=True)
    target = torch.randint(33, (10,))
    target[[0, 4, 9]] = -1

    def op(*given):
        return ops.fused_linear_cross_entropy(*given, ignore_index=-1, reduction=reduction, backend=vendor)

    def reference(*given):
        return ops.linear_cross_entropy_reference(*given, ignore_index=-1, reduction=reduction)

    closeness.assert_op_close(op, reference, [x, weight, target], upstream)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_on_it(family: str, vendor: str):
    model, plain, inputs = models.small_model(family), models.small_model(family), models.batch()
    expected = models.loss_and_gradients(plain, inputs)
    truth = models.loss_and_gradients(models.small_model(family).double(), inputs)
    with apply_npu_kernels(model, backend=BY_NAME) as kernels:
        found = models.loss_and_gradients(model, inputs)
        assert {r.backend for r in kernels.report().replaced if r.op in backends.parse_override(BY_NAME)} == {"vendor"}
    models.assert_outcome_close(model, found, expected, truth, lambda: models.loss_and_gradients(plain, inputs))


@pytest.fixture
def as_npu(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    """The CPU is given an NPU's table, so that nothing need be asked for by name."""
    monkeypatch.setattr(devices, "kind_of", lambda device: "npu")


@pytest.mark.usefixtures("as_npu")
@pytest.mark.parametrize(
    ("trained", "deterministic", "expected"),
    [(True, False, {FORWARD}), (False, False, {FORWARD, BACKWARD}), (True, True, {FORWARD, BACKWARD})],
    ids=["trained weight", "frozen weight", "deterministic algorithms"],
)
def test_by_the_table_backward_gives_the_same_bits_every_time(trained: bool, deterministic: bool, expected: set[str]):
    x, weight = torch.randn(4, 33, requires_grad=True), torch.randn(33, requires_grad=trained)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with Recorder() as recorder:
            closeness.assert_op_close(ops.rms_norm, ops.rms_norm_reference, [x, weight], upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert recorder.names == expected


class _WeightlessNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm_reference(hidden_states, None, self.eps)


@pytest.mark.usefixtures("as_npu")
def test_the_report_names_the_norms_that_it_does_not_cover():
    model = torch.nn.Sequential(transformers.models.llama.modeling_llama.LlamaRMSNorm(8), _WeightlessNorm())
    with apply_npu_kernels(model, ops=["rms_norm"]) as kernels, Recorder() as recorder:
        assert {r.module: r.backend for r in kernels.report().replaced} == {"0": "vendor", "1": "torch"}
        assert "the vendor's operator does not cover it: no weight" in kernels.report().text(full=True)
        model(torch.randn(2, 8))
    assert recorder.names == {FORWARD}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`npu_rms_norm` fails whenever it is called."""

    def fails(*given: object) -> None:
        raise RuntimeError("call aclnnRmsNorm failed")

    monkeypatch.setattr(torch.ops.npu, "npu_rms_norm", fails)
    yield
    backends.forget_failures()


@pytest.mark.usefixtures("as_npu", "broken")
def test_an_operator_that_fails_hands_over_to_torch(monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_STRICT", "0")
    x, weight = torch.randn(4, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="torch takes over .* call aclnnRmsNorm failed"):
        closeness.assert_op_close(ops.rms_norm, ops.rms_norm_reference, [x, weight], upstream)
    assert backends.choose("rms_norm", x.device) == "torch"
    assert "call aclnnRmsNorm failed" in backends.explain("rms_norm", x.device)[1]


@pytest.mark.usefixtures("as_npu", "broken")
def test_an_operator_that_fails_raises_where_that_was_asked_for(monkeypatch):
    monkeypatch.setenv("NPU_KERNELS_STRICT", "1")
    with pytest.raises(RuntimeError, match="call aclnnRmsNorm failed"):
        ops.rms_norm(torch.randn(4, 33), torch.randn(33))
