"""A tiny model of a class, from the configuration of a large one: its code runs in a moment on a CPU.

Sizes are reduced by the names of the configuration's attributes; a list with an entry for each layer loses the layers
that repeat others. Weights are random and large enough that every parameter affects the result.
"""

import contextlib
import copy
import itertools
import re
from typing import Any

import torch
from torch import nn

__all__ = ["VOCABULARY", "kept_layers", "miniature", "miniature_around", "names_layers", "per_layer", "small_config"]

VOCABULARY = 61
_HEAD = 16
# An attribute that matches is reduced to the value; the first pattern counts. All other attributes stay.
_SIZES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), size)
    for pattern, size in (
        (r"vocab_size", VOCABULARY),
        (r"(max_position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len)$", 192),
        (r"(hidden_size|d_model|n_embd|embedding_dim|hidden_size_per_layer_input|word_embed_proj_dim)$", 64),
        (r"(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|intermediate_size_mlp)$", 48),
        (r"(head_dim|headdim|head_size|d_head|d_kv|kv_channels|rotary_dim|v_dim)$|(^|_)rank$", _HEAD),
        (r"(sliding_window|window_size|attention_chunk_size|chunk_size|state_size|d_state)$", 8),
        # The probe's rows have more blocks, keys and experts than a token chooses.
        (
            r"(key_value_heads|kv_heads|kv_n_heads|num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k"
            r"|top_k_experts|topk_group|n_group|num_expert_group|index_topk|index_topk_blocks)$",
            2,
        ),
        (r"(heads|num_experts|num_local_experts|n_routed_experts|moe_num_experts|block_size)$|^n_head$", 4),
        (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", 1),
    )
)
_CAP, _CAPPED = re.compile(r"softcap|logit_cap"), 0.5  # reached by scores
_SHARED = re.compile(r"shared_layers$")  # how many of the last layers use the keys of earlier ones
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
# The number and the size of a state's heads, which are the hidden size times a factor.
_STATES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("num_heads", "head_dim", "expand"),
)
_DROPPED = re.compile(r"drop|jitter")
_TOKEN = re.compile(r"_token_id$")
_MOST_LAYERS = 8


def names_layers(name: str, value: Any, count: int) -> bool:
    """Whether a list holds indices of layers, and not one value for each."""
    numbers = isinstance(value, list | tuple) and len(value) > 0 and all(type(v) is int for v in value)
    rising = numbers and all(a < b for a, b in itertools.pairwise(value)) and value[0] >= 0
    return rising and value[-1] < count and ("layer" in name or "idx" in name or "index" in name)


def per_layer(config: Any, count: int) -> dict[str, Any]:
    """Returns the lists of a configuration that have one entry for each of its layers."""
    lists = {n: v for n, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == count > 2}
    return {n: v for n, v in lists.items() if not names_layers(n, v, count)}


def _shared(config: Any, count: int) -> list[tuple[str, int]]:
    """Returns how many of the last layers share what earlier ones compute, by the attribute that says so."""
    found = ((n, v) for n, v in vars(config).items() if _SHARED.search(n) and type(v) is int)
    return [(name, value) for name, value in found if 0 < value < count]


def kept_layers(config: Any, count: int, most: int = _MOST_LAYERS) -> list[int]:
    """Returns the layers to keep, at least two: the first of each kind, by every list that has one entry for each
    layer, and by whether they share what earlier ones compute."""
    own = count - sum(value for name, value in _shared(config, count))
    lists = [*per_layer(config, count).values(), [i < own for i in range(count)]]
    seen, kept = set(), []
    for i in range(count):
        kind = tuple(str(v[i]) for v in lists)
        if kind not in seen:
            seen.add(kind)
            kept.append(i)
    others = [i for i in range(count) if i not in kept]
    return sorted(kept + others[: max(0, 2 - len(kept))])[:most]


