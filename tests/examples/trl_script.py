"""One of TRL's scripts in a process that has imported transformers: with what `npu-kernels run` does in it beforehand.

python -m tests.examples.trl_script sft --config sft.yaml
"""

import runpy
import sys

import transformers.trainer

from npu_trainer_kernels import run

if __name__ == "__main__":
    run.put_into(transformers.trainer, lambda: None)
    name = f"trl.scripts.{sys.argv.pop(1)}"
    runpy.run_module(name, run_name="__main__", alter_sys=True)
