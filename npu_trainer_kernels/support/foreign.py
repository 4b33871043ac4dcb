"""Every name of another project that the package's code relies on and that is no public API, or that differs from
version to version: what a release may take away. `make test-names` says which of them a version has not.

A name that differs by version is asked for here (`CACHES`, `at_least`). The others stand where they are used, since a
call around each attribute of a module would cost the host as much as the attribute; each has a row here, and
`tests/test_names.py` finds those without one.
"""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

__all__ = ["CACHES", "ROWS", "SEEN", "Row", "at_least", "drops_cache_without_gradients", "dtype_argument", "is_newer"]


class Row(NamedTuple):
    """A name of another project.

    Attributes:
        where: a module; a class or a function in it, `module:Class`; or a method, `module:Class.method`.
        name: a name of the module, or one in the code of the class or function, its arguments among them; empty: the
            module itself.
        use: what the package does with it.
        since: the first version that has it; None: all of `SEEN`.
        until: the first version that has it no longer; None: there is none yet.
    """

    where: str
    name: str
    use: str
    since: str | None = None
    until: str | None = None

    @property
    def project(self) -> str:
        """The project's name as a package."""
        return self.where.partition(":")[0].partition(".")[0]


SEEN = {
    "torch": ("2.7.1", "2.13.0"),
    "transformers": ("4.55.4", "5.22.2", "5.23.0", "5.24.0"),
    "trl": ("1.15.0", "1.16.0"),
    "accelerate": ("1.14.0",),
    "peft": ("0.20.0",),
    "torch_npu": ("2.7.1", "2.13.0"),
}
"""The versions that the rows hold for."""


def at_least(project: str, version: str) -> bool:
    """Whether the installed version of a project is this one or a later one."""
    return Version(metadata.version(project)) >= Version(version)


CACHES = (
    ("cache", "past_key_values", "cache_params")
    if at_least("transformers", "5.24")
    else ("past_key_values", "cache_params", "cache")
)
"""The arguments and outputs by which models of transformers take and return their cache: `cache` since 5.24; before,
`cache_params` in models with states alone, and `past_key_values` in all others. The first is the installed version's
name, which a forward is called by whose signature has none of them."""


def is_newer(version: str, newest: str) -> bool:
    """Whether a version is newer, patch releases aside; False if it is no version."""
    try:
        return Version(version).release[:2] > Version(newest).release[:2]
    except InvalidVersion:
        return False


def dtype_argument() -> str:
    """Returns the argument by which transformers makes a model in a dtype."""
    return "dtype" if at_least("transformers", "4.56") else "torch_dtype"


def drops_cache_without_gradients() -> bool:
    """Whether a body of transformers in training makes no cache under gradient checkpointing even where no gradient is
    recorded, and so nothing is computed twice."""
    return not at_least("transformers", "5.24")


_MODELS = "transformers.models"
_MASKS, _LOADED = "transformers.masking_utils", "transformers.modeling_utils"
_LAYERS = "transformers.modeling_layers:GradientCheckpointingLayer"
_GENERATION = "transformers.generation.utils:GenerationMixin"
_GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
_DISTILLATION = "trl.trainer.distillation_trainer"
_SERVERS = "trl.experimental.server_distillation.server_distillation_trainer"
_MODULE, _TENSOR = "torch.nn:Module", "torch:Tensor"

