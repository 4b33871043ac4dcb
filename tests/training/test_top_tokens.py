"""TRL's losses on some tokens of the vocabulary (IW-OPD, ServerDistillation), option by option, with TRL's own
functions and with `ops.linear_topk_divergence`: of two models, and of a model and a server, which a model answers for.

The logits of the student, and of a local teacher, are promised and never formed; the losses and parameters agree.
"""

import copy

import pytest
import torch
import trl.generation.vllm_client
from datasets import Dataset
from peft import LoraConfig
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

from npu_trainer_kernels import NpuKernelsCallback
from npu_trainer_kernels.training import distillation, top_tokens
from tests.models import small_model
from tests.training.test_distillation import Given, compare, served
from tests.training.test_gkd import formed, trained
from tests.training.test_grpo import tokenizer


class Answers:
    """A server: the log-probabilities of the k most probable tokens, and of the actual one, by a model."""

    def __init__(self, model):
        self.model, self.asked = model, 0

    @torch.no_grad()
    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature):
        self.asked += 1
        found = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for ids, start in zip(sequences, prompt_lengths, strict=True):
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
            log_probs = torch.log_softmax(logits.float() / temperature, -1)
            top = log_probs.topk(top_logprobs, -1)
            actual = log_probs.gather(-1, torch.tensor(ids[start:]).unsqueeze(-1))
            found["logprobs"].append(top.values.tolist())
            found["logprob_token_ids"].append(top.indices.tolist())
            found["actual_logprobs"].append(actual.tolist())
        return found


class Served(IWOPDTrainer):
    """Its teacher is behind a server."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher_client, self.teacher_model = Answers(self.teacher_model.eval()), None
        self.use_teacher_server = True


OF_MODELS = {
    "the teacher's": {"beta": 0.0, "loss_top_k": 3},
    "the student's": {"beta": 1.0, "loss_top_k": 3},
    "both": {"beta": 0.25, "loss_top_k": 3},
    "the teacher's, renormalised": {"beta": 0.0, "loss_top_k": 3, "loss_add_tail": False},
    "the student's, renormalised": {"beta": 1.0, "loss_top_k": 3, "loss_add_tail": False},
    "both, renormalised": {"beta": 0.25, "loss_top_k": 3, "loss_add_tail": False},
    "the teacher's first": {"beta": 0.0, "loss_top_k": 1},
    "the sampled": {"beta": 1.0, "loss_top_k": 1},
    "the sampled and the teacher's first": {"beta": 0.25, "loss_top_k": 1},
    "the sampled and the teacher's first, renormalised": {"beta": 0.25, "loss_top_k": 1, "loss_add_tail": False},
    "the student's first": {"beta": 1.0, "loss_top_k": 1, "reverse_kl_top_1_mode": "argmax"},
    "both first": {"beta": 0.25, "loss_top_k": 1, "reverse_kl_top_1_mode": "argmax"},
    "more than all": {"beta": 0.25, "loss_top_k": 10_000},
    "a softcap": {"beta": 0.5, "loss_top_k": 4, "teacher": "gemma2"},
    "scaled logits": {"beta": 0.5, "loss_top_k": 4, "student": "cohere", "teacher": "cohere"},
    "micro-batches": {"beta": 0.25, "loss_top_k": 2, "gradient_accumulation_steps": 2},
    "micro-batches of the sampled": {"beta": 0.25, "loss_top_k": 1, "gradient_accumulation_steps": 2},
}
OF_A_SERVER = {
    "the teacher's": {"beta": 0.0, "loss_top_k": 3},
    "the teacher's, renormalised": {"beta": 0.0, "loss_top_k": 3, "loss_add_tail": False},
    "the sampled": {"beta": 1.0, "loss_top_k": 1},
    "the sampled and the teacher's first": {"beta": 0.25, "loss_top_k": 1},
    "renormalised": {"beta": 0.25, "loss_top_k": 1, "loss_add_tail": False},
    "scaled logits": {"beta": 0.0, "loss_top_k": 4, "student": "cohere"},
    "micro-batches": {"beta": 0.0, "loss_top_k": 4, "gradient_accumulation_steps": 2},
}


def both(folder, case, callback=None, **options):
    """A trainer of TRL's, and one with the kernels."""
    given = {"distillation_objective": "jsd", "temperature": 1.5, **case, **options}
    stock = trained(folder / "stock", [], "iw-opd", **given)
    return stock, trained(folder / "ours", [callback or NpuKernelsCallback(audit="off")], "iw-opd", **given)


