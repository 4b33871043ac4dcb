"""Every call of a vendor's operator, as the package's ops make them, against the schemas and shape functions of the
installed torch_npu."""

from pathlib import Path

import pytest
import torch

from npu_trainer_kernels import vendor as vendor_module
from tests import closeness
from tests.npu_contract.calls import CASES, NAMES, Call, Recorder, upstream

# As the calls rely on them: names, order, types and defaults, and what is returned.
SCHEMAS = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)",
    "npu_rms_norm_backward": "(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    "npu_add_rms_norm": "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) -> "
    "(Tensor, Tensor, Tensor)",
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward": "(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    "npu_rotary_mul": '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor',
    "npu_cross_entropy_loss": '(Tensor input, Tensor target, Tensor? weight=None, str reduction="mean", '
    "int ignore_index=-100, float label_smoothing=0., float lse_square_scale_for_zloss=0., bool return_zloss=False) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    "npu_cross_entropy_loss_backward": "(Tensor grad_loss, Tensor log_prob, Tensor target, Tensor? weight=None, "
    'Tensor? grad_zloss=None, Tensor? lse_for_zloss=None, str reduction="mean", int ignore_index=-100, '
    "float label_smoothing=0., float lse_square_scale_for_zloss=0.) -> Tensor",
    "npu_grouped_matmul": "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, "
    "int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_fusion_attention": "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0)'
    " -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    "npu_fusion_attention_grad": "(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, "
    "str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
    "Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, "
    "float scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, "
    'str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
}


def _on_meta(call: Call, dtype: torch.dtype) -> list[torch.Tensor | None]:
    return [None if t is None else t.detach().to("meta").requires_grad_(t.requires_grad) for t in call.inputs(dtype)]


def _shapes(results: list[torch.Tensor | None]) -> list[tuple[torch.Size, torch.dtype] | None]:
    return [None if t is None else (t.shape, t.dtype) for t in results]


@pytest.mark.parametrize(("call", "dtype"), CASES, ids=NAMES)
def test_calls_and_shapes(call: Call, dtype: torch.dtype, vendor: str):
    inputs = _on_meta(call, dtype)
    with Recorder() as recorder:
        ours = closeness.run(lambda *given: call.op(*given, backend=vendor), inputs, upstream)
    assert recorder.names <= set(vendor_module.SERVED[call.name.split()[0]].operators)
    assert recorder.names or not inputs[0].numel(), "the vendor was not asked"
    expected = closeness.run(lambda *given: call.op(*given, backend="torch"), inputs, upstream)
    assert _shapes(ours) == _shapes(expected)


def test_exactly_the_declared_operators_are_called(vendor: str):
    with Recorder() as recorder:
        for call, dtype in CASES:
            closeness.run(lambda *given, op=call.op: op(*given, backend=vendor), _on_meta(call, dtype), upstream)
    assert (
        recorder.names
        == {name for vendor in vendor_module.SERVED.values() for name in vendor.operators}
        == set(SCHEMAS)
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name: str):
    assert str(getattr(torch.ops.npu, name).default._schema) == f"npu::{name}{SCHEMAS[name]}"


def test_what_moves_rows_does_not_fit_around_the_products_of_experts():
    """For the reasons that `vendor.py` gives."""
    schemas = {
        "npu_moe_token_permute": "(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> "
        "(Tensor, Tensor)",
        "npu_moe_token_unpermute_grad": "(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, "
        "Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> "
        "(Tensor, Tensor)",
    }
    for name, schema in schemas.items():
        assert str(getattr(torch.ops.npu, name).default._schema) == f"npu::{name}{schema}"


def test_products_with_an_fp32_result_are_listed():
    """`device.has_fp32_output_product` asks an NPU for them, as `torch.mm(..., out_dtype=..., out=...)` calls them."""
    import torch_npu

    functions = (Path(torch_npu.__file__).parent / "csrc" / "aten" / "npu_native_functions_by_codegen.yaml").read_text()
    for signature in (
        "mm.dtype_out(Tensor self, Tensor mat2, ScalarType output_dtype, *, Tensor(a!) out)",
        "addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType output_dtype, *, Scalar beta=1, "
        "Scalar alpha=1, Tensor(a!) out)",
    ):
        assert f"- func: {signature}" in functions