def _unscaled(rotation: Any, head: int) -> Any:
    """Returns rotation parameters without those made for one size of heads."""
    if not isinstance(rotation, dict):
        return rotation
    kept = {name: _unscaled(v, head) for name, v in rotation.items() if not isinstance(v, list | tuple)}
    if "rope_type" in kept:
        kept["rope_type"] = "default"
    if "mrope_section" in rotation:
        half = int(head * rotation.get("partial_rotary_factor", 1.0)) // 2
        rest = [max(1, half * v // sum(rotation["mrope_section"])) for v in rotation["mrope_section"][1:]]
        kept["mrope_section"] = [half - sum(rest), *rest]
    return kept


def small_config(config: Any) -> Any:
    """Returns a copy of a configuration with small sizes."""
    small = copy.deepcopy(config)
    count = next((n for name in _LAYERS if type(n := vars(config).get(name)) is int), 0)
    kept = kept_layers(config, count)
    lists = per_layer(config, count)
    for name, value in vars(config).items():
        if isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            vars(small)[name] = _unscaled(value, _HEAD) if name == "rope_parameters" else None
        elif name in lists:
            vars(small)[name] = type(value)(value[i] for i in kept)
        elif names_layers(name, value, count):
            vars(small)[name] = type(value)([kept.index(v) for v in value if v in kept] or [len(kept) - 1])
        elif _DROPPED.search(name) and isinstance(value, float):
            vars(small)[name] = 0.0
        elif _CAP.search(name) and isinstance(value, float):
            vars(small)[name] = min(value, _CAPPED)
        elif type(value) is not int:
            continue
        elif _TOKEN.search(name):
            vars(small)[name] = min(value, 2)
        elif name in _LAYERS:
            vars(small)[name] = len(kept)
        else:
            size = next((size for pattern, size in _SIZES if pattern.search(name)), value)
            vars(small)[name] = min(value, size)
    for name, value in _shared(config, count):
        vars(small)[name] = sum(i >= count - value for i in kept)
    # If the original has as many key heads as heads, so has the copy: there may be no number of groups then.
    heads, kv = (vars(config).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads == kv and heads is not None:
        vars(small)["num_key_value_heads"] = vars(small)["num_attention_heads"]
    # A body has no head, and a miniature of Zamba has none of the layers that share their weights twice.
    small.tie_word_embeddings = False
    # Zamba 2's attention reads hidden states beside embeddings.
    if {"attention_hidden_size", "attention_head_dim"} <= set(vars(config)):
        small.attention_hidden_size = config.attention_hidden_size * small.hidden_size // config.hidden_size
        small.attention_head_dim = small.attention_hidden_size // small.num_attention_heads
    for heads_of_state, size_of_head, factor in _STATES:
        if all(type(vars(config).get(name)) is int for name in (heads_of_state, size_of_head, factor)):
            inner = vars(small)[factor] * small.hidden_size
            vars(small)[heads_of_state] = inner // vars(small)[size_of_head]
            if vars(config).get("mamba_d_ssm") is not None:
                small.mamba_d_ssm = inner
    return small


@contextlib.contextmanager
def _in_single() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would seed every accelerator too, and change the random numbers of a run there.
            torch.default_generator.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)


def miniature_around(cls: Any, config: Any, path: str, inner: Any) -> Any:
    """Returns a model of a class around a miniature at `path`; the rest of it is on the meta device.

    Raises:
        Exception: whatever the class raises.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        outer = cls(config)
    parent, _, name = path.rpartition(".")
    setattr(outer.get_submodule(parent), name, inner)
    return outer.eval()


def miniature(cls: Any, config: Any) -> Any:
    """Returns a model of a class on the CPU, in fp32, for inference. The random state stays as it is.

    Raises:
        Exception: whatever the class raises for so small a configuration.
    """
    with _in_single(), torch.no_grad():
        model = cls(config)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.copy_(torch.randn(module.weight.shape))
    return model.float().eval()
