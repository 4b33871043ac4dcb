"""Sampling on the device, as transformers' own list of logits processors says.

`generate` makes that list from the merged configuration. A processor that looks at scores alone is called as it is, if
a device's graph can hold its code. One that looks at the tokens so far has another form here, since a row's tokens are
not in one tensor: it is told how many tokens the row has made, which ids it has seen, or its last ids. A processor of
another class is declined by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import generation
from transformers.generation import logits_process as hf

from ..capture import Refused

__all__ = ["Sampling", "sampling_of"]

_BY_SCORES = tuple(
    getattr(hf, name) for name in (
        "TemperatureLogitsWarper", "TopKLogitsWarper", "MinPLogitsWarper", "EpsilonLogitsWarper",
        "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization",
    ) if hasattr(hf, name)
)  # fmt: skip


@dataclass
class Sampling:
    """How the next token is chosen.

    Attributes:
        draws: whether it is drawn; otherwise it is the likeliest one.
        steps: functions from scores [B, V] and a `Seen` to scores, in order.
        key: compares equal for two of them whose captured code is the same.
        tensors: the tensors that the code reads.
        eos: the ids that end a row, or None.
        pad: the id that follows in a row that has ended.
        tail: how many of a row's last ids are looked at.
        ids: whether it is asked which ids a row has seen.
        least: how many tokens a row must make before it may end.
    """

    draws: bool
    steps: list[Callable[[torch.Tensor, Any], torch.Tensor]] = field(default_factory=list)
    key: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    eos: tuple[int, ...] = ()
    pad: int = 0
    tail: int = 0
    ids: bool = False
    least: int = 0

    def scores(self, logits: torch.Tensor, seen: Any) -> torch.Tensor:
        """Returns the scores of the next token, [B, V]."""
        for step in self.steps:
            logits = step(logits, seen)
        return logits


def _removed(scores: torch.Tensor, order: torch.Tensor, remove: torch.Tensor, value: float) -> torch.Tensor:
    """Sets those scores to `value` which `remove` marks in the given order."""
    return scores.masked_fill(remove.scatter(1, order, remove), value)


def _top_p(each: Any) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    def step(scores: torch.Tensor, seen: Any) -> torch.Tensor:
        ordered, order = scores.sort(descending=False)
        kept = torch.arange(scores.shape[-1], device=scores.device) >= scores.shape[-1] - each.min_tokens_to_keep
        remove = (ordered.softmax(-1).cumsum(-1) <= 1 - each.top_p) & ~kept
        return _removed(scores, order, remove, each.filter_value)

    return step


def _typical(each: Any) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    def step(scores: torch.Tensor, seen: Any) -> torch.Tensor:
        logs = scores.log_softmax(-1)
        entropy = -(logs * logs.exp()).nansum(-1, keepdim=True)
        ordered, order = (-logs - entropy).abs().sort(descending=False)
        mass = scores.gather(-1, order).softmax(-1).cumsum(-1)
        last = (mass < each.mass).sum(1).clamp(max=scores.shape[-1] - 1)
        kept = torch.arange(scores.shape[-1], device=scores.device) < each.min_tokens_to_keep
        remove = (ordered > ordered.gather(1, last[:, None])) & ~kept
        return _removed(scores, order, remove, each.filter_value)

    return step


def _eta(each: Any) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    epsilon, root = float(each.epsilon), float(each.epsilon.sqrt())

    def step(scores: torch.Tensor, seen: Any) -> torch.Tensor:
        p = scores.softmax(-1)
        logs = (scores - scores.logsumexp(-1, keepdim=True)).clamp(min=torch.finfo(scores.dtype).min)
        least = (root * (logs * p).sum(-1).exp()).clamp(max=epsilon)[:, None]
        kept = scores >= scores.topk(min(each.min_tokens_to_keep, scores.shape[-1])).values[:, -1:]
        return scores.masked_fill((p < least) & ~kept, each.filter_value)

    return step


_BY_CONSTANTS = {hf.TopPLogitsWarper: _top_p, hf.TypicalLogitsWarper: _typical, hf.EtaLogitsWarper: _eta}
"""The code of these makes tensors of constants on the host, which a graph does not hold."""


def _value(value: Any) -> Any:
    return (tuple(value.shape), *value.flatten().tolist()) if isinstance(value, torch.Tensor) else value


def sampling_of(
    processors: Iterable[Any],
    criteria: Iterable[Any],
    config: Any,
    width: int,
    lengths: Sequence[int],
    vocabulary: int,
    device: torch.device,
) -> tuple[Sampling, int]:
    """Returns how tokens are chosen, and the number of tokens that each row may make.

    Args:
        processors, criteria: those that `generate` has made.
        config: the merged configuration of the generation.
        width: the number of columns of the prompts, padding included.
        lengths: the number of tokens of each prompt.
        vocabulary: the number of ids.
        device: where the scores are.

    Raises:
        Refused: one of them is of a class that is not known here.
    """
    made = Sampling(bool(config.do_sample))
    most = None
    for each in criteria:
        _check_code(each)
        if type(each) is generation.MaxLengthCriteria:
            most = each.max_length - width if most is None else min(most, each.max_length - width)
        elif type(each) is generation.EosTokenCriteria:
            made.eos += tuple(each.eos_token_id.flatten().tolist())
        else:
            raise Refused(f"{type(each).__name__} decides when a row ends")
    if most is None:
        raise Refused("no length ends a row")
    pad = getattr(config, "_pad_token_tensor", None)
    made.pad = 0 if pad is None else int(pad)
    if made.eos and pad is None:
        raise Refused("there is no padding id to follow the end of a row")
    for each in processors:
        _check_code(each)
        _add(made, each, width, lengths, vocabulary, device)
    return made, most


def _check_code(each: Any) -> None:
    """Raises Refused if a class of transformers has been given another `__call__`."""
    kind = type(each)
    home = getattr(kind.__call__, "__globals__", {}).get("__name__")
    if kind.__module__.startswith("transformers.") and home != kind.__module__:
        raise Refused(f"other code is the __call__ of {kind.__name__}")


def _add(made: Sampling, each: Any, width: int, lengths: Sequence[int], vocabulary: int, device: torch.device) -> None:
    kind = type(each)
    if kind in _BY_SCORES:
        made.tensors += [value for value in vars(each).values() if isinstance(value, torch.Tensor)]
        made.key.append((kind, *((name, _value(value)) for name, value in vars(each).items())))
        made.steps.append(lambda scores, seen: each(None, scores))
    elif kind in _BY_CONSTANTS:
        made.key.append((kind, *((name, _value(value)) for name, value in vars(each).items())))
        made.steps.append(_BY_CONSTANTS[kind](each))
    elif kind in (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor):
        skipped = getattr(each, "prompt_length_to_skip", 0)
        made.least = max(made.least, getattr(each, "min_length", getattr(each, "min_new_tokens", 0)) + skipped - width)
        early = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        early[each.eos_token_id.flatten().to(device)] = True
        made.tensors.append(early)
        made.key.append((kind, _value(each.eos_token_id)))
        made.steps.append(
            lambda scores, seen: scores.masked_fill((seen.made < seen.least)[:, None] & early, float("-inf"))
        )
    elif kind is hf.RepetitionPenaltyLogitsProcessor and _ignores_padding(each, width, lengths):
        penalty, made.ids = each.penalty, True
        made.key.append((kind, penalty))
        made.steps.append(
            lambda scores, seen: torch.where(
                seen.ids, torch.where(scores < 0, scores * penalty, scores / penalty), scores
            )
        )
    elif kind is hf.ForcedEOSTokenLogitsProcessor:
        last = each.max_length - width - 1
        forced = torch.full((vocabulary,), float("-inf"), device=device)
        forced[each.eos_token_id.flatten().to(device)] = 0.0
        made.tensors.append(forced)
        made.key.append((kind, last, _value(each.eos_token_id)))
        made.steps.append(lambda scores, seen: torch.where((seen.made == last)[:, None], forced, scores))
    elif kind in (hf.SequenceBiasLogitsProcessor, hf.NoBadWordsLogitsProcessor):
        _add_bias(made, each, vocabulary, device)
    else:
        raise Refused(f"{kind.__name__} processes its scores")


def _ignores_padding(each: Any, width: int, lengths: Sequence[int]) -> bool:
    """Whether a penalty looks at all tokens of a row and, if at anything else, at padding alone."""
    ignored = getattr(each, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):
        return ignored.flatten().tolist() == [width - n for n in lengths]
    return not ignored


def _add_bias(made: Sampling, each: Any, vocabulary: int, device: torch.device) -> None:
    alone = torch.zeros(vocabulary, dtype=torch.float32, device=device)
    longer: list[tuple[torch.Tensor, int, float]] = []
    for ids, bias in each.sequence_bias.items():
        if len(ids) == 1:
            alone[ids[0]] = bias
        else:
            longer.append((torch.tensor(ids[:-1], device=device), ids[-1], bias))
    made.tail = max([made.tail, *(len(begin) for begin, _, _ in longer)])
    made.tensors += [alone, *(begin for begin, _, _ in longer)]
    made.key.append((type(each), tuple(each.sequence_bias.items())))

    def step(scores: torch.Tensor, seen: Any) -> torch.Tensor:
        scores = scores + alone
        for begin, last, bias in longer:
            same = (seen.tail[:, -len(begin) :] == begin).all(1)
            column = scores[:, last : last + 1]
            scores = scores.index_copy(1, begin.new_full((1,), last), torch.where(same[:, None], column + bias, column))
        return scores

    made.steps.append(step)
