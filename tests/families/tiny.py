"""A tiny model of any family, made from its configuration class.

Nothing here is a list of models. The configuration's own defaults are shrunk attribute by attribute, by what the
attributes are called (`_SIZES`), through all sub-configurations; a list with one entry for each layer loses the layers
that repeat others; token ids move into the small vocabulary. What no rule serves is in `_EXCEPTIONS`, each with its
reason. Weights are random and of a size at which every parameter counts in the loss, and nothing is dropped out.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from npu_trainer_kernels.patching.probe.miniature import kept_layers, names_layers, per_layer

__all__ = [
    "LEFT_OUT",
    "VARIANTS",
    "VOCABULARY",
    "batch",
    "families",
    "model_class",
    "padded",
    "tiny_config",
    "tiny_model",
]

VOCABULARY = 320
_TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
# An attribute that matches is cut down to the value, the first pattern counts. What matches nothing stays.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(vocab_size_base|hash_byte_group_vocab)$", 64),
    (r"(num_embeddings|codebook_size|mel_vocab_size|num_centroids|audio_vocab_size)$", 64),
    (r"(type|task_type|pronunciation|shape)_vocab_size$", 8),
    (r"vocab_size", VOCABULARY),
    (r"(max_position_embeddings|n_positions|max_seq_len|n_ctx|context_length|max_(source|target)_positions)$", 256),
    (r"(position_embedding_size|max_2d_position_embeddings)$", 256),
    (r"(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|index_head_dim)$", 16),
    (r"(q|kv|o|gated_norm)_?lora_rank$|_rank$|hc_lowrank$", 16),
    (r"(head_dim|headdim|head_size|d_head|d_kv|dim_head|key_head_dim|value_head_dim|kv_channels|rotary_dim)$", 16),
    (r"(linear_num_key_heads|key_value_heads|kv_heads|kv_n_heads)$", 2),
    (r"mamba_(n_|num_)?heads$", 8),
    (r"(num_|n_|attention_)?heads$|^n_head$|attention_heads_per_layer$|num_attention_heads$", 4),
    (r"(num_hidden_layers|num_layers|n_layers?|depth|(encoder|decoder)_layers|layers|num_blocks)$", 2),
    (r"resampler_depth$|num_(encoder|decoder|lstm|stack)_layers$|num_layers_per_stack$|conf_num_hidden_layers$", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num)$", 4),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|topk_group)$", 2),
    (r"(n_group|num_expert_group)$", 2),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", 1),
    (r"(sliding_window|window_size|local_attention|attention_chunk_size|attention_window_size|window_len)$", 8),
    (r"(index_topk)$", 8),
    (r"(state_size|d_state)$", 16),
    (r"^(mamba_)?chunk_size$", 8),
    (r"(intermediate_size|ffn_dim|d_ff|dff|n_inner|ffn_hidden_size|dim_ff|mlp_dim|expert_dim|d_inner)$", 96),
    (r"(intermediate_size_mlp|feed_forward_size)$", 96),
    (r"(hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_size|embedding_dim|hidden_dim|hidden_size_global)$", 64),
    (r"(projection_dim|projector_(input|output)_dim|output_dim|vision_output_dim|lru_width|proj_dim|out_dim)$", 64),
    (r"num_query_tokens$|latent_query_num$", 4),
    (r"base_channels$", 32),
    (r"adapter_(in|out)_dim$|adapter_input_size$", 64),
    (r"image_size$|resolution$", 112),
)  # fmt: skip
_DROPPED = re.compile(r"drop|jitter|pdrop|mask_time_prob")
_TOKEN = re.compile(r"(token_id|token_index|_index|_id|token_ids)$")
_SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}


def families() -> Iterator[tuple[str, str]]:
    """Every (task, model type) that the installed transformers knows; a class of both tasks once.

    What `LEFT_OUT` names is not among them, and what `VARIANTS` names follows its model type.
    """
    seen = set()
    for task, names in _TASKS.items():
        for kind, name in names.items():
            if kind in LEFT_OUT or (kind, name) in seen:
                continue
            seen.add((kind, name))
            yield task, kind
            if task == "causal":
                yield from ((task, variant) for variant in VARIANTS if variant.split()[0] == kind)


def model_class(task: str, kind: str) -> type[transformers.PreTrainedModel]:
    """The class that the task's mapping names for a model type."""
    return getattr(transformers, _TASKS[task][kind.split()[0]])


def _size(name: str, value: int) -> int:
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return min(value, size)
    return value