@pytest.mark.parametrize("case", OF_MODELS)
def test_of_two_models(tmp_path, case):
    stock, ours = both(tmp_path, OF_MODELS[case])
    assert stock.state.log_history[0]["grad_norm"] > 1e-4
    compare(stock, ours)
    assert served(ours).ran["linear_divergence"] == 2 * OF_MODELS[case].get("gradient_accumulation_steps", 1)
    assert not formed(served(ours))
    (teacher,) = served(ours).beside.values()
    assert not formed(teacher)
    assert "_compute_local_sparse_top_1_divergence_loss" not in vars(ours)


@pytest.mark.parametrize("case", OF_A_SERVER)
def test_of_a_server(tmp_path, case):
    stock, ours = both(tmp_path, OF_A_SERVER[case], trainer=Served)
    assert stock.state.log_history[0]["grad_norm"] > 1e-4
    compare(stock, ours)
    calls = 2 * OF_A_SERVER[case].get("gradient_accumulation_steps", 1)
    assert served(ours).ran["linear_divergence"] == ours.teacher_client.asked == calls
    assert not formed(served(ours))
    assert not {name for name in vars(ours) if name.startswith("_compute_server") or name == "compute_loss"}


@pytest.mark.parametrize("trainer", [None, Served])
@pytest.mark.parametrize("case", [{"beta": 0.0, "loss_top_k": 3}, {"beta": 0.25, "loss_top_k": 1}], ids=str)
def test_under_autocast(tmp_path, trainer, case):
    stock, ours = both(tmp_path, case, trainer=trainer, bf16=True)
    assert served(ours).ran["linear_divergence"] == 2
    assert not formed(served(ours))
    for before, after in zip(stock.state.log_history[:2], ours.state.log_history[:2], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=2e-2)


FAULTS = {
    "the tail forgotten": lambda given: given.update(add_tail=False),
    "a temperature without its factor": lambda given: given.update(temperature=1.0, logit_scale=1.0),
    "beta on the wrong side": lambda given: given.update(beta=1.0 - given["beta"]),
    "the mean of a micro-batch": lambda given: given.pop("num_items"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "the teacher shifted by one", "padding counted"])
@pytest.mark.parametrize("k", [1, 3])
def test_faults(tmp_path, monkeypatch, fault, k):
    original, rows = top_tokens.linear_topk_divergence, torch.nonzero

    def faulty(x, weight, ids, log_probs, *args, **kwargs):
        if fault == "the teacher shifted by one":
            ids, log_probs = ids.roll(1, 0), log_probs.roll(1, 0)
        FAULTS.get(fault, lambda given: None)(kwargs)
        return original(x, weight, ids, log_probs, *args, **kwargs)

    case = {"beta": 0.25, "loss_top_k": k, "gradient_accumulation_steps": 2}
    monkeypatch.setattr(top_tokens, "linear_topk_divergence", faulty)
    if fault == "padding counted":
        monkeypatch.setattr(
            top_tokens, "_selected", lambda labels: rows(torch.ones_like(labels.reshape(-1))).squeeze(1)
        )
    stock, ours = both(tmp_path, case)
    with pytest.raises(AssertionError):
        compare(stock, ours)


@pytest.mark.parametrize("trainer", [None, Served])
@pytest.mark.parametrize("case", [{"beta": 0.0, "loss_top_k": 3}, {"beta": 0.25, "loss_top_k": 1}], ids=str)
def test_the_first_batch_is_compared(tmp_path, monkeypatch, trainer, case):
    fine = both(tmp_path / "fine", case, NpuKernelsCallback(), trainer=trainer)[1]
    assert served(fine).ran["linear_divergence"] == 2
    assert "linear_divergence  torch: " in str(served(fine))
    original = top_tokens.linear_topk_divergence
    monkeypatch.setattr(top_tokens, "linear_topk_divergence", lambda *args, **kwargs: 1.1 * original(*args, **kwargs))
    with pytest.warns(UserWarning, match="linear_divergence in .* differs"):
        stock, ours = both(tmp_path / "off", case, NpuKernelsCallback(), trainer=trainer)
    assert served(ours).ran["linear_divergence"] == 0
    compare(stock, ours)


