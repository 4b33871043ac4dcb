"""Puts the engine in the place of `generate`'s loop, for one model.

`generate` merges configurations, makes logits processors and stopping criteria, and then calls the sampling loop of the
model's class. The model gets a class with another loop, so everything before it stays transformers' own: beams,
assisted decoding and whatever else has a loop of its own are not touched.
"""

from __future__ import annotations

import contextvars
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, GenerationConfig

from .. import device
from ..capture import Refused, recording_now
from ..options import check_rollouts
from ..patching import NpuKernels
from ..patching.call import calls_end
from ..patching.classes import derived
from ..patching.head import causal_lm
from ..support.foreign import CACHES
from ..support.switch import check_switch
from .generators import Generators
from .other_code import has_own_loop, other_code
from .outputs import given_cache, notes_new_caches, output_of
from .ranks import all_agree, gathered, is_shared, why_not_gathered
from .rollout_cache import states_of
from .rollout_engine import Engine
from .sampling import sampling_of
from .turns import Rollout

__all__ = ["Rollouts", "completions", "serve_rollouts"]

_LEAST = 32
"""Shorter completions are not worth capturing a step."""
_KNOWN = (*CACHES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "num_logits_to_keep",
          "cache_position", "return_dict")  # fmt: skip
_RETURNS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")


@dataclass
class _Asked:
    """What `completions` asks of the rollout that `generate` makes for it on this thread.

    Attributes:
        logprobs: whether log-probabilities are asked for.
        made: how many tokens each row has made [B], and their log-probabilities; None: there was no rollout.
        reason: why there was none.
    """

    logprobs: bool
    made: Any = None
    reason: str = "its generation has a loop of its own"


_asked: contextvars.ContextVar[_Asked | None] = contextvars.ContextVar("npu_kernels_completions", default=None)


class Rollouts:
    """What generates for a model, and the time that `generate`'s loops took.

    Attributes:
        engine: what generates by captured steps.
        always: whether it does so on any device and for short completions, too.
        seconds: the time spent in the sampling loop, by whatever code.
    """

    def __init__(self, engine: Engine, always: bool) -> None:
        self.engine, self.always = engine, always
        self.seconds = self._asked_at = 0.0

    def __deepcopy__(self, memo: object) -> Rollouts:
        return self

    def __str__(self) -> str:
        return f"rollouts by captured steps: {self.engine}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts as a plain dict."""
        return {**self.engine.as_dict(), "loops": round(self.seconds, 3)}

    def seconds_since(self) -> float:
        """Returns the time spent in the loop since the last question."""
        before, self._asked_at = self._asked_at, self.seconds
        return self.seconds - before


_BY = "_npu_kernels_rollouts"


def serve_rollouts(
    kernels: NpuKernels, mode: str = "on", *, most_rows: int | None = None, keep: bool = False
) -> Rollouts | None:
    """Lets a patched model's `generate` sample by captured steps (`rollouts`), until the kernels are restored.

    The report of the kernels counts what was generated so, and says why `generate` ran otherwise.

    Args:
        kernels: what `apply_npu_kernels` returned.
        mode: `"on"`: on any device (a CPU replays tapes, which is slower and is there for tests); `"auto"`: where it
            was measured to be faster, and at least 32 tokens may be made; `"off"`: nothing is changed.
        most_rows: at most so many rows are generated at once, and others begin where rows have ended; None: as many as
            half of the free memory has caches for.
        keep: whether the step, its caches and its copies of weights stay in memory until the next rollout, if there is
            room for twice what steps have needed; otherwise each rollout captures its step, and gives everything back.

    Returns:
        what counts, or None where nothing was changed; the report says why.

    Raises:
        ValueError: an unknown mode, `most_rows` is no positive number, or `keep` is neither True nor False.
        RuntimeError: the kernels were restored, or their model is gone.
    """
    check_rollouts("mode", mode)
    if most_rows is not None and (type(most_rows) is not int or most_rows < 1):
        raise ValueError(f"most_rows must be a positive number, or None; got {most_rows!r}")
    check_switch("keep", keep)
    model = kernels.model
    if model is None or not kernels.active:
        raise RuntimeError("nothing can generate: these kernels were restored, or their model is gone")
    if mode == "off":
        return None
    found = _serve(model, kernels, mode, most_rows, keep)
    if isinstance(found, str):
        kernels.report().note(found)
        return None
    kernels.report().rollouts = found
    return found