class _Tokens:
    """Numbers for the special tokens of one model, each its own, at the end of the vocabulary."""

    def __init__(self) -> None:
        self._next = VOCABULARY
        self._known: dict[int, int] = {}

    def of(self, name: str, value: int) -> int:
        for prefix, number in _SPECIAL.items():
            if name == f"{prefix}_token_id":
                return number
        if value < VOCABULARY // 2:
            return value
        if value not in self._known:
            self._next -= 1
            self._known[value] = self._next
        return self._known[value]


def _layers(config: PretrainedConfig) -> int | None:
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"):
        if isinstance(count := vars(config).get(name), int):
            return count
    return None


def _rotation(value: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Rotation parameters whose sections fill a small head: in proportion, also one level down."""
    new: dict[str, Any] = {}
    for key, item in value.items():
        if key in ("mrope_section", "xdrope_section"):
            head = _WHEN_UNSET["head_dim"] if vars(config).get("head_dim") is None else _small(config, "head_dim")
            half = int(head * value.get("partial_rotary_factor", 1.0)) // 2
            first = [max(1, half * v // sum(item)) for v in item[1:]]
            item = [half - sum(first), *first]
        new[key] = _rotation(item, config) if isinstance(item, dict) else item
    return new


def _small(config: PretrainedConfig, name: str) -> Any:
    given = _EXCEPTIONS.get(type(config).__name__, {})
    return given[name] if name in given else _size(name, vars(config)[name])


def _shrunk(config: PretrainedConfig, tokens: _Tokens) -> dict[str, Any]:
    """The arguments that make a small configuration of this one's class."""
    count = _layers(config)
    kept = kept_layers(config, count) if count is not None else []
    lists = per_layer(config, count) if count is not None else {}
    raw = {f.name: f.default for f in dataclasses.fields(type(config))}
    new: dict[str, Any] = {}
    # A field that is stored by another name.
    aliases = {stored: given for given, stored in type(config).attribute_map.items() if given in raw}
    for stored, value in vars(config).items():
        name = stored if stored in raw else aliases.get(stored, "")
        if name not in raw or name in ("id2label", "label2id", "transformers_version"):
            continue
        if isinstance(value, PretrainedConfig):
            new[name] = _small_copy(value, tokens)
        elif name == "rope_parameters" and isinstance(value, dict):
            new[name] = _rotation(value, config)
        elif value is None and name in _WHEN_UNSET:
            new[name] = _WHEN_UNSET[name]
        elif isinstance(value, bool) or value is None or isinstance(value, str):
            continue
        elif _DROPPED.search(name) and isinstance(value, int | float):
            new[name] = type(value)(0)
        elif _TOKEN.search(name) and isinstance(value, int) and value >= 0:
            new[name] = tokens.of(name, value)
        elif _TOKEN.search(name) and isinstance(value, list | tuple) and all(type(v) is int for v in value):
            new[name] = type(value)(tokens.of(name, v) for v in value)
        elif stored in lists:
            new[name] = type(value)(_size(name, value[i]) if type(value[i]) is int else value[i] for i in kept)
        elif count is not None and names_layers(name, value, count):
            new[name] = type(value)([kept.index(v) for v in value if v in kept] or [len(kept) - 1])
        elif isinstance(value, int) and raw[name] is not None:
            new[name] = len(kept) if value == count and _size(name, value) == 2 else _size(name, value)
    # As many key heads as heads where that is so.
    heads, kv = (vars(config).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads == kv and "num_key_value_heads" in new:
        new["num_key_value_heads"] = new["num_attention_heads"]
    return new


def _small_copy(
    config: PretrainedConfig, tokens: _Tokens, variant: Mapping[str, Any] = MappingProxyType({})
) -> PretrainedConfig:
    given = {**_EXCEPTIONS.get(type(config).__name__, {}), **variant}
    small = type(config)(**{**_shrunk(config, tokens), **given})
    for name, value in vars(small).items():
        if type(value).__name__ in _NEEDS_TIMM:
            vars(small)[name] = _STAND_IN
    return small


# Vision towers of the timm package, which text never reaches, and one that takes their place.
_NEEDS_TIMM = ("TimmWrapperConfig", "Gemma3nVisionConfig")
_STAND_IN = transformers.SiglipVisionConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=112, patch_size=14
)
vars(_STAND_IN).update(model_args={"embed_dim": 64}, rms_norm_eps=1e-6, vocab_size=8, vocab_offset=VOCABULARY)
_MOST_PARAMETERS = 10_000_000
# What a configuration leaves to its checkpoints, and a model cannot be built without.
_WHEN_UNSET: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "top_k_experts": 2,
    "moe_topk": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Sections of the rotation that these models assume for a head of 128, for one of 16.
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_HALF_SECTIONS = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
# Configuration class -> what differs from the rules.
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    # Heads times head size must be the inner width, which is twice the hidden size.
    "Mamba2Config": {"num_heads": 8},
    "FalconH1Config": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    # More heads than groups.
    "NemotronHConfig": {"n_groups": 2},
    # Patterns of layers that are made from a period or left to the checkpoint: one layer of each kind.
    "BambaConfig": {"attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    # Layers that released checkpoints have, and the defaults do not.
    "Lfm2Config": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "MiniMaxM3VLTextConfig": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4, "index_topk_blocks": 2,
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    # The models read what their configurations have no default for.
    "Dots1Config": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [32, 32], "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    },
    "Step3p7TextConfig": {"sliding_window": 8},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2",
    },
    "XmodConfig": {"default_language": "en_XX"},
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds": False, "num_buckets": 4},
    # Codes of images and of sound are tokens, one range behind the other.
    "WavTokenizerEncoderConfig": {"codebook_dim": 64},
    "Apertus1p5Config": {"image_token_offset": 160, "audio_token_offset": 160 + 64},
    # Layers before, in and behind a loop, which has to have a layer.
    "DoryConfig": {
        "num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Blip2Config": {"image_token_index": VOCABULARY - 1},
    "InstructBlipConfig": {"image_token_index": VOCABULARY - 1},
    "InstructBlipVideoConfig": {"video_token_index": VOCABULARY - 1},
    "VisionEncoderDecoderConfig": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "UdopConfig": {"decoder_start_token_id": 1},
    "ChameleonConfig": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "Emu3Config": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    # Values that must go together.
    "Gemma4UnifiedTextConfig": {"num_kv_shared_layers": 0},
    "Glm5NextTextConfig": {"index_kpool": 2},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "RadioConfig": {"video_temporal_patch_size": 2},
    "HunYuanVLTextConfig": _SECTIONS,
    "Cosmos3EdgeTextConfig": _SECTIONS,
    "Qwen2VLTextConfig": _SECTIONS,
    "Qwen2_5_VLTextConfig": _SECTIONS,
    "Qwen2_5OmniTextConfig": _SECTIONS,
    "PaddleOCRTextConfig": _SECTIONS,
    "Glm4vTextConfig": _SECTIONS,
    "Glm4vMoeTextConfig": _HALF_SECTIONS,
    "GlmOcrTextConfig": _SECTIONS,
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    },
    # The default is for generation: it writes over what backward needs.
    "xLSTMConfig": {"mode": "train", "use_cache": False, "qk_dim_factor": 1.0, "chunk_size": 12},
    # Keys may only be used while no cache is asked for.
    "BltConfig": {"use_cache": False},
    # Pyramids, whose levels have sizes of their own.
    "MuseSparkAudioConfig": {"hidden_sizes": (16, 32, 64, 64)},
    "InklingVisionConfig": {"patch_size": 4, "num_hidden_layers": 4},
    "Florence2VisionConfig": {"embed_dim": (16, 16, 32, 64), "num_heads": (2, 2, 4, 4), "num_groups": (2, 2, 4, 4)},
}  # fmt: skip
# Model type -> arguments without which its default configuration cannot be made.
_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}