def test_the_gradient_of_promised_logits_is_what_it_would_have_been(tmp_path):
    grads = []

    class Looks(IWOPDTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss, out = super().compute_loss(model, inputs, True)
            out.logits.register_hook(lambda g: grads.append(g.detach().clone()))
            return loss

    both(tmp_path, {"beta": 0.25, "loss_top_k": 1}, trainer=Looks, steps=1)
    assert grads[0].abs().max() > 1e-5
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-8)


def test_methods_that_are_not_trls(tmp_path, monkeypatch):
    class Own(IWOPDTrainer):
        def _compute_local_sparse_top_1_divergence_loss(self, *args, **kwargs):
            return 2 * super()._compute_local_sparse_top_1_divergence_loss(*args, **kwargs)

    stock, ours = both(tmp_path, {"beta": 0.25, "loss_top_k": 1}, trainer=Own)
    compare(stock, ours)
    name = "_compute_local_sparse_top_1_divergence_loss"
    assert f"Own has a {name} of its own: the op linear_divergence is not used" in str(served(ours))
    made = object.__new__(IWOPDTrainer)
    made.beta, made.loss_top_k = 0.5, 1
    assert callable(distillation._function_of_logits(made))
    monkeypatch.setitem(top_tokens._PARAMETERS, name, ("self",))
    said = distillation._function_of_logits(made)
    assert f"TRL computes the loss of IWOPDTrainer in another way, in {name}" in said


def test_a_server_that_sends_too_little(tmp_path):
    """TRL's error, and not a loss of fewer tokens."""

    class Silent(Served):
        def _get_teacher_token_logprobs_from_server(self, *args):
            found = super()._get_teacher_token_logprobs_from_server(*args)
            found["actual_logprobs"][:] = -torch.inf
            return found

    callback = NpuKernelsCallback(audit="off")
    with pytest.raises(ValueError, match="Teacher server is missing actual-token logprobs"):
        trained(tmp_path, [callback], "iw-opd", trainer=Silent, distillation_objective="jsd", beta=1.0, loss_top_k=1)
    declined = {each.reason for each in callback.report().declined if each.op == "linear_divergence"}
    assert declined == {"log-probabilities that the server has not sent"}


# ---------------------------------------------------------------------------------------------------------------------
# ServerDistillationTrainer
# ---------------------------------------------------------------------------------------------------------------------


class Distilled(ServerDistillationTrainer):
    """Its rollouts are given: completions of different lengths."""

    _generate_single_turn = Given._generate_single_turn


def distilled(monkeypatch, folder, callbacks, *, student="qwen3", trainer=Distilled, answers=Answers, **options):
    """A trained ServerDistillationTrainer, whose server is a model."""
    lora = options.pop("lora", None)
    models = small_model(student), small_model("llama", hidden_size=48, intermediate_size=40)
    with torch.no_grad():
        for model in models:
            model.get_output_embeddings().weight.mul_(20)  # distributions that differ
    monkeypatch.setattr(
        trl.generation.vllm_client, "VLLMClient", lambda base_url, connection_timeout: answers(models[1].eval())
    )
    arguments = ServerDistillationConfig(
        str(folder), teacher_model_server_url="http://localhost:8000", per_device_train_batch_size=4, max_steps=2,
        max_completion_length=6, report_to="none", logging_steps=1, use_cpu=True, bf16=options.pop("bf16", False),
        save_strategy="no", learning_rate=1.0, optim="sgd", disable_tqdm=True, **options,
    )  # fmt: skip
    made = trainer(
        models[0], args=arguments, train_dataset=Dataset.from_dict({"prompt": ["12", "345", "6", "78901"] * 4}),
        processing_class=tokenizer(), callbacks=callbacks, peft_config=lora,
    )  # fmt: skip
    made.train()
    assert not {name for name in vars(made) if name.startswith("_compute_") or name == "compute_loss"}
    return made


DISTILLED = {
    "the teacher's": {"beta": 0.0, "loss_top_k": 3},
    "the teacher's, renormalised": {"beta": 0.0, "loss_top_k": 3, "loss_add_tail": False},
    "the teacher's first, a temperature": {"beta": 0.0, "loss_top_k": 1, "temperature": 2.5},
    "the sampled": {"beta": 1.0},
    "the sampled and the teacher's first": {"beta": 0.25, "temperature": 1.5},
    "renormalised": {"beta": 0.5, "loss_add_tail": False},
    "scaled logits": {"beta": 0.0, "loss_top_k": 4, "student": "cohere"},
    "a softcap and tied heads": {"beta": 0.5, "student": "gemma2"},
    "micro-batches": {"beta": 0.25, "gradient_accumulation_steps": 2},
    "checkpointed": {"beta": 0.5, "gradient_checkpointing": True},
    "an adapter": {"beta": 0.5, "lora": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)},
}