def _serve(
    model: nn.Module, kernels: NpuKernels, mode: str, most_rows: int | None, keep: bool
) -> Rollouts | str | None:
    """Gives the causal model inside of `model` the engine's sampling loop; returns what counts, or why nothing was
    changed, or None where nothing generates."""
    inner = causal_lm(model)[1]
    loop = getattr(type(inner), "_sample", None)
    if inner is None or loop is None:
        return None
    known = getattr(type(inner), _BY, None)
    if known is not None and known.engine.serves(inner):
        found: Rollouts = known
        return found
    if getattr(inner.config, "is_encoder_decoder", False):
        return "completions are generated as before: the model is an encoder-decoder"
    if has_own_loop(type(inner)):
        return "completions are generated as before: the model's class has a sampling loop of its own"
    where = next(inner.parameters()).device
    if mode == "auto" and not device.captures_unasked(where):
        if where.type in ("cpu", "meta"):
            return None
        return f"completions are generated as before on {where.type}, where steps were not measured; 'on' captures them"
    undo = kernels.undo
    rollouts = Rollouts(Engine(inner, undo, kernels.backend, most_rows, keep), mode == "on")
    undo.add(rollouts.engine.forget)
    kind: Any = type(inner)
    undo.set_class(inner, derived(kind, {
        "_sample": _loop(loop, rollouts, weakref.ref(model)), _BY: rollouts,
        "_prepare_cache_for_generation": notes_new_caches(kind._prepare_cache_for_generation),
    }))  # fmt: skip
    return rollouts


