#!/usr/bin/env bash
# Guess: where transformers 5.24.0 is installed, `pip install 'transformers[kernels]'` adds the package kernels to it.
# Seen with kernels up to 0.17.2: 5.23 and 5.24 ask for a newer one in that extra, so pip takes the newest transformers whose
# extra can be met, 5.22.2, and exits 0. With the version named, as in 'transformers[kernels]==5.24.0', it says what is missing.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/pip"
"$pip" install -q --no-deps transformers==5.24.0
echo 'kernels<=0.17.2' > "$folder/constraints.txt"
echo 'transformers<=5.24.0' >> "$folder/constraints.txt"
"$pip" install -q --dry-run --report "$folder/report.json" --only-binary=:all: -c "$folder/constraints.txt" 'transformers[kernels]'
"$folder/venv/bin/python" - "$folder/report.json" <<'PYTHON'
import json
import sys

report = json.load(open(sys.argv[1]))
found = {each["metadata"]["name"]: each["metadata"]["version"] for each in report["install"]}
print("installed: 5.24.0; would install:", {name: found[name] for name in ("transformers", "kernels") if name in found})
assert found.get("transformers") == "5.22.2", "no longer as described"
PYTHON
