"""Architectures from scratch, pretrained folders, and every way in which a folder does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, BertConfig

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.architectures import dropout_rates, objective_of, positions_of, scratch_config
from rapidformer_templates.models.loading import build_model, check_seq_length
from rapidformer_templates.models.model_files import OWN_EXPERTS, load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.registry import REGISTRY
from tests.support.texts import TINY

pytestmark = pytest.mark.usefixtures("offline")

Configure = Callable[..., RunConfig]
HEADS = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize(
    ("model_type", "objective"),
    [
        ("gpt2", "causal"), ("llama", "causal"), ("gpt_neox", "causal"), ("mixtral", "causal"), ("qwen2", "causal"),
        ("opt", "causal"), ("bert", "masked"), ("roberta", "masked"), ("t5", "seq2seq"), ("bart", "seq2seq"),
    ],
)  # fmt: skip
def test_from_scratch(
    model_type: str,
    objective: str,
    bert_folder: Path,
    gpt_folder: Path,
    configure: Configure,
) -> None:
    assert objective_of(model_type) == objective
    folder = gpt_folder if objective == "causal" else bert_folder
    config = configure(model_type=model_type, tokenizer_path=str(folder), max_position_embeddings=None, **TINY)
    torch.manual_seed(0)
    model = build_model(config, HEADS[objective]).eval()
    tokenizer = load_tokenizer(config)
    assert model.config.hidden_size == 32
    assert model.config.num_hidden_layers == 2
    assert model.config.num_attention_heads == 4
    assert model.config.vocab_size % 128 == 0
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.use_cache is False
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    ids = torch.randint(5, len(tokenizer), (2, 12))
    outputs = model(input_ids=ids, labels=ids)
    assert outputs.loss.isfinite()
    assert outputs.logits.shape == (2, 12, model.config.vocab_size)


def test_an_architecture_whose_configuration_knows_no_padding(gpt_folder: Path, configure: Configure) -> None:
    config = configure(model_type="rwkv", tokenizer_path=str(gpt_folder), num_layers=2, hidden_size=32)
    model = build_model(config, HEADS["causal"])
    assert model.config.eos_token_id == load_tokenizer(config).eos_token_id


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama", "gpt_neox", "mixtral", "t5"])
def test_feed_forward_keeps_the_ratio_of_the_architecture(
    model_type: str,
    bert_folder: Path,
    configure: Configure,
) -> None:
    config = configure(model_type=model_type, tokenizer_path=str(bert_folder), **(TINY | {"hidden_size": 64}))
    sizes = build_model(config, HEADS[objective_of(model_type)]).config.to_dict()
    width = next((sizes[name] for name in ("d_ff", "n_inner", "intermediate_size") if sizes.get(name)), 4 * 64)
    assert width == {"llama": 176, "mixtral": 224}.get(model_type, 256)  # 2.6875 and 3.5 times 64, in multiples of 8


def test_dropout_reaches_every_layer(bert_folder: Path, configure: Configure) -> None:
    config = configure(model_type="bert", tokenizer_path=str(bert_folder), **(TINY | {"dropout": 0.25}))
    model = build_model(config, "AutoModelForSequenceClassification", num_labels=3)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    assert model.config.num_labels == 3


def test_an_encoder_as_causal_model_sees_no_future(bert_folder: Path, configure: Configure) -> None:
    config = configure(model_type="bert", tokenizer_path=str(bert_folder), **TINY)
    model = build_model(config, "AutoModelForCausalLM").eval()
    ids = torch.randint(5, 50, (1, 8))
    changed = ids.clone()
    changed[0, -1] = 60
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, :-1], model(changed).logits[:, :-1])


@pytest.fixture
def pretrained(tmp_path: Path, bert_folder: Path, configure: Configure) -> Path:
    """Save a small masked language model with its tokenizer."""
    config = configure(model_type="bert", tokenizer_path=str(bert_folder), max_position_embeddings=64, **TINY)
    folder = tmp_path / "model"
    build_model(config, "AutoModelForMaskedLM").save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return folder


def test_pretrained_weights_are_taken(pretrained: Path, configure: Configure) -> None:
    config = configure(pretrained_model_name_or_path=str(pretrained), dropout=0.3)
    model = build_model(config, "AutoModelForSequenceClassification", num_labels=2)
    saved = load_file(pretrained / "model.safetensors")
    own = model.state_dict()
    shared = [name for name in saved if name in own]
    assert len(shared) > 20
    assert all(torch.equal(saved[name], own[name]) for name in shared)
    assert model.config.hidden_dropout_prob == 0.3


def refused(config: RunConfig, auto_class: str = "AutoModelForMaskedLM", **overrides: Any) -> str:
    with pytest.raises(ModelError) as caught:
        build_model(config, auto_class, **overrides)
    return caught.value.render()


def test_folders_that_do_not_fit(pretrained: Path, configure: Configure) -> None:
    config = configure(pretrained_model_name_or_path=str(pretrained))
    text = refused(configure(pretrained_model_name_or_path=str(pretrained) + "s", tokenizer_path=str(pretrained)))
    assert "there is no folder" in text
    assert f"did you mean {pretrained}?" in text
    assert "transformers has no AutoModelForSeq2SeqLM for bert" in refused(config, "AutoModelForSeq2SeqLM")
    text = refused(config.replace("command line", num_layers=3))
    assert "the pretrained model's num_hidden_layers is 2, not 3\n  where  --num-layers" in text
    text = refused(config.replace("command line", seq_length=65))
    assert "sequences of 65 tokens do not fit the model's 64 positions\n  where  --seq-length" in text

    weights = load_file(pretrained / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    save_file({k: v for k, v in weights.items() if k != name}, pretrained / "model.safetensors", {"format": "pt"})
    assert f"1 weights are missing in {pretrained}, such as {name}" in refused(config)
    save_file(weights | {name: torch.zeros(32, 7)}, pretrained / "model.safetensors", {"format": "pt"})
    assert f"the weight {name} is of shape (32, 7) in {pretrained} and (32, 128) in the model" in refused(config)
    (pretrained / "model.safetensors").write_bytes(b"not a tensor")
    assert f"the weights in {pretrained} cannot be read" in refused(config)
    (pretrained / "model.safetensors").unlink()
    text = refused(config)
    assert f"there are no weights in {pretrained}" in text
    assert "it holds: config.json" in text
    (pretrained / "config.json").write_text("{", encoding="utf-8")
    assert f"{pretrained / 'config.json'} is not JSON" in refused(config)
    (pretrained / "config.json").unlink()
    assert f"there is no config.json in {pretrained}" in refused(config)
    (pretrained / "export").mkdir()
    (pretrained / "export/config.json").write_text("{}", encoding="utf-8")
    assert f"name {pretrained / 'export'}" in refused(config)  # it is the folder of a run


LIGHTNING = {"epoch": 3, "state_dict": {"model.w": torch.ones(1)}}
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


@pytest.mark.parametrize(
    ("prefix", "hint"), [("_orig_mod", "'_orig_mod.'"), ("module", "'module.'"), (None, "in its 'state_dict'")]
)
def test_weights_under_other_names_are_listed(
    prefix: str | None, hint: str, pretrained: Path, configure: Configure
) -> None:
    weights = pretrained / "model.safetensors"
    named = {f"{prefix}.{name}": tensor for name, tensor in load_file(weights).items()} if prefix else LIGHTNING
    weights.unlink()
    torch.save(named, pretrained / "pytorch_model.bin")
    text = refused(configure(pretrained_model_name_or_path=str(pretrained)))
    assert f"no weight in {pretrained} belongs to a BertForMaskedLM; they are named {min(named)}" in text
    assert hint in text


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_known(name: str, pretrained: Path, configure: Configure) -> None:
    (pretrained / "model.safetensors").unlink()
    (pretrained / "pytorch_model.bin").write_bytes(b"")
    (pretrained / name).write_text(POINTER)
    text = refused(configure(pretrained_model_name_or_path=str(pretrained)))
    assert f"{name} is a pointer of git-lfs" in text
    assert "git lfs pull" in text


def test_a_tokenizer_with_more_tokens_than_the_model(
    pretrained: Path,
    tmp_path: Path,
    configure: Configure,
) -> None:
    tokenizer = load_tokenizer(configure(tokenizer_path=str(pretrained)))
    tokenizer.add_tokens([f"extra{i}" for i in range(500)])
    tokenizer.save_pretrained(tmp_path / "large")
    config = configure(pretrained_model_name_or_path=str(pretrained), tokenizer_path=str(tmp_path / "large"))
    assert f"the tokenizer has {len(tokenizer)} tokens, the model only" in refused(config)


def test_code_in_a_folder_is_not_run(pretrained: Path, configure: Configure) -> None:
    own = json.loads((pretrained / "config.json").read_text(encoding="utf-8"))
    own |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForMaskedLM": "mine.Model"}}
    (pretrained / "config.json").write_text(json.dumps(own), encoding="utf-8")
    config = configure(pretrained_model_name_or_path=str(pretrained), tokenizer_path=None)
    assert "--trust-remote-code" in refused(config, tokenizer=load_tokenizer(configure(tokenizer_path=str(pretrained))))


def test_architectures_and_sizes_that_do_not_fit(bert_folder: Path, configure: Configure) -> None:
    flags = {"tokenizer_path": str(bert_folder), **TINY}
    assert "did you mean bert" in refused(configure(model_type="brt", **flags))
    assert "no model is named" in refused(configure(**flags))
    text = refused(configure(model_type="bert", **(flags | {"num_attention_heads": 5})))
    assert "5 attention heads do not divide the hidden size 32" in text
    text = refused(configure(model_type="bert", **(flags | {"max_position_embeddings": 16, "seq_length": 32})))
    assert "use --seq-length 16 or less, or --max-position-embeddings 32" in text
    assert "drops everything" in refused(configure(model_type="bert", **(flags | {"dropout": 1.0})))
    assert "no AutoModelForMaskedLM for vit" in refused(configure(model_type="vit", **flags))


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_model_takes_sequences_as_long_as_its_positions(
    model_type: str,
    bert_folder: Path,
    configure: Configure,
) -> None:
    flags = {"model_type": model_type, "tokenizer_path": str(bert_folder), "max_position_embeddings": 16, **TINY}
    model = build_model(configure(**flags, seq_length=16), "AutoModelForMaskedLM").eval()
    assert positions_of(model.config) == 16
    ids = torch.randint(5, 50, (1, 16))
    assert model(ids, labels=ids).loss.isfinite()
    with pytest.raises(ModelError):
        check_seq_length(configure(seq_length=17), model.config)


def test_positions_reach_the_sequence_length(bert_folder: Path, configure: Configure) -> None:
    config = configure(model_type="gpt2", tokenizer_path=str(bert_folder), seq_length=2048, **TINY)
    assert positions_of(build_model(config, "AutoModelForCausalLM").config) == 2048


def test_a_rate_of_zero_may_be_written_as_a_whole_number() -> None:
    default = BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0.0, classifier_dropout=None)
    assert dropout_rates(default, 0.5) == {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}


@pytest.mark.parametrize("model_type", sorted(OWN_EXPERTS))
@pytest.mark.parametrize("experts", [1, 16])
def test_a_token_visits_as_many_experts_as_there_are(experts: int, model_type: str, gpt_folder: Path) -> None:
    given = {"model_type": model_type, "tokenizer_path": str(gpt_folder), "num_experts": experts, **TINY}
    config = REGISTRY.complete(RunConfig()).replace("command line", **given)
    built = scratch_config(config, "AutoModelForCausalLM", load_tokenizer(config))
    usual = CONFIG_MAPPING[model_type]().num_experts_per_tok
    assert built.num_experts_per_tok == min(experts, usual)
    asked = config.replace("command line", moe_top_k=1)
    assert scratch_config(asked, "AutoModelForCausalLM", load_tokenizer(asked)).num_experts_per_tok == 1
