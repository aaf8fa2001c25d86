"""How models use labels: the loss of --task causal_lm predicts the next token, however a model shifts labels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F  # noqa: N812
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from rapidformer_templates import Trainer
from rapidformer_templates.data.collate import WindowCollate, count_targets
from rapidformer_templates.data.tasks.language_models import CausalLM
from rapidformer_templates.data.tasks.pretraining import Causal
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.label_use import LENGTH, LabelUse, can_be_tried, label_use
from tests.support.architectures import IDS, SIZES, tiny
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.texts import WORDS, write_jsonl

pytestmark = pytest.mark.usefixtures("offline")

ALIGNED = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "trocr",
    "whisper",
}  # fmt: skip
"""Architectures whose output transformers 5.23 compares with the label at the same position. The library has no
such list."""

NAMES = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SOME = ALIGNED | set(NAMES[::9]) | {"gpt2", "llama", "bert", "bert-generation", "mixtral", "openai-gpt"}


def _task(use: LabelUse) -> CausalLM:
    task = CausalLM.__new__(CausalLM)
    assert task.use_labels(use)
    return task


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(SOME, sorted({*SOME, *NAMES[2::3]})))
def test_the_loss_is_that_of_the_next_token(name: str) -> None:
    model = tiny(name, may_skip=name not in ALIGNED)
    use = label_use(model)
    assert not use.untried
    if use.sees_ahead:
        with pytest.raises(ModelError, match="sees the tokens that it must predict"):
            _task(use)
        assert name in {"xlm", "xlnet", "cpmant"}
        return
    assert use.shifts == (name not in ALIGNED)
    labels = IDS.clone()
    labels[0, 4:] = -100
    labels[1, :3] = -100
    with torch.no_grad():
        loss = _task(use).compute_loss(model, {"input_ids": IDS, "labels": labels})
        logits = model(input_ids=IDS).logits[:, :-1]
    wanted = labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100, reduction="sum")
    counted = count_targets({"input_ids": IDS, "labels": labels}, shifted=_task(use).use_labels(use))
    assert counted == int((wanted != -100).sum()) == 13
    router = float(getattr(model.config, "router_aux_loss_coef", 0) or 0) * bool(
        getattr(model.config, "output_router_logits", False)
    )
    if not router:
        torch.testing.assert_close(loss, total / counted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sees_padding"),
    [("fnet", True), ("convbert", True), ("bert", False), ("roberta", False), ("modernbert", False)],
)
def test_models_that_compute_with_padding_are_known(name: str, sees_padding: bool) -> None:
    assert label_use(tiny(name, transformers.AutoModelForMaskedLM)).sees_padding == sees_padding


@pytest.mark.parametrize("name", ["gpt2", "llama", "trocr", "whisper", "mvp"])
def test_pretraining_windows_lose_no_target(name: str) -> None:
    model = tiny(name)
    objective = Causal.__new__(Causal)
    assert objective.use_labels(label_use(model))
    batch = WindowCollate()([{"input_ids": row.numpy()} for row in IDS])
    with torch.no_grad():
        loss = objective.compute_loss(model, batch)
        logits = model(input_ids=IDS[:, :-1]).logits
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["MaskedLM", "Seq2SeqLM", "TokenClassification"])
@pytest.mark.parametrize("name", ["bert", "t5", "bart", "gpt2", "electra"])
def test_other_heads_shift_nothing(name: str, head: str) -> None:
    factory = getattr(transformers, f"AutoModelFor{head}")
    if CONFIG_MAPPING[name] not in factory._model_mapping:
        pytest.skip("no such head")
    assert not label_use(tiny(name, factory)).shifts


def test_a_trial_leaves_no_trace() -> None:
    model = tiny("gpt2").train()
    model.transformer.h[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    label_use(model)
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert not model.transformer.h[0].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_trial_runs_the_first_blocks_alone() -> None:
    config = tiny("gpt2").config
    config.n_layer = 5
    model = transformers.GPT2LMHeadModel(config)
    blocks = list(model.transformer.h)
    called: set[int] = set()
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: called.add(number))
    assert label_use(model) == label_use(tiny("gpt2"))
    assert called == {0, 1}
    assert list(model.transformer.h) == blocks


def test_what_cannot_be_tried_goes_by_its_name() -> None:
    class Deaf(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: Any, labels: Any, ears: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    use = label_use(Deaf(tiny("gpt2").config))
    assert use.shifts
    assert "ears" in use.untried
    assert label_use(torch.nn.Linear(2, 2)) == LabelUse("Linear")
    with torch.device("meta"):
        assert not can_be_tried(torch.nn.Linear(2, 2))


class _Bart(Trainer):
    """Records the loss of each step."""

    def on_step_end(self, step: int, result: Any) -> None:
        self.losses = [*getattr(self, "losses", []), float(result.loss)]


@pytest.fixture
def flags(tmp_path: Path, bert_folder: Path) -> Callable[..., list[str]]:
    def make(name: str, more: str = "") -> list[str]:
        rows = [{"text": " ".join(WORDS[i : i + 5 + i % 3])} for i in range(12)]
        write_jsonl(tmp_path / "train.jsonl", rows)
        write_jsonl(tmp_path / "valid.jsonl", rows[:5])
        sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --dropout 0"
        common = f"--task causal_lm --data-dir {tmp_path} --model-type {name} --tokenizer-path {bert_folder} {sizes}"
        return f"{common} --lr 0.01 --train-iters 3 --micro-batch-size 4 --no-save {more}".split()

    return make


def test_a_run_of_a_decoder_that_does_not_shift(flags: Callable[..., list[str]]) -> None:
    """Check loss, number of targets, perplexity and accuracy against their definitions."""
    job = _Bart(flags("bart"))
    summary = job.fit()
    batch = job.data.collate([job.data.valid[i] for i in range(5)])  # type: ignore[misc, index]
    job.model.eval()
    with torch.no_grad():
        logits = job.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    wanted = batch["labels"][:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    assert job.count_targets(batch) == int((wanted != -100).sum())
    right = (logits.argmax(-1) == wanted)[wanted != -100].float().mean()
    metrics = summary["metrics"]
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert metrics["perplexity"] == pytest.approx(float(expected.exp()), rel=1e-4)
    assert metrics["token_accuracy"] == pytest.approx(float(right))


def test_a_model_that_looks_ahead_is_refused(flags: Callable[..., list[str]], says: Says) -> None:
    with says(ModelError):
        _Bart(flags("xlm")).fit()


def test_an_own_loss_is_told(flags: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    class Own(_Bart):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            return model(**batch).loss

    Own(flags("bart")).fit()
    told = capsys.readouterr()
    note = "BartForCausalLM does not shift labels, nor does this task here: your compute_loss must"
    assert note in told.out + told.err


class _Inside(torch.nn.Module):
    """A model of transformers inside a user's own module."""

    def __init__(self, model: PreTrainedModel, alone: bool) -> None:
        super().__init__()
        self.model, self.alone = model, alone

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        output = self.model(input_ids=input_ids, **others)
        return output.loss if self.alone else output


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_a_model_in_a_module_of_ones_own_is_tried(name: str, alone: bool) -> None:
    use = label_use(_Inside(tiny(name), alone))
    assert use.shifts == (name == "gpt2")
    assert not use.untried


def test_two_labels_may_be_as_likely() -> None:
    """Equal logits do not show whether the labels count. So another label is tried."""
    model = tiny("gpt2")
    tried = SIZES["vocab_size"] // 2 + LENGTH - 1
    with torch.no_grad():
        model.lm_head.weight[tried + LENGTH] = model.lm_head.weight[tried]
    assert label_use(model).shifts
