"""Which families generate by captured steps, with the tokens of `generate`.

`python -m tests.families.rollouts [MODEL_TYPE ...]` makes the tiny model of each causal family and compares greedy
tokens of prompts of unequal lengths, two of them equal, with those of `generate` on each prompt alone; the steps are
tapes. A row of other tokens is held to the model's forward over all tokens, without a cache.
"""

import argparse
import copy
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
import transformers
from transformers import GenerationConfig

from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.rollouts import serve_rollouts

from .captured import _OPS, _own_experts
from .compare import raised
from .tiny import VOCABULARY, families, model_class, tiny_config, tiny_model

__all__ = ["LENGTHS", "TOKENS", "Outcome", "generated"]

LENGTHS, TOKENS = (11, 5, 8, 11), 8
# On a device, steps are its graphs, and kernels are those of the device.
_WHERE = torch.device(os.environ.get("NPU_KERNELS_TEST_DEVICE") or "cpu")


@dataclass
class Outcome:
    """What came of one family.

    Attributes:
        served: whether captured steps generated.
        own: whether the model's own code attended in them.
        reasons: why `generate` did.
        wrong: how the tokens differ, or empty.
        unfit: why `generate` itself does not run, or empty.
    """

    served: bool = False
    own: bool = False
    reasons: list[str] = field(default_factory=list)
    wrong: str = ""
    unfit: str = ""

    def __str__(self) -> str:
        if self.wrong or self.unfit:
            return f"WRONG: {self.wrong}" if self.wrong else f"not compared: {self.unfit}"
        return "served" if self.served else f"left to generate: {'; '.join(self.reasons)}"


def _decoder(kind: str) -> torch.nn.Module | None:
    """The model as a decoder, if it is an encoder unless its configuration says `is_decoder`; else None."""
    config = tiny_config("causal", kind)
    if getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False):
        return None
    config.is_decoder = True
    model = model_class("causal", kind)(config)
    model.load_state_dict(tiny_model("causal", kind).state_dict())
    return model


def generated(kind: str) -> Outcome:
    """Compares a family's greedy tokens."""
    outcome = Outcome()
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCABULARY // 2, (1, n), generator=generator) for n in LENGTHS]
    prompts[3] = prompts[0]
    try:
        model = (_decoder(kind) or tiny_model("causal", kind)).eval().to(_WHERE)
        _own_experts(model)
        plain = copy.deepcopy(model)
        expected = [
            plain.generate(ids.to(_WHERE), generation_config=copy.deepcopy(config))[0, ids.shape[1] :]
            for ids in prompts
        ]
    except Exception as error:  # noqa: BLE001 - the run goes on and lists it
        outcome.unfit = raised(error)
        return outcome
    width = max(LENGTHS)
    ids, mask = (torch.zeros(len(prompts), width, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[1] :], mask[row, width - prompt.shape[1] :] = prompt[0], 1
    kernels = apply_npu_kernels(model, **({"ops": _OPS, "backend": "torch"} if _WHERE.type == "cpu" else {}))
    try:
        rollouts = serve_rollouts(kernels)
        if rollouts is None:
            outcome.reasons = kernels.report().notes
            return outcome
        found = model.generate(ids.to(_WHERE), attention_mask=mask.to(_WHERE), generation_config=config)[:, width:]
    except Exception as error:  # noqa: BLE001 - the run goes on and lists it
        outcome.wrong = raised(error)
        return outcome
    finally:
        kernels.restore()
    outcome.served = rollouts.engine.rollouts == 1
    outcome.own = rollouts.engine.masked
    outcome.reasons = list(rollouts.engine.reasons)
    if outcome.served:
        # A family's own end, where its configuration has one, is followed by padding.
        off = [row for row, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a[: len(b)], b)]
        if off and all(torch.equal(found[row], _by_forward(plain, prompts[row].to(_WHERE))) for row in off):
            off = []  # its own cache gives other tokens than its forward
        outcome.wrong = f"rows {off} have other tokens" if off else ""
    return outcome


def _by_forward(model, ids: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens by forwards over all tokens, without a cache."""
    with torch.no_grad():
        for _ in range(TOKENS):
            token = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
            ids = torch.cat((ids, token[:, None]), 1)
    return ids[0, -TOKENS:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families.rollouts", description=__doc__)
    parser.add_argument("only", nargs="*", help="model types; none: all")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    started = time.monotonic()
    table: Counter[str] = Counter()
    wrong = own = 0
    for task, kind in families():
        if task != "causal" or (options.only and kind not in options.only):
            continue
        outcome = generated(kind)
        by = " (its own code attends)" if outcome.served and outcome.own else ""
        print(f"{kind}: {outcome}{by}", flush=True)
        own += bool(by)
        wrong += bool(outcome.wrong)
        table[
            "wrong" if outcome.wrong else "not compared" if outcome.unfit else "served" if outcome.served else "left"
        ] += 1
    print(", ".join(f"{count} {what}" for what, count in table.items()), f"{time.monotonic() - started:.0f} s")
    print(f"of those that are served {own} attend by their own code")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