@pytest.mark.parametrize("case", DISTILLED)
def test_a_server_of_another_trainer(tmp_path, monkeypatch, case):
    options = DISTILLED[case]
    stock = distilled(monkeypatch, tmp_path / "stock", [], **copy.deepcopy(options))
    ours = distilled(monkeypatch, tmp_path / "ours", [NpuKernelsCallback(audit="off")], **copy.deepcopy(options))
    assert stock.state.log_history[0]["grad_norm"] > 1e-4
    compare(stock, ours)
    calls = 2 * options.get("gradient_accumulation_steps", 1)
    assert served(ours).ran["linear_divergence"] == ours.teacher_client.asked == calls
    assert not formed(served(ours))


def test_the_report_of_a_server(tmp_path, monkeypatch):
    ours = distilled(monkeypatch, tmp_path, [NpuKernelsCallback()], beta=0.5)
    text = str(served(ours))
    assert "linear_divergence  torch: Distilled; 2 calls" in text
    assert "0 calls" not in text
    assert served(ours).unused.keys() == {"linear_logprob", "linear_cross_entropy"}


def test_a_server_under_autocast(tmp_path, monkeypatch):
    stock = distilled(monkeypatch, tmp_path / "stock", [], beta=0.5, bf16=True)
    ours = distilled(monkeypatch, tmp_path / "ours", [NpuKernelsCallback(audit="off")], beta=0.5, bf16=True)
    assert served(ours).ran["linear_divergence"] == 2
    for before, after in zip(stock.state.log_history[:2], ours.state.log_history[:2], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=2e-2)


@pytest.mark.parametrize("fault", [*(f for f in FAULTS if "mean" not in f), "the teacher shifted by one",
                                   "padding counted"])  # fmt: skip
def test_faults_with_a_server(tmp_path, monkeypatch, fault):
    original, rows = top_tokens.linear_topk_divergence, torch.nonzero

    def faulty(x, weight, ids, log_probs, *args, **kwargs):
        if fault == "the teacher shifted by one":
            ids, log_probs = ids.roll(1, 0), log_probs.roll(1, 0)
        if fault == "a temperature without its factor":
            kwargs["logit_scale"] = 1.0  # the promise was divided by the temperature
        else:
            FAULTS.get(fault, lambda given: None)(kwargs)
        return original(x, weight, ids, log_probs, *args, **kwargs)

    options = {"beta": 0.25, "temperature": 1.5}
    stock = distilled(monkeypatch, tmp_path / "stock", [], **options)
    monkeypatch.setattr(top_tokens, "linear_topk_divergence", faulty)
    if fault == "padding counted":
        monkeypatch.setattr(
            top_tokens, "_selected", lambda labels: rows(torch.ones_like(labels.reshape(-1))).squeeze(1)
        )
    ours = distilled(monkeypatch, tmp_path / "ours", [NpuKernelsCallback(audit="off")], **options)
    with pytest.raises(AssertionError):
        compare(stock, ours)


@pytest.mark.parametrize("name", [*top_tokens._CALLED, "_compute_server_sparse_top_1_divergence_loss", "compute_loss"])
def test_methods_of_a_subclass(tmp_path, monkeypatch, name):
    """A loss of one's own is not ours, whichever method it is in."""
    own = {name: lambda self, *args, **kwargs: getattr(ServerDistillationTrainer, name)(self, *args, **kwargs)}
    if name == "_reduce_divergence_loss":
        own = {name: staticmethod(lambda *args, **kwargs: 2 * Distilled._reduce_divergence_loss(*args, **kwargs))}
    kind = type("Own", (Distilled,), own)
    stock = distilled(monkeypatch, tmp_path / "stock", [], beta=0.5, trainer=kind)
    ours = distilled(monkeypatch, tmp_path / "ours", [NpuKernelsCallback()], beta=0.5, trainer=kind)
    compare(stock, ours)
    assert f"note: Own has a {name} of its own: the op linear_divergence is not used" in str(served(ours))
    assert "linear_divergence" not in served(ours).ran
