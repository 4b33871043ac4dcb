"""Runs one training step of a model on tensors without memory, as Trainer and TRL's trainers do.

The trainers' loops cannot run, since they read values in many places. This module calls the same functions: the model,
TRL's head, autograd, gradient clipping, the optimiser. The losses of TRL's trainers on `[rows, length]` numbers are
simplified, since they need little memory.
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..ops.head import GrpoOptions, GrpoPlan, GrpoTokens, linear_divergence, planned
from ..patching import apply_npu_kernels
from ..patching.call import use_plan
from ..patching.classes import original_class
from ..patching.learned_plan import LearnedPlan
from ..support.foreign import dtype_argument
from ._card import LIBRARIES, NoValues, deciding, fused_heads, scratch, standing_in
from ._graphs import capturing
from ._ledger import Ledger
from ._rollouts import generate
from ._setup import VARIANTS, Prediction, Setup
from ._sharding import FIRST_BUCKET, beside, shares_of, units_of

__all__ = ["predict"]

# A body is captured when it is called for the second time.
_STEPS_TO_REPLAY = 3

# Exceptions of models whose config has inconsistent sizes, or that need a package which is missing.
_NO_MODEL = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError)

# The outputs that TRL's trainers request from its head.
_OUTPUTS = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "grpo": ("log_probs", "entropy"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
}


def _built(config: Any, setup: Setup, trained: bool = True) -> nn.Module:
    """Creates a model on the meta device: the one that is trained, or one that is not."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = transformers.AutoModelForCausalLM.from_config(config, **{dtype_argument(): setup.dtype})
    except _NO_MODEL as error:
        raise ValueError(f"no model can be made of it: {type(error).__name__}: {error}") from error
    model.config.use_cache = False
    if setup.trainer in _OUTPUTS:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=_OUTPUTS[setup.trainer])
    if not trained:
        return model.eval().requires_grad_(False)
    with warnings.catch_warnings():
        # The names for checkpointing change with transformers 6; PEFT uses the old ones.
        warnings.simplefilter("ignore", FutureWarning)
        # PEFT first looks for experts' modules, warns that there are none, and then adapts their parameters.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        if setup.lora:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(
                r=setup.lora, lora_alpha=2 * setup.lora, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            with torch.device("meta"):
                model = get_peft_model(model, adapter)
        if setup.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if setup.lora:
                model.enable_input_require_grads()
    return model.train()