_OF_TRANSFORMERS = (
    Row(f"{_MODELS}.llama.modeling_llama:LlamaModel.forward", "cache", "CACHES", since="5.24"),
    Row(f"{_MODELS}.llama.modeling_llama:LlamaModel.forward", "past_key_values", "CACHES", until="5.24"),
    Row(f"{_MODELS}.mamba2.modeling_mamba2:Mamba2Model.forward", "cache_params", "CACHES", until="5.24"),
    Row("transformers.modeling_outputs:BaseModelOutputWithPast", "cache", "CACHES in a body's output", since="5.24"),
    Row(f"{_LOADED}:PreTrainedModel.from_pretrained", "dtype", "dtype_argument", since="4.56"),
    Row(f"{_LOADED}:PreTrainedModel", "_is_stateful", "a body whose state stays between calls"),
    Row(f"{_LOADED}:PreTrainedModel", "gradient_checkpointing", "whether memory counts for more than time"),
    Row(_LOADED, "ALL_ATTENTION_FUNCTIONS", "attention by segments"),
    Row(_LAYERS, "gradient_checkpointing", "which layers are computed twice"),
    Row(_LAYERS, "_gradient_checkpointing_func", "rows on their way are found again by what a checkpoint repeats"),
    Row("transformers.modeling_layers", "GradientCheckpointingLayer", "decoder layers"),
    Row("transformers.utils.generic:GeneralInterface", "_local_mapping", "attentions and masks on a thread's own"),
    Row("transformers.utils.generic:GeneralInterface", "_global_mapping", "the attention of a name"),
    Row("transformers.utils", "logging", "what transformers prints while a family is looked at"),
    Row("transformers.utils.logging", "", "loggers, on which no result depends"),
    Row(f"{_LOADED}:PreTrainedModel", "_is_hf_initialized", "a mark on modules that no forward reads"),
    *(Row("transformers.integrations.npu_flash_attention", name, "the options that an attention drops")
      for name in ("npu_flash_attn_func", "npu_flash_attn_varlen_func")),
    *(Row(_GENERATION, name, "the methods around the sampling loop")
      for name in ("_prepare_cache_for_generation", "_update_model_kwargs_for_generation")),
    Row(_GENERATION, "_prefill", "the methods around the sampling loop", since="5.0"),
    Row(_MASKS, "ALL_MASK_ATTENTION_FUNCTIONS", "masks of each row in a decode step"),
    Row(_MASKS, "AttentionMaskInterface", "a mask that is a packed row"),
    Row(_MASKS, "causal_mask_function", "the mask that is asked for"),
    Row("transformers.configuration_utils:PretrainedConfig", "_attn_implementation", "which attention runs",
        until="5.0"),
    Row("transformers.configuration_utils:PreTrainedConfig", "_attn_implementation", "which attention runs",
        since="5.0"),
    Row("transformers.configuration_utils:PreTrainedConfig", "_attn_implementation_internal", "the same, as it is kept",
        since="5.0"),
    Row("transformers.configuration_utils:PreTrainedConfig", "_experts_implementation", "which experts run",
        since="5.0"),
    Row("transformers.integrations", "moe", "the experts that transformers itself registers", since="5.0"),
    Row("transformers.integrations.moe:_default_apply_gate", "self", "gates of experts", since="5.0"),
    Row("transformers.integrations.moe", "_default_apply_gate", "`_apply_gate` of experts", since="5.0"),
    Row("transformers.integrations.moe:use_experts_implementation", "_apply_gate", "gates of experts", since="5.0"),
    Row("transformers.integrations.hub_kernels:use_kernel_func_from_hub_with_fallback", "is_new_implementation",
        "whether states are carried by transformers' own operators", since="5.20"),
    Row("transformers.distributed.expert_parallel", "", "forwards that bring rows from other ranks", since="5.20"),
    Row("transformers.distributed.tensor_parallel", "", "plans that share weights out", since="5.20"),
    Row("transformers.integrations.torchao:TorchAoQuantize", "_hf_quantized_needs_local_tp", "a quantised head",
        since="5.20"),
    Row("transformers.utils.output_capturing", "_active_collector", "whether outputs of layers are collected",
        since="5.0"),
    Row("transformers.utils.output_capturing:install_output_capuring_hook", "output_capturing_hook",
        "hooks that a captured body need not run", since="5.0"),
    Row("transformers.utils", "is_kernels_available", "`use_kernels=True`"),
    Row("transformers.utils", "is_torch_xla_available", "where losses are not filtered"),
    Row("transformers.utils.kernel_config:KernelConfig", "_kernel_funcs", "functions that `kernels` replaces",
        since="5.20"),
    Row("transformers.modeling_flash_attention_utils", "_flash_varlen_fn", "the package that attends"),
    Row("transformers.activations", "ACT2FN", "activations by name"),
    Row("transformers.generation", "logits_process", "processors of logits that a step computes itself"),
    Row("transformers.generation", "GenerateDecoderOnlyOutput", "what `generate` returns"),
    Row("transformers.generation.utils:GenerationMixin._sample", "logits_processor", "the loop in `generate`"),
    Row("transformers.generation.utils:GenerationMixin._sample", "synced_gpus", "the loop in `generate`"),
    Row("transformers.generation.utils:GenerationMixin._prepare_special_tokens", "_pad_token_tensor",
        "the id of rows that have ended"),
    Row("transformers.models.auto.auto_factory:_BaseAutoModelClass", "_model_mapping", "modules with rotations"),
    Row("transformers.trainer", "Trainer", "the class that `npu-kernels run` waits for"),
    Row("transformers.trainer:Trainer", "_tr_loss", "the filter of logged losses", since="5.17"),
    Row("transformers.trainer:Trainer", "_globalstep_last_logged", "the filter of logged losses"),
    Row("transformers.trainer:Trainer", "_get_learning_rate", "asked for once a step"),
    Row("transformers.trainer:Trainer", "_maybe_log_save_evaluate", "the frame that logs"),
    Row("transformers.trainer:Trainer", "_train_batch_size", "rows of a micro-batch"),
    Row("transformers.training_args:TrainingArguments", "_n_gpu", "one device in `verify`"),
)  # fmt: skip

