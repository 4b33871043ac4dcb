#!/usr/bin/env bash
# Guess: on a CPU, Tensor.scatter_ of one number into each row of a matrix touches one number a row, whatever the dtype.
# Seen with torch 2.13.0: in float32 it allocates nothing; in bfloat16 and float16 it allocates an fp32 copy of the whole
# matrix (97 MiB for 512 x 50000), and reads and writes all of it. Indexed assignment of the same numbers does not.
# Who scatters into two-byte logits in place pays for a pass over all of them.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import torch

torch.set_num_threads(1)
rows, columns = 512, 50000


def peak(call):
    """Returns the largest sum of live allocations during a call, in MiB."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most >> 20


index = torch.zeros(rows, 1, dtype=torch.long)
found = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    matrix, values = torch.zeros(rows, columns, dtype=dtype), torch.ones(rows, 1, dtype=dtype)
    assigned = matrix.clone()
    scattered = peak(lambda: matrix.scatter_(1, index, values))
    indexed = peak(lambda: assigned.index_put_((torch.arange(rows), index[:, 0]), values[:, 0]))
    assert torch.equal(matrix, assigned)
    found[dtype] = scattered, indexed
    print(torch.__version__, dtype, f"scatter_ {scattered} MiB, index_put_ {indexed} MiB")
assert found == {torch.float32: (0, 0), torch.bfloat16: (97, 0), torch.float16: (97, 0)}, "no longer as described"
PYTHON
