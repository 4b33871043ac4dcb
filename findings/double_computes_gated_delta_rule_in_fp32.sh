#!/usr/bin/env bash
# Guess: `model.double()` computes in fp64, so it is a truth to compare fp32 gradients with.
# Seen with transformers 5.24.0: the torch code of Qwen3.5's gated delta rule (torch_chunk_gated_delta_rule) casts queries,
# keys, values, beta and the gate to fp32 inside, whatever it is given. With fp64 arguments its result differs from the
# recurrence in fp64 by about 1e-7 of it, as with fp32 arguments.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

torch.manual_seed(0)
n, heads, d = 96, 2, 8
q, k, v = (torch.randn(1, n, heads, d, dtype=torch.float64) for _ in range(3))
q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
g, beta = -torch.rand(1, n, heads, dtype=torch.float64), torch.rand(1, n, heads, dtype=torch.float64)

# S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q / sqrt(d)
state, rows = torch.zeros(heads, d, d, dtype=torch.float64), []
for i in range(n):
    state = state * g[0, i].exp()[:, None, None]
    seen = torch.einsum("hkv,hk->hv", state, k[0, i])
    state = state + torch.einsum("hk,hv->hkv", k[0, i], beta[0, i][:, None] * (v[0, i] - seen))
    rows.append(torch.einsum("hkv,hk->hv", state, q[0, i]) / d**0.5)
truth = torch.stack(rows)[None]
errors = {}
for dtype in (torch.float64, torch.float32):
    out, _ = torch_chunk_gated_delta_rule(*(t.to(dtype) for t in (q, k, v)), g=g.to(dtype), beta=beta.to(dtype))
    errors[dtype] = ((out.double() - truth).norm() / truth.norm()).item()
    print(transformers.__version__, f"arguments of {dtype}: error {errors[dtype]:.1e}, result of {out.dtype}")
assert all(1e-9 < error < 1e-5 for error in errors.values()), "no longer as described"
PYTHON