def _loop(original: Callable[..., Any], rollouts: Rollouts, outer: weakref.ref[nn.Module]) -> Callable[..., Any]:
    def sample(
        self: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        begun = time.perf_counter()
        engine, asked = rollouts.engine, _asked.get()
        outermost = outer() or self
        shared = is_shared(outermost)

        def wanted() -> Rollout:
            reason = _aside(self, shared, input_ids, generation_config, synced_gpus, streamer, model_kwargs)
            if reason is not None:
                raise Refused(reason)
            prompts = _prompts(input_ids, model_kwargs)
            vocabulary = self.get_output_embeddings().weight.shape[0]
            sampling, most = sampling_of(
                logits_processor, stopping_criteria, generation_config, input_ids.shape[1],
                [len(prompt) for prompt in prompts], vocabulary, next(self.parameters()).device,
            )  # fmt: skip
            if not rollouts.always and most < _LEAST:
                raise Refused(f"fewer than {_LEAST} tokens are asked for")
            return Rollout(prompts, most, sampling, asked is not None and asked.logprobs)

        def generated() -> Any:
            run = _of_all_ranks if shared else _of_this_process
            tokens, *made = run(self, outermost, engine, wanted)
            if asked is not None:
                asked.made = made
            sequences = torch.cat((input_ids, tokens.to(input_ids.device)), 1)
            return output_of(self, sequences, model_kwargs, generation_config)

        try:
            if engine.serves(self) and not recording_now() and not torch.compiler.is_compiling():
                try:
                    with engine.alone(), calls_end():
                        return generated()
                except Refused as error:
                    engine.declined(str(error))
                    if asked is not None:
                        asked.reason = str(error)
            return original(
                self, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
            )  # fmt: skip
        finally:
            rollouts.seconds += time.perf_counter() - begun

    return sample


def _of_this_process(model: Any, outer: nn.Module, engine: Engine, asked: Callable[[], Rollout]) -> Any:
    return engine.run(model, asked())


def _of_all_ranks(model: Any, outer: nn.Module, engine: Engine, asked: Callable[[], Rollout]) -> Any:
    """Makes a rollout if all ranks can, of weights that ranks hold parts of.

    Raises:
        Refused: this rank or another one cannot; then every rank raises it.
    """
    where = next(model.parameters()).device
    generators = Generators(where)
    found, refused = None, None
    try:
        rollout = asked()
        if (reason := engine.why_refused(model, True) or why_not_gathered(outer, where)) is not None:
            raise Refused(reason)
    except Refused as error:
        refused = error
    if not all_agree(refused is None, where):
        raise refused or Refused("another rank cannot")
    with gathered(outer):
        try:
            found = engine.run(model, rollout, moves=True)
        except Refused as error:
            refused = error
    if not all_agree(refused is None, where):
        generators.set_back()
        raise refused or Refused("another rank cannot")
    return found


def _aside(
    model: Any, shared: bool, ids: torch.Tensor, config: Any, synced: bool, streamer: Any, given: dict[str, Any]
) -> str | None:
    """Returns why a call of the sampling loop is not served, or None."""
    if synced and not shared:
        return "all ranks have to generate in step"
    if streamer is not None:
        return "its tokens are streamed"
    asked = next((name for name in _RETURNS if getattr(config, name, None)), None)
    if asked is not None:
        return f"{asked} is asked for"
    other = next((name for name, value in given.items() if value not in (None, {}) and name not in _KNOWN), None)
    if other is not None:
        return f"it is given {other}"
    cache = given_cache(given)
    if cache is not None and (type(cache) is not DynamicCache or any(map(states_of, cache.layers))):
        return f"it is given a cache ({type(cache).__name__})"
    if (reason := other_code(model, shared)) is not None:
        return reason
    if torch.is_inference_mode_enabled():
        return "inference mode is on"
    if not shared and any(isinstance(p, DTensor) for p in model.parameters()):
        return "its parameters are spread over ranks"
    if len({p.device for p in model.parameters()}) > 1:
        return "its parameters are on several devices"
    return None


def _prompts(ids: torch.Tensor, given: dict[str, Any]) -> list[tuple[int, ...]]:
    """Returns each row's tokens without padding; the host reads the device once."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if ids.dim() != 2 or not ids.shape[1]:
        raise Refused("its prompts are no ids")
    if mask is not None and mask.shape != ids.shape:
        raise Refused(f"its attention mask has the shape {list(mask.shape)}")
    parts = [ids, torch.ones_like(ids) if mask is None else (mask != 0).to(ids.device)]
    if positions is not None:
        if positions.shape != ids.shape:
            raise Refused(f"its position ids have the shape {list(positions.shape)}")
        parts.append(positions.to(ids.device))
    read = torch.stack([part.long() for part in parts]).cpu().numpy()
    alive = read[1] != 0
    if not alive[:, -1].all():
        raise Refused("its prompts are padded on the right")
    if (alive[:, :-1] & ~alive[:, 1:]).any():
        raise Refused("its attention mask has gaps, which windows and biases by position count")
    counted = alive.cumsum(1) - 1
    if positions is not None and not (read[2] == counted)[alive].all():
        raise Refused("its position ids do not count its tokens")
    return [tuple(row[keep].tolist()) for row, keep in zip(read[0], alive, strict=True)]


def completions(
    model: nn.Module, prompts: Sequence[Sequence[int]], generation_config: GenerationConfig, *, logprobs: bool = False
) -> tuple[list[list[int]], list[list[float]] | None]:
    """Generates a completion for each prompt, for training loops of one's own.

    Args:
        model: a model with kernels that `serve_rollouts` was called for.
        prompts: the ids of each prompt, without padding. Equal ones are computed once.
        generation_config: how tokens are chosen, `max_new_tokens` among it.
        logprobs: whether the log-probabilities of the tokens are returned, under the scores that they were drawn from
            (after temperature, top-k and so on).

    Returns:
        the ids of each completion, the end included, and their log-probabilities or None.

    Raises:
        ValueError: the model is not served, a prompt is empty, or the completions cannot be generated by captured
            steps; the message says why.
    """
    inner = causal_lm(model)[1]
    rollouts = getattr(type(inner), _BY, None)
    if rollouts is None:
        raise ValueError("model must have kernels that serve_rollouts was called for")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts must be non-empty lists of ids, one at least")
    where, width = next(inner.parameters()).device, max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), width, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    asked = _Asked(logprobs)
    token = _asked.set(asked)
    try:
        tokens = inner.generate(ids.to(where), attention_mask=mask.to(where), generation_config=generation_config)
    finally:
        _asked.reset(token)
    if asked.made is None:
        raise ValueError(f"completions cannot be generated by captured steps: {asked.reason}")
    made, found = asked.made
    counts = made.tolist()
    rows = [row[:n] for row, n in zip(tokens[:, width:].tolist(), counts, strict=True)]
    return rows, None if found is None else [row[:n] for row, n in zip(found.tolist(), counts, strict=True)]