_OF_TRL = (
    Row("trl.trainer.utils", "add_fused_lm_head", "TRL's head"),
    Row("trl.trainer.utils", "_ChunkedLogProbFunction", "the seam of TRL's head"),
    Row("trl.trainer.utils", "_use_triton", "whether TRL's head leaves masked rows out", since="1.16"),
    Row("trl.trainer.utils:add_fused_lm_head", "fused_lm_head", "a forward with TRL's head"),
    Row("trl.kernels.chunked_logprob", "ChunkedLogProbFunction", "its memory in `fit`"),
    Row("trl.kernels.chunked_logprob", "_addmm_fp32", "its memory in `fit`"),
    Row("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", "its memory in `fit`"),
    Row("trl.kernels.chunked_divergence", "_jsd_kernel", "its memory in `fit`"),
    Row("trl.kernels.chunked_divergence", "_stats_kernel", "its memory in `fit`"),
    Row(_GRPO, "_buffered_inputs", "rows are arranged"),
    Row(_GRPO, "_compute_loss", "the gradient that is planned"),
    Row(_GRPO, "_entropy_bonus_enabled", "the gradient that is planned"),
    Row(_GRPO, "_get_per_token_logps_and_entropies", "rows are arranged"),
    Row(_GRPO, "_last_world_entropy", "the gradient that is planned"),
    Row(_GRPO, "_metrics", "metrics of rows that were arranged"),
    Row(_GRPO, "_prepare_inputs", "rows are arranged"),
    Row(_GRPO, "_step", "rows are arranged"),
    Row(_GRPO, "_tokenizer", "rows are arranged"),
    Row(f"{_DISTILLATION}:DistillationTrainer", "_compute_loss", "the divergence"),
    Row(f"{_DISTILLATION}:DistillationTrainer", "_get_last_hidden_state", "the divergence"),
    Row(_DISTILLATION, "_chunked_divergence_loss", "the divergence"),
    Row("trl.experimental.gkd.gkd_trainer:GKDTrainer", "generalized_jsd_loss", "the divergence"),
    Row("trl.experimental.gold.gold_trainer:GOLDTrainer", "generalized_jsd_loss", "the divergence"),
    Row("trl.experimental.iw_opd.iw_opd_trainer:IWOPDTrainer", "generalized_jsd_loss", "the divergence"),
    Row("trl.experimental.async_distillation.async_distillation_trainer", "AsyncDistillationTrainer",
        "a loss that is left to TRL"),
    Row(_SERVERS, "ServerDistillationTrainer", "divergences on some tokens"),
    Row("trl.experimental.iw_opd.iw_opd_trainer:IWOPDTrainer", "_compute_local_sparse_top_1_divergence_loss",
        "some tokens"),
    Row(f"{_SERVERS}:ServerDistillationTrainer", "_compute_server_forward_kl_loss", "some tokens"),
    Row(f"{_SERVERS}:ServerDistillationTrainer", "_compute_server_sparse_top_1_divergence_loss", "some tokens"),
    Row(f"{_SERVERS}:ServerDistillationTrainer", "_compute_sparse_top_1_divergence_loss", "some tokens"),
    Row(f"{_SERVERS}:ServerDistillationTrainer", "_get_reverse_kl_top_1_tokens", "some tokens"),
    Row(f"{_SERVERS}:ServerDistillationTrainer", "_reduce_divergence_loss", "some tokens"),
)  # fmt: skip