# Model types that cannot be trained on tokens by themselves, and why.
LEFT_OUT = {
    "gemma4_assistant": "drafts for another model, whose keys and values it takes",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it takes",
    "pi0": "predicts a robot's actions, not tokens",
}
# Options that change the code which runs, beside the defaults: "model type option" -> what is set.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4_text num_kv_shared_layers": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    },
    "falcon_h1 mamba_rms_norm": {"mamba_rms_norm": True},
    "mamba2 n_groups=1": {"n_groups": 1},
    "nemotron_h n_groups=1": {"n_groups": 1},
    "phi3 partial_rotary_factor": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "deepseek_v3 rope_interleave=False": {"rope_interleave": False},
    "mixtral output_router_logits": {"output_router_logits": True},
    "llama biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "granite multipliers": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
    },
}  # fmt: skip


@functools.cache
def _default_config(kind: str) -> PretrainedConfig:
    return configuration_auto.CONFIG_MAPPING[kind](**_NEEDED.get(kind, {}))


def tiny_config(task: str, kind: str) -> PretrainedConfig:
    """The small configuration that a family's model takes: its own, or that of its text part."""
    default, cls = _default_config(kind.split()[0]), model_class(task, kind).config_class
    if type(default) is not cls:
        default = next((v for v in vars(default).values() if type(v) is cls), default)
    return _small_copy(default, _Tokens(), VARIANTS.get(kind, {}))


