"""TRL's trainers whose loss is a function of both models' logits (GKD, GOLD, IW-OPD), option by option, with TRL's own
function and with `ops.linear_divergence`.

The logits of both models are promised and never formed, the losses and parameters agree, and padding is left out of the
teacher as well.
"""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

from convergence.data import tokenizer_for
from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.training import distillation
from tests.models import small_model
from tests.training.test_distillation import compare, served

TEACHERS = {"llama": {"hidden_size": 64, "intermediate_size": 40}, "gemma2": {"final_logit_softcapping": 5.0},
            "cohere": {"logit_scale": 0.25}}  # fmt: skip
KINDS = {"gkd": (GKDTrainer, GKDConfig), "gold": (GOLDTrainer, GOLDConfig), "iw-opd": (IWOPDTrainer, IWOPDConfig)}
MESSAGES = [[{"role": "user", "content": "12" + "3" * (i % 3)}, {"role": "assistant", "content": "45" * (1 + i % 4)}]
            for i in range(16)]  # fmt: skip


def tokens():
    made = copy.deepcopy(tokenizer_for("grpo"))  # of bytes, as GOLD asks for
    of_messages = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    made.chat_template = of_messages + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    return made


def trained(folder, callbacks, kind="gkd", *, student="qwen3", teacher="llama", steps=2, trainer=None, **options):
    """A trained trainer, off-policy unless `lmbda` says otherwise: its completions are given."""
    lora = options.pop("lora", None)
    cls, config = KINDS[kind]
    longest = {} if kind == "gkd" else {"max_completion_length": 16}
    models = small_model(student), small_model(teacher, **TEACHERS.get(teacher, {}))
    with torch.no_grad():
        for model in models:
            model.get_output_embeddings().weight.mul_(8)  # distributions that differ
    tokenizer = tokens()
    tokenizer.save_pretrained(folder / "tokenizer")
    for model in models:
        model.config._name_or_path = str(folder / "tokenizer")  # IW-OPD loads the teacher's by its name
    arguments = config(
        str(folder), per_device_train_batch_size=4, max_steps=steps, report_to="none", logging_steps=1, use_cpu=True,
        bf16=options.pop("bf16", False), save_strategy="no", optim="sgd", max_length=32,
        lmbda=options.pop("lmbda", 0.0), learning_rate=options.pop("learning_rate", 1.0), disable_tqdm=True,
        **longest, **options,
    )  # fmt: skip
    made = (trainer or cls)(
        *models, args=arguments, train_dataset=Dataset.from_dict({"messages": MESSAGES}), processing_class=tokenizer,
        callbacks=callbacks, peft_config=lora,
    )  # fmt: skip
    made.train()
    assert "generalized_jsd_loss" not in vars(made)
    return made


def formed(report):
    return [each for each in report.declined if each.op in ("linear_divergence", "linear_cross_entropy")]


