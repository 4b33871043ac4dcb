#!/usr/bin/env bash
# Guess: transformers keeps the parts of a packed row apart (position_ids that begin again, no mask), whatever the model,
# and whether the forward is asked for a cache or not: its masks are made from position_ids.
# Seen with transformers 5.24.0 (sdpa, CPU): Llama does so with use_cache=False. By default (use_cache=True) its second part
# attends to the first. GPT-OSS mixes the parts in both cases. No warning says so; the loss is another one.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, pad_token_id=0)  # fmt: skip
torch.manual_seed(0)
models = {
    "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
    "GptOss": transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)),
}
first, second = torch.arange(3, 12)[None], torch.arange(20, 29)[None]
row = torch.cat((first, second), 1)
positions = torch.cat((torch.arange(9), torch.arange(9)))[None]
found = {}
for name, model in models.items():
    model.eval()
    with torch.no_grad():
        alone = model(second, use_cache=False).logits
        for use_cache in (False, True):
            packed = model(row, position_ids=positions, use_cache=use_cache).logits[:, 9:]
            found[name, use_cache] = bool((packed - alone).abs().max() < 1e-4)
            print(transformers.__version__, name, f"use_cache={use_cache}: parts are kept apart: {found[name, use_cache]}")
expected = {("Llama", False): True, ("Llama", True): False, ("GptOss", False): False, ("GptOss", True): False}
assert found == expected, "no longer as described"
PYTHON