_OF_TORCH = (
    *(Row(_MODULE, name, "hooks that keep a module from being read past its forward")
      for name in ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called",
                   "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")),
    *(Row(_MODULE, name, "a module's own, without the attributes of classes")
      for name in ("_parameters", "_buffers", "_modules")),
    Row(_MODULE, "_compiled_call_impl", "whether a module was compiled in place"),
    *(Row(_MODULE, name, "methods of a class that run when its module is called")
      for name in ("_call_impl", "_wrapped_call_impl")),
    Row(_MODULE, "_named_members", "the walk over modules that repeats are taken out of"),
    *(Row("torch.nn.modules.module", name, "hooks of all modules")
      for name in ("_global_backward_hooks", "_global_backward_pre_hooks", "_global_forward_hooks",
                   "_global_forward_pre_hooks")),
    Row(_MODULE, "_is_replica", "copies of a module under DataParallel"),
    Row(_TENSOR, "_version", "whether a tensor was written to"),
    Row(_TENSOR, "_base", "views"),
    Row(_TENSOR, "_is_view", "views"),
    Row(_TENSOR, "_make_wrapper_subclass", "promised logits"),
    Row(_TENSOR, "_post_accumulate_grad_hooks", "hooks of a tensor that is exchanged"),
    Row("torch:UntypedStorage", "_cdata", "which tensors have the same memory"),
    Row("torch._ops:OpOverload", "_schema", "which arguments an operator writes to"),
    Row("torch._ops:OpOverload", "_overloadname", "operators in `fit`"),
    Row("torch", "_C", "switches of autograd and of the dispatcher"),
    *(Row("torch._C", name, "switches of autograd and of the dispatcher")
      for name in ("_ForceDispatchKeyGuard", "_are_functorch_transforms_active", "_construct_storage_from_data_pointer",
                   "_disabled_torch_function_impl", "_dispatch_tls_local_exclude_set",
                   "_dispatch_tls_local_include_set", "_functions", "_get_deterministic_algorithms", "_is_tracing",
                   "_len_torch_dispatch_stack", "_len_torch_function_stack")),
    Row("torch._C._autograd", "_get_current_graph_task_keep_graph", "whether backward may overwrite what was saved"),
    Row("torch._dynamo.eval_frame", "_TorchDynamoContext", "compiled code, which a look does not see"),
    Row("torch.autograd.forward_ad", "_current_level", "whether a derivative in forward mode is on its way"),
    Row("torch", "_grouped_mm", "products of experts before `torch.nn.functional.grouped_mm`"),
    Row("torch.nn.functional", "grouped_mm", "products of experts", since="2.10"),
    Row("torch", "_foreach_copy_", "copies of many weights at once"),
    Row("torch", "_foreach_mul", "scaling many gradients at once"),
    Row("torch.cuda", "_sleep", "a device that is busy, for timing"),
    *(Row("torch.ops.aten", name, "attention as PyTorch computes it")
      for name in ("_flash_attention_backward", "_flash_attention_forward", "_scaled_dot_product_attention_math",
                   "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
                   "_scaled_dot_product_flash_attention")),
    *(Row("torch.ops.aten", name, "operators that are rounded, counted or refused")
      for name in ("_local_scalar_dense", "_log_softmax", "_log_softmax_backward_data", "_softmax",
                   "_softmax_backward_data", "_unsafe_view")),
    Row("torch._subclasses.fake_tensor", "FakeTensor", "tensors without numbers"),
    Row("torch._subclasses.fake_tensor", "FakeTensorMode", "steps without numbers"),
    Row("torch._subclasses.fake_tensor", "DataDependentOutputException", "steps without numbers"),
    Row("torch._subclasses.fake_tensor", "DynamicOutputShapeException", "steps without numbers"),
    Row("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "modes that see operators"),
    Row("torch.overrides", "_get_current_function_mode_stack", "modes that see functions"),
    Row("torch.utils._python_dispatch", "TorchDispatchMode", "tapes, and counts of operators"),
    Row("torch.utils._python_dispatch:TorchDispatchMode", "_should_skip_dynamo", "looks without Dynamo", since="2.11"),
    *(Row("torch.utils._pytree", name, "tensors in arguments and results")
      for name in ("tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten")),
    *(Row("torch._C._dynamo.eval_frame", name, "functions outside of graphs")
      for name in ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy", "set_eval_frame")),
    Row("torch._dynamo.symbolic_convert", "InstructionTranslator", "functions outside of graphs"),
    Row("torch._dynamo.eval_frame", "OptimizedModule", "compiled modules, by `_orig_mod`"),
    Row("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod", "compiled modules"),
    Row("torch._dynamo.eval_frame:DisableContext", "_torchdynamo_disable", "functions outside of graphs"),
    Row("torch._dynamo.eval_frame:DisableContext", "_torchdynamo_disable_msg", "functions outside of graphs"),
    Row("torch._dynamo.decorators:assume_constant_result", "_dynamo_marked_constant", "constants in graphs"),
    Row("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", "weights that ranks hold parts of"),
    Row("torch.distributed.fsdp._fully_shard", "", "hooks of FSDP2"),
    Row("torch.distributions:Distribution", "_validate_args", "a check that waits for the device"),
)  # fmt: skip

_OF_OTHERS = (
    Row("accelerate.utils", "DistributedType", "several processes"),
    Row("accelerate.utils", "extract_model_from_parallel", "the model inside of a wrapper"),
    Row("peft.tuners.tuners_utils", "BaseTunerLayer", "adapters"),
    Row("peft.utils.other", "AuxiliaryTrainingWrapper", "modules that are trained beside adapters"),
    Row("peft.tuners.lily", "", "adapters that mix tokens' states"),
    *(Row("torch_npu._C", name, "the stream for a launch")
      for name in ("_npu_getCurrentRawStream", "_npu_getCurrentRawStreamNoWait", "_npu_getCurrentStream")),
)  # fmt: skip

ROWS = (*_OF_TRANSFORMERS, *_OF_TRL, *_OF_TORCH, *_OF_OTHERS)