def _materialise(model: nn.Module, ledger: Ledger, frozen: float, trained: float) -> None:
    """Replaces the model's tensors by fake ones on the CPU; the ledger counts a share of each."""
    made: dict[int, torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        with ledger.within("weights", trained if tensor.requires_grad else frozen):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(like(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = like(buffer)


def _mark_attention(model: nn.Module, ledger: Ledger) -> None:
    """Attributes storages that attention modules allocate in forward to the part "attention"."""

    def enter(module: nn.Module, args: Any) -> None:
        ledger.enter("attention")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        ledger.leave()

    for module in model.modules():
        if original_class(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


@contextlib.contextmanager
def _marking_head(ledger: Ledger) -> Iterator[None]:
    """Attributes storages that a fused head allocates to the part "head": the memory of its logits need not have a
    dimension of the vocabulary's size."""

    def marked(call: Callable[..., Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with ledger.within("head"):
                return call(*args, **kwargs)

        return staticmethod(run)

    with contextlib.ExitStack() as stack:
        for function in fused_heads():
            for name in ("forward", "backward"):
                stack.enter_context(mock.patch.object(function, name, marked(getattr(function, name))))
        yield


def _when_backward_reaches(layer: nn.Module, call: Callable[[], object]) -> None:
    """Runs `call` once, when the first gradient of a layer's output has been computed."""
    called = False

    def arrived(gradient: torch.Tensor) -> None:
        nonlocal called
        if not called:
            called = True
            call()

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(arrived)

    layer.register_forward_hook(watch)


def _divergence(student: Any, teacher: Any, ids: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Computes the loss of TRL's `DistillationTrainer` at its default beta: the bodies of both models, then the
    divergence of their heads over the tokens of completions."""
    kept = setup.length - max(setup.prompt, 1)
    student, hidden = student.get_base_model() if setup.lora else student, []
    for model, records in ((student, torch.enable_grad()), (teacher, torch.no_grad())):
        with records:
            out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            hidden.append(out[:, -kept - 1 : -1])
    heads = [model.get_output_embeddings() for model in (student, teacher)]
    weights, biases = [head.weight for head in heads], [head.bias for head in heads]
    mask, count = torch.ones(hidden[0].shape[:2], dtype=torch.int64, device="cpu"), setup.scored
    if VARIANTS[setup.variant] is None:
        function = importlib.import_module("trl.trainer.distillation_trainer")._chunked_divergence_loss
        loss: torch.Tensor = function(
            *hidden, *weights, mask, beta=1.0, num_items_in_batch=count, student_lm_head_bias=biases[0],
            teacher_lm_head_bias=biases[1],
        )[0]  # fmt: skip
        return loss
    out = linear_divergence(
        hidden[0], weights[0], hidden[1], weights[1], *biases, beta=1.0, mask=mask != 0, num_items=count,
        outputs=("entropy",),
    )  # fmt: skip
    return out.divergence  # type: ignore[union-attr]


def _loss(model: Any, reference: Any, ids: torch.Tensor, setup: Setup) -> torch.Tensor:
    if setup.trainer == "trainer":
        return model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel()).loss
    if setup.trainer == "distil":
        return _divergence(model, reference, ids, setup)
    labels = ids
    if setup.prompt:
        labels = ids.clone()
        labels[:, : setup.prompt] = -100
    log_probs = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    if setup.trainer == "sft":
        return -log_probs.sum() / ids.numel()
    if setup.trainer == "dpo":
        with torch.no_grad():
            if reference is None:
                with model.disable_adapter():
                    before = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
            else:
                before = reference(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        chosen, rejected = (log_probs - before).sum(1).chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected).mean()
    ratio = (log_probs - log_probs.detach()).exp()
    return -torch.min(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5).sum() / ids.numel()


class _GrpoPlan:
    """The plan that GRPO's trainer gives the head for TRL's default loss, on-policy."""

    def mismatch(self, share: float) -> None:
        """Ignores mismatches, which fake tensors cannot show."""

    def for_rows(self, rows: int, weight: torch.Tensor, itemsize: int, scored: object) -> GrpoPlan | None:
        """See `HeadPlan`."""
        if not weight.requires_grad:
            return None
        numbers, sequence = torch.zeros(rows, dtype=torch.float32), torch.arange(rows)
        tokens = GrpoTokens(numbers, numbers, numbers, None, None, None, None, None, sequence, numbers)
        of_each = [1] * rows
        return planned(lambda: tokens, GrpoOptions(), True, lambda: of_each, weight.shape[0], itemsize, weight.device)


@contextlib.contextmanager
def _applied(model: nn.Module, setup: Setup) -> Iterator[None]:
    """Applies the kernels to a model, with the plan that its head has learned after the first steps."""
    options = VARIANTS[setup.variant]
    if options is None:
        yield
        return
    options = {**options, "capture": "on" if setup.capture else "off"}
    with apply_npu_kernels(model, **options) as handle, use_plan(_GrpoPlan() if setup.trainer == "grpo" else None):
        # The head learns in two backward passes that SFT's gradient is equal for all tokens, DPO's only within a row.
        handle.settings.full = True
        handle.settings.learned = LearnedPlan.settled(setup.trainer == "sft")
        yield


def predict(config: Any, setup: Setup, libraries: int = LIBRARIES) -> Prediction:
    """Predicts the peak memory of a step after the first, when the optimiser has its state.

    Args:
        config: the config of a transformers causal language model.
        setup: the training step.
        libraries: bytes allocated by libraries.

    Raises:
        ValueError: the model's code reads values, its weights are quantised, or transformers cannot create a causal
            language model from the config.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantised (quantization_config), and what these take is not modelled")
    model = _built(config, setup)
    reference = None
    if setup.trainer == "dpo" and not setup.lora:
        reference = _built(config, setup, trained=False)
    if setup.trainer == "distil":
        reference = _built(setup.teacher, setup, trained=False)
    ledger = Ledger(config.get_text_config().vocab_size, scratch)
    with contextlib.ExitStack() as stack:
        with deciding(setup.memory):
            # Recognition runs the modules on numbers, so this is outside of fake mode.
            for each in filter(None, (model, reference)):
                stack.enter_context(_applied(each, setup))
        stack.enter_context(standing_in(setup.memory, setup.scored))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(NoValues(setup.scored))
        stack.enter_context(_marking_head(ledger))
        stack.enter_context(ledger)
        stack.enter_context(ledger.holding("other", libraries))
        if setup.capture:
            stack.enter_context(capturing(ledger))
        try:
            generation = _step(model, reference, setup, ledger)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(f"its code asks for values ({error.func}), and here are none") from error
    return Prediction(dict(ledger.peak), generation)


def _step(model: Any, reference: Any, setup: Setup, ledger: Ledger) -> dict[str, int]:
    """Runs generation and the steps; returns the parts at the peak of generation."""
    trained = [p for p in model.parameters() if p.requires_grad]
    shares = shares_of(setup, trained[0].dtype)
    come, until_sent = 0, contextlib.ExitStack()
    for each in filter(None, (model, reference)):
        _materialise(each, ledger, shares.frozen, shares.trained)
        if not setup.capture:  # a body with such hooks is not captured
            _mark_attention(each, ledger)
    trained, units = [p for p in model.parameters() if p.requires_grad], units_of(model)
    in_root = units.in_root  # a parameter's hook that referred to a module, as `units` does, would never be freed

    def arrived(parameter: torch.Tensor) -> None:
        nonlocal come
        whole = setup.sharding in ("fsdp2", "zero3") and id(parameter) in in_root
        assert parameter.grad is not None
        ledger.belongs(parameter.grad, "gradients", 1.0 if whole else shares.gradients)
        come += parameter.grad.nbytes
        if come >= FIRST_BUCKET:
            until_sent.close()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(arrived)
    optimizer = torch.optim.AdamW(trained, fused=True)
    with ledger.within("gradients", shares.gradients):
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    with ledger.within("optimiser", shares.optimiser):
        optimizer.step()
    optimizer.zero_grad()
    ledger.forget_peak()
    added, generation = beside(setup, units), {}
    ids = torch.empty(setup.rows, setup.length, dtype=torch.int64, device="cpu")
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=setup.autocast)
    if setup.rollouts:
        with autocast():
            generate(model, setup, ledger)
        generation = dict(ledger.peak)
    for _ in range(_STEPS_TO_REPLAY if setup.capture else 1):
        with ledger.holding("other", added.step), until_sent, contextlib.ExitStack() as in_layers:
            until_sent.enter_context(ledger.holding("other", added.start))
            if setup.sharding != "none":
                stay = functools.partial(ledger.holding, "other", added.layers)
                _when_backward_reaches(units.last, lambda: in_layers.enter_context(stay()))  # noqa: B023
            with autocast():
                loss = _loss(model, reference, ids, setup)
            if setup.trainer != "trainer":
                until_sent.close()
            loss.backward()
        del loss
        for parameter in trained:
            if parameter.grad is not None:  # the model may not use every parameter
                ledger.belongs(parameter.grad, "gradients", shares.gradients)
        nn.utils.clip_grad_norm_(trained, 1.0)
        with ledger.within("optimiser", shares.optimiser):
            optimizer.step()
        optimizer.zero_grad()
    return generation