def tiny_model(task: str, kind: str) -> transformers.PreTrainedModel:
    """A model of the family in training mode, its weights random, the same every time."""
    torch.manual_seed(0)
    cls, config = model_class(task, kind), tiny_config(task, kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"the rules make no tiny model of {kind}: {size:,} parameters; allowed: {_MOST_PARAMETERS:,}")
    model = cls(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def batch(model: Any) -> dict[str, torch.Tensor]:
    """What the model is trained on: token ids with labels, the first few of each row ignored; where a family takes no
    text alone, what it wants beside, also random."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY // 2, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    more = _INPUTS.get(model.config.model_type)
    inputs = {"input_ids": ids, "labels": labels}
    return inputs if more is None else more(model.config, inputs)


# First column, and the one after the last, of the rows of a padded batch; the last has one token.
_ROWS = ((5, 24), (5, 17), (5, 22), (0, 24), (0, 11), (3, 15), (23, 24))


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same as a batch with padding on the left, on the right and on both sides. Text alone is longer, and has rows
    that begin alike, three of them and two of those for longer; what is given beside text keeps its places."""
    if set(inputs) != {"input_ids", "labels"} or inputs["input_ids"].shape != inputs["labels"].shape:
        if "input_ids" not in inputs or inputs["input_ids"].shape != inputs["labels"].shape:
            raise ValueError("the family is given no text")
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, 9:] = 0
        return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY // 2, (len(_ROWS), 24), generator=generator)
    ids[1, 5:15], ids[2, 5:14], ids[4, :10] = ids[0, 5:15], ids[0, 5:14], ids[3, :10]
    mask = torch.zeros_like(ids)
    for row, (begin, end) in enumerate(_ROWS):
        mask[row, begin:end] = 1
    labels = ids.masked_fill(mask == 0, -100)
    # What predicts the first token of a row is padding.
    labels[torch.arange(len(ids)), mask.argmax(1)] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _image(config: Any, *shape: int) -> torch.Tensor:
    size = getattr(config, "image_size", 112)
    size = size if isinstance(size, int) else size[0]
    return torch.randn(2, *shape, 3, size, size, generator=torch.Generator().manual_seed(2))


def _with_image_tokens(config: Any, inputs: dict[str, Any], *shape: int) -> dict[str, Any]:
    ids = inputs["input_ids"].clone()
    ids[:, : config.num_query_tokens] = VOCABULARY - 1
    return {**inputs, "input_ids": ids, "pixel_values": _image(config.vision_config, *shape)}


def _codes(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Musicgen's decoder: one sequence for each codebook."""
    codes = torch.randint(0, 64, (2 * config.num_codebooks, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": codes, "labels": codes.view(2, config.num_codebooks, 12).transpose(1, 2).contiguous()}


def _query(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"qformer_input_ids": inputs["input_ids"]}


def _patches(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    width = 2 + config.vision_config.patch_embed_hidden_size
    patches = torch.rand(2, 6, width, generator=torch.Generator().manual_seed(2)).add_(1.0)
    return {"flattened_patches": patches, "labels": inputs["labels"]}


_INPUTS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "blip": lambda config, inputs: {**inputs, "pixel_values": _image(config.vision_config)},
    "blip-2": _with_image_tokens,
    "instructblip": lambda config, inputs: {**_with_image_tokens(config, inputs), **_query(config, inputs)},
    "instructblipvideo": lambda config, inputs: {**_with_image_tokens(config, inputs, 1), **_query(config, inputs)},
    "git": lambda config, inputs: {**inputs, "pixel_values": _image(config.vision_config)},
    "idefics": lambda config, inputs: {
        **inputs, "pixel_values": _image(config.vision_config, 1), "image_attention_mask": torch.ones(2, 12, 1),
    },
    "kosmos-2": lambda config, inputs: {
        **inputs, "image_embeds": torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(2)),
        "image_embeds_position_mask": (torch.arange(12) < 4).expand(2, 12),
    },
    "molmo2": lambda config, inputs: {**inputs, "mm_token_type_ids": torch.zeros_like(inputs["input_ids"])},
    "musicgen_decoder": _codes,
    "musicgen_melody_decoder": _codes,
    "pix2struct": _patches,
    "pp_formulanet": lambda config, inputs: {
        "pixel_values": _image(config.vision_config), "decoder_input_ids": inputs["input_ids"],
        "labels": inputs["labels"],
    },
    "udop": lambda config, inputs: {**inputs, "bbox": torch.full((2, 12, 4), 0.5)},
    "vision-encoder-decoder": lambda config, inputs: {
        "pixel_values": _image(config.encoder), "labels": inputs["labels"],
    },
}  # fmt: skip
