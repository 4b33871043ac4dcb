"""Runs an example on ranks that `accelerate launch` has started, on CPUs, and says what wrapped its model.

Usage: accelerate launch --config_file FILE ... -m tests.distributed.launched EXAMPLE [ITS ARGUMENTS]

Rank 0 writes wrapped.json to the output folder.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer

from tests.distributed.ranks import end_ranks, without_compiled_operators


def main(script: str, *arguments: str) -> None:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        without_compiled_operators()
    prepare, step = Trainer.create_accelerator_and_postprocess, Trainer.training_step

    def create_accelerator_and_postprocess(self: Trainer) -> None:
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            # For ranks on CPUs accelerate does not look for FSDP's settings (`AcceleratorState.__init__`), so they pass
            # for ranks of another kind. Everything else stays on the CPU.
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        prepare(self)

    def training_step(self: Trainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_world_process_zero():
            Path(self.args.output_dir, "wrapped.json").write_text(json.dumps(type(model).__name__))
        return step(self, model, *args, **kwargs)

    Trainer.create_accelerator_and_postprocess = create_accelerator_and_postprocess
    Trainer.training_step = training_step
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    end_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
