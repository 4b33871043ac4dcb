#!/usr/bin/env bash
# Guess: a new transformers trains every family that the one before it trained; its own tests call each model.
# Seen with transformers 5.24.0: `Llama4ForConditionalGeneration.forward` reads `outputs.image_outputs` of what its language
# model returns, which has no such field, so every call of Llama 4 with its vision part raises AttributeError, also for
# text alone. With 5.23.0 the same call returns a loss. `Llama4ForCausalLM` works with both.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/pip" install -q --no-deps --target "$folder/before" transformers==5.23.0
cat > "$folder/llama4.py" <<'PYTHON'
import sys

import torch
import transformers as t

text = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2, pad_token_id=0,
)
vision = dict(
    hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
    vision_output_dim=32, projector_input_dim=32, projector_output_dim=32,
)
config = t.Llama4Config(text_config=text, vision_config=vision, image_token_index=63)
ids = torch.arange(1, 9)[None]
print(t.__version__, "text alone: loss", t.Llama4ForCausalLM(config.text_config)(input_ids=ids, labels=ids).loss.item())
try:
    loss = t.Llama4ForConditionalGeneration(config)(input_ids=ids, labels=ids, use_cache=False).loss.item()
    print(t.__version__, "with the vision part: loss", loss)
except AttributeError as error:
    print(t.__version__, "with the vision part: AttributeError:", error)
    sys.exit("image_outputs" not in str(error) or t.__version__ != "5.24.0")
sys.exit(t.__version__ != "5.23.0")
PYTHON
export HF_HUB_OFFLINE=1
PYTHONPATH="$folder/before" "$folder/venv/bin/python" "$folder/llama4.py"
"$folder/venv/bin/python" "$folder/llama4.py"