CASES = {
    "forward KL": {"beta": 0.0},
    "Jensen-Shannon": {"beta": 0.5},
    "reverse KL": {"beta": 1.0},
    "micro-batches": {"beta": 0.25, "gradient_accumulation_steps": 2},
    "a softcap": {"beta": 0.5, "teacher": "gemma2"},
    "scaled logits": {"beta": 0.5, "student": "cohere", "teacher": "cohere"},
    "checkpointed": {"beta": 0.5, "gradient_checkpointing": True},
    "on-policy": {"beta": 0.5, "lmbda": 1.0, "max_new_tokens": 6},
    "an adapter": {"beta": 0.5, "lora": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)},
    "GOLD": {"kind": "gold", "beta": 0.25, "temperature": 1.5},
    "IW-OPD": {"kind": "iw-opd", "beta": 0.25, "temperature": 1.5, "distillation_objective": "jsd", "loss_top_k": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_training_as_trls(tmp_path, case):
    stock = trained(tmp_path / "stock", [], **copy.deepcopy(CASES[case]))
    ours = trained(tmp_path / "ours", [NpuKernelsCallback(audit="off")], **copy.deepcopy(CASES[case]))
    assert stock.state.log_history[0]["grad_norm"] > 1e-3
    assert stock.state.log_history[0]["loss"] > 1e-5
    compare(stock, ours)
    calls = 2 * CASES[case].get("gradient_accumulation_steps", 1)
    assert served(ours).ran["linear_divergence"] == calls
    assert not formed(served(ours))
    (teacher,) = served(ours).beside.values()
    assert teacher.ran["varlen_attention"] == calls
    assert not formed(teacher)


def test_under_autocast(tmp_path):
    stock, ours = (trained(tmp_path / str(len(c)), c, bf16=True) for c in ([], [NpuKernelsCallback(audit="off")]))
    assert served(ours).ran["linear_divergence"] == 2
    assert not formed(served(ours))
    for before, after in zip(stock.state.log_history[:2], ours.state.log_history[:2], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=2e-2)


FAULTS = {
    "a temperature without its factor": {"temperature": 1.0},
    "beta on the wrong side": {"beta": 0.75},
    "padding counted": {"mask": None},
    "the other model's scale": {"teacher_logit_scale": 2.0},
    "the mean of a micro-batch": {"num_items": None},
}


@pytest.mark.parametrize("fault", [*FAULTS, "the teacher shifted by one"])
def test_faults(tmp_path, monkeypatch, fault):
    options = {"kind": "gold", "beta": 0.25, "temperature": 0.7, "gradient_accumulation_steps": 2}
    original = distillation.linear_divergence

    def faulty(x, weight, teacher_x, *args, **kwargs):
        if fault not in FAULTS:
            teacher_x = teacher_x.roll(1, 1)
        return original(x, weight, teacher_x, *args, **{**kwargs, **FAULTS.get(fault, {})})

    stock = trained(tmp_path / "stock", [], **options)
    monkeypatch.setattr(distillation, "linear_divergence", faulty)
    ours = trained(tmp_path / "ours", [NpuKernelsCallback(audit="off")], **options)
    with pytest.raises(AssertionError):
        compare(stock, ours)


def test_the_first_batch_is_compared(tmp_path, monkeypatch):
    fine = served(trained(tmp_path / "fine", [NpuKernelsCallback()]))
    assert fine.ran["linear_divergence"] == 2
    assert "linear_divergence  torch: GKDTrainer; 2 calls" in str(fine)
    (beside,) = (line for line in str(fine).splitlines() if line.startswith("teacher_model (LlamaForCausalLM): "))
    assert beside.endswith("varlen_attention 1 (2 calls)")
    assert fine.as_dict()["beside"]["teacher_model (LlamaForCausalLM)"]["ran"]["varlen_attention"] == 2
    assert fine.unused.keys() == {"linear_logprob", "linear_cross_entropy"}
    original = distillation.linear_divergence
    monkeypatch.setattr(
        distillation, "linear_divergence", lambda *args, **kwargs: original(*args, **{**kwargs, "temperature": 1.1})
    )
    with pytest.warns(UserWarning, match="linear_divergence in GKDTrainer differs"):
        ours = trained(tmp_path / "ours", [NpuKernelsCallback()])
    assert served(ours).ran["linear_divergence"] == 0
    compare(trained(tmp_path / "stock", []), ours)


def test_the_loss_of_an_evaluation(tmp_path):
    ours = trained(tmp_path / "ours", [], steps=1, learning_rate=0.0)
    callback = NpuKernelsCallback(audit="off")
    ours.add_callback(callback)
    callback.attach(ours)
    rows = Dataset.from_dict({"messages": MESSAGES[:4]})

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            found.append(ours.evaluate(rows)["eval_loss"])

    found, expected = [], ours.evaluate(rows)["eval_loss"]
    ours.add_callback(Evaluates())
    ours.train()
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert callback.report().ran["linear_divergence"] == 2


def test_the_gradient_of_promised_logits_is_what_it_would_have_been(tmp_path):
    class Looks(GKDTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss, out = super().compute_loss(model, inputs, True)
            out.logits.register_hook(lambda g: seen.append(g.detach().clone()))
            return loss

    grads = []
    for callbacks in ([], [NpuKernelsCallback(audit="off")]):
        seen = []
        trained(tmp_path / str(len(callbacks)), callbacks, steps=1, trainer=Looks)
        grads.append(seen[0])
    assert grads[0].abs().max() > 1e-4
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)


def test_losses_that_are_no_divergence_of_whole_distributions(tmp_path):
    class Own(GKDTrainer):
        @staticmethod
        def generalized_jsd_loss(*args, **kwargs):
            return 2 * GKDTrainer.generalized_jsd_loss(*args, **kwargs)

    ours = trained(tmp_path / "own", [NpuKernelsCallback()], trainer=Own)
    assert "note: Own has a generalized_jsd_loss of its own: the op linear_divergence is not used" in str(served(ours))
    ours = trained(tmp_path / "ops", [NpuKernelsCallback(ops=["rms_norm", "linear_logprob"])])
    assert "linear_divergence" not in served(ours).ran


def test_other_versions_and_tokenizers():
    made = object.__new__(GOLDTrainer)
    made.use_uld_loss, made.teacher_tokenizer = True, "another"
    assert "sorted by size (ULD)" in distillation._function_of_logits(made)
    made.teacher_tokenizer = None
    assert distillation._function_of_logits(made) is GOLDTrainer.generalized_jsd_loss
    made = object.__new__(IWOPDTrainer)
    made.distillation_objective = "iw_opd"
    assert "importance weights" in distillation._function_of_logits(made)


def test_the_reference_of_another_trainer(tmp_path):
    """A2PO calls it without `use_cache`, and generates with it before."""

    def trained_by_a2po(callbacks):
        tokenizer = tokens()
        tokenizer.padding_side = "left"
        made = A2POTrainer(
            small_model("qwen3"), [lambda completions, **_: [1.0 + len(c) for c in completions]],
            args=A2POConfig(
                str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to="none", logging_steps=1,
                use_cpu=True, bf16=False, save_strategy="no", max_completion_length=6, num_value_samples=2,
                disable_tqdm=True, filter_all_incorrect=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["12", "345", "6", "78901"] * 2}),
            processing_class=tokenizer, callbacks=callbacks,
        )  # fmt: skip
        made.train()
        return made

    stock, ours = trained_by_a2po([]), trained_by_a2po([NpuKernelsCallback(audit="off")])
    assert served(ours).beside["ref_model (Qwen3ForCausalLM)"].ran["varlen_attention"] == 2
    for before, after in zip(stock.state.log_history[:2], ours.state.log_history[:2], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-4)
