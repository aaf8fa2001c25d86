"""A flag changes a run: each is tried against the same run without it.

Other tests show flags whose effect needs several workers, a GPU or minutes. The flags that turn a switch on are
tried in every accepted pair of switches (``tests/switches/test_pairs.py``), where a switch without effect ends the run.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Pretrainer, Trainer
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.config import spelling
from tests.support.parity import trained
from tests.support.preference_runs import judged, pairs, pretrained, words
from tests.support.selection import by_default
from tests.support.texts import DOCUMENTS, write_jsonl

RATE = "--lr 1e-2 --global-batch-size 4 --log-interval 1 --device cpu"
STEPS = f"--train-iters 3 --micro-batch-size 2 {RATE}"
SIZES = "--num-layers 1 --hidden-size 16 --num-attention-heads 2"
BERT = f"{STEPS} {SIZES} --model-type bert --tokenizer-path {{bert}} --seq-length 16"
GPT = f"{STEPS} {SIZES} --model-type gpt2 --tokenizer-path {{gpt}} --seq-length 16 --dropout 0"
RUNS = {
    "classes": f"{BERT} --task sequence_classification --data-dir {{data}}/classes --eval-interval 3",
    "chats": f"{GPT} --task causal_lm --data-dir {{data}}/chats --seq-length 48",
    "texts": f"{GPT} --task pretraining --data-path {{data}}/corpus.txt --data-cache-dir {{cache}}",
    "masked": f"{BERT} --task pretraining --data-path {{data}}/corpus.txt --data-cache-dir {{cache}}",
    "words": f"{BERT} --task masked_lm --data-dir {{data}}/texts",
    "shapes": f"{GPT} --task causal_lm --data-dir {{data}}/texts --data-iterator dynamic-shape",
    "passes": f"{RATE} {SIZES} --model-type bert --tokenizer-path {{bert}} --task sequence_classification"
    " --data-dir {data}/classes --micro-batch-size 4 --epochs 1",
    "pairs": f"{STEPS} --task preference --data-dir {{data}}/pairs --pretrained-model-name-or-path {{model}}",
    "judged": f"{STEPS} --task preference --preference-loss kto --data-dir {{data}}/judged"
    " --pretrained-model-name-or-path {model}",
    "adapters": f"{STEPS} --task causal_lm --data-dir {{data}}/chats --pretrained-model-name-or-path {{model}}"
    " --lora-rank 2",
    "experts": f"{GPT} --task pretraining --data-path {{data}}/corpus.txt --data-cache-dir {{cache}} --num-experts 4",
}
"""Runs that a flag is added to."""


@dataclass(frozen=True)
class Case:
    """A flag with a value that changes a run.

    Attributes:
        run: key of :data:`RUNS`.
        words: the flag and its value.
        given: flags that it depends on. They are given to both runs.
    """

    run: str
    words: str
    given: str = ""


def _classes(words: str, given: str = "") -> Case:
    return Case("classes", words, given)


SAVE, LONG = "--save {run}", "--train-iters 6"
CASES = {
    "model_type": _classes("--model-type electra"),
    "num_layers": _classes("--num-layers 2"),
    "hidden_size": _classes("--hidden-size 32"),
    "num_attention_heads": _classes("--num-attention-heads 4"),
    "max_position_embeddings": _classes("--max-position-embeddings 64"),
    "seq_length": _classes("--seq-length 8"),
    "dropout": _classes("--dropout 0.5"),
    "new_head": _classes("--new-head", "--pretrained-model-name-or-path {classifier}"),
    "pretrained_model_name_or_path": Case("pairs", "--pretrained-model-name-or-path {larger}"),
    "micro_batch_size": _classes("--micro-batch-size 4"),
    "global_batch_size": _classes("--global-batch-size 8"),
    "tokenizer_path": Case("chats", "--tokenizer-path {bert}"),
    "data_path": Case("texts", "--data-path {data}/other.txt"),
    "data_dir": _classes("--data-dir {data}/more"),
    "data_name": _classes("--data-name other.csv"),
    "text_column": _classes("--text-column second"),
    "pair_column": _classes("--pair-column second"),
    "label_column": _classes("--label-column number"),
    "problem_type": _classes("--problem-type regression", "--label-column number"),
    "validation_fraction": _classes("--validation-fraction 0.3"),
    "max_train_samples": _classes("--max-train-samples 5"),
    "max_eval_samples": _classes("--max-eval-samples 1"),
    "eval_data_name": _classes("--eval-data-name more=other.csv"),
    "evaluate_test": _classes("--evaluate-test", "--data-dir {data}/parts --export-model --save {run}"),
    "skip_bad_lines": _classes("--skip-bad-lines", "--data-dir {data}/bad"),
    "group_by_length": _classes("--group-by-length"),
    "split": Case("texts", "--split 50,30,20"),
    "text_unit": Case("texts", "--text-unit line"),
    "data_cache_dir": Case("texts", "--data-cache-dir {run}/cache"),
    "keep_documents_apart": Case("texts", "--keep-documents-apart", "--micro-batch-size 4"),
    "streaming": Case("texts", "--streaming"),
    "shuffle_buffer": Case("texts", "--shuffle-buffer 2", "--streaming"),
    "mask_prob": Case("masked", "--mask-prob 0.5"),
    "whole_word_mask": Case("masked", "--whole-word-mask", "--mask-prob 0.4"),
    "loss_on": Case("chats", "--loss-on all"),
    "pack_sequences": Case("chats", "--pack-sequences"),
    "task": Case("words", "--task causal_lm"),
    "lr": _classes("--lr 2e-2"),
    "lr_decay_style": _classes("--lr-decay-style cosine"),
    "min_lr": _classes("--min-lr 5e-3"),
    "lr_decay_iters": _classes("--lr-decay-iters 9"),
    "lr_warmup_iters": _classes("--lr-warmup-iters 2"),
    "lr_warmup_fraction": _classes("--lr-warmup-fraction 0.5"),
    "lr_warmup_samples": _classes("--lr-warmup-samples 8"),
    "lr_num_cycles": _classes("--lr-num-cycles 2", f"{LONG} --lr-decay-style cosine_with_restarts"),
    "lr_power": _classes("--lr-power 2", "--lr-decay-style polynomial"),
    "lr_wsd_decay_iters": _classes(
        "--lr-wsd-decay-iters 4", f"{LONG} --lr-decay-style warmup_stable_decay --lr-warmup-iters 1"
    ),
    "lr_wsd_decay_style": _classes(
        "--lr-wsd-decay-style linear",
        f"{LONG} --lr-decay-style warmup_stable_decay --lr-warmup-iters 1 --lr-wsd-decay-iters 4",
    ),
    "weight_decay": _classes("--weight-decay 0.5"),
    "adam_beta1": _classes("--adam-beta1 0.5"),
    "adam_beta2": _classes("--adam-beta2 0.5"),
    "adam_epsilon": _classes("--adam-epsilon 1e-2"),
    "layerwise_lr_decay": _classes("--layerwise-lr-decay 0.5"),
    "ema_decay": _classes("--ema-decay 0.5"),
    "clip_grad": _classes("--clip-grad 0.01"),
    "label_smoothing": _classes("--label-smoothing 0.2"),
    "neftune_alpha": Case("chats", "--neftune-alpha 5"),
    "preference_loss": Case("pairs", "--preference-loss ipo"),
    "preference_beta": Case("pairs", "--preference-beta 0.5"),
    "simpo_gamma": Case("pairs", "--simpo-gamma 2", "--preference-loss simpo"),
    "kto_desirable_weight": Case("judged", "--kto-desirable-weight 2"),
    "kto_undesirable_weight": Case("judged", "--kto-undesirable-weight 2"),
    "train_iters": _classes("--train-iters 4"),
    "epochs": Case("passes", "--epochs 2"),
    "log_interval": _classes("--log-interval 2"),
    "log_layer_grad_norms": _classes("--log-layer-grad-norms"),
    "eval_interval": _classes("--eval-interval 1"),
    "eval_iters": Case("texts", "--eval-iters 1", "--split 50,50,0 --eval-interval 3 --micro-batch-size 1"),
    "save": _classes("--save {run}"),
    "overwrite": _classes("--overwrite", "--save {old}"),
    "resume": _classes("--resume", "--save {old} --train-iters 4"),
    "load": _classes("--load {old}", "--train-iters 4 --save {run}"),
    "weights_only": _classes("--weights-only", "--load {old} --save {run} --train-iters 4"),
    "save_interval": _classes("--save-interval 1", SAVE),
    "keep_checkpoints": _classes("--keep-checkpoints 1", f"{SAVE} --save-interval 1 --no-keep-best"),
    "profile": _classes("--profile 1", f"{LONG} {SAVE}"),
    "keep_best": _classes("--keep-best", f"{SAVE} --eval-interval 1 --metric-for-best accuracy --keep-checkpoints 1"),
    "metric_for_best": _classes("--metric-for-best accuracy", f"{SAVE} --eval-interval 1 --keep-best"),
    "metric_for_best_mode": _classes(
        "--metric-for-best-mode min", f"{SAVE} --eval-interval 1 --keep-best --metric-for-best accuracy"
    ),
    "early_stopping_patience": _classes(
        "--early-stopping-patience 1", f"{LONG} {SAVE} --eval-interval 1 --keep-best --lr 1e-9"
    ),
    "report_to": _classes("--report-to tensorboard", SAVE),
    "export_model": _classes("--no-export-model", SAVE),
    "seed": _classes("--seed 1"),
    "tokens_per_batch": Case("shapes", "--tokens-per-batch 64"),
    "max_shapes": Case("shapes", "--max-shapes 1"),
    "shape_multiple": Case("shapes", "--shape-multiple 16"),
    "moe_top_k": Case("experts", "--moe-top-k 1"),
    "moe_ffn_hidden_size": Case("experts", "--moe-ffn-hidden-size 8"),
    "moe_layer_interval": Case("experts", "--moe-layer-interval 2", "--num-layers 2"),
    "moe_loss_coeff": Case("experts", "--moe-loss-coeff 1"),
    "moe_z_loss_coeff": Case("experts", "--moe-z-loss-coeff 1"),
    "moe_capacity_factor": Case("experts", "--moe-capacity-factor 0.5"),
    "freeze": _classes("--freeze embeddings"),
    "train_only": _classes("--train-only classifier"),
    "lora_alpha": Case("adapters", "--lora-alpha 64"),
    "lora_dropout": Case("adapters", "--lora-dropout 0.5"),
    "lora_target_modules": Case("adapters", "--lora-target-modules c_fc"),
    "lora_modules_to_save": Case("adapters", "--lora-modules-to-save ln_f"),
    "lora_variant": Case("adapters", "--lora-variant rslora"),
    "quantize_base": Case("adapters", "--quantize-base int8"),
    "optimizer": _classes("--optimizer lamb"),
    "keep_fp32_parameters": _classes("--keep-fp32-parameters", "--mixed-precision bf16"),
    "grad_accum_dtype": _classes("--grad-accum-dtype bf16", "--mixed-precision bf16"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, gpt_folder: Path) -> dict[str, str]:
    """Folders of data and models, by the names in :data:`CASES`."""
    data = tmp_path_factory.mktemp("data")
    for name in ("classes", "more", "parts", "bad", "chats", "texts", "pairs", "judged"):
        (data / name).mkdir()
    rows = [f"{words(3 + i % 9, i)},{words(2, 90 + i)},{'ab'[i % 2]},{i % 3}" for i in range(20)]
    for file, lines in (
        ("classes/train.csv", rows), ("classes/other.csv", rows[::-3]), ("more/train.csv", rows[3:]),
        ("parts/train.csv", rows), ("parts/valid.csv", rows[:5]), ("parts/test.csv", rows[5:9]),
        ("bad/train.csv", [*rows, "one,two"]),
    ):  # fmt: skip
        (data / file).write_text("\n".join(["text,second,label,number", *lines]))
    talks = [(words(2 + i % 5, i), words(1 + i % 6, 40 + i)) for i in range(14)]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in talks]
    write_jsonl(data / "chats/train.jsonl", [{"messages": messages} for messages in chats])
    write_jsonl(data / "texts/train.jsonl", [{"text": text} for text in DOCUMENTS])
    write_jsonl(data / "pairs/train.jsonl", pairs())
    write_jsonl(data / "judged/train.jsonl", judged())
    (data / "corpus.txt").write_text("\n\n".join(f"{d}\n{d[::-1]}. {d}." for d in DOCUMENTS))
    (data / "other.txt").write_text("\n\n".join(DOCUMENTS[::-1]))
    models = tmp_path_factory.mktemp("models")
    model, larger = pretrained(models / "gpt", gpt_folder), pretrained(models / "larger", gpt_folder, layers=3)
    found = {
        "bert": bert_folder,
        "gpt": gpt_folder,
        "data": data,
        "model": model,
        "larger": larger,
        "cache": models / "cache",
    }
    places = {name: str(path) for name, path in found.items()} | {"run": str(models / "old")}
    Trainer(_filled(f"{RUNS['classes']} {SAVE}", places)).fit()
    return {**places, "classifier": str(models / "old" / "export"), "saved": str(models / "old")}


def _filled(text: str, places: dict[str, str]) -> list[str]:
    return [word.format(**places) for word in text.split()]


def _observed(case: Case, more: str, places: dict[str, str], folder: Path) -> dict[str, Any]:
    """Train, and return everything about the run that is the same each time."""
    shutil.copytree(places["saved"], folder / "old")
    here = {**places, "run": str(folder / "run"), "old": str(folder / "old")}
    template = Pretrainer if case.run == "shapes" else Trainer
    text = f"{RUNS[case.run]} {case.given} {more}"
    argv = _filled(text if "--save" in text else f"{text} --no-save", here)
    try:
        run = trained(template(argv))
    except RapidformerError as error:
        return {"error": error.render()}
    lines = [{key: value for key, value in line.items() if "per_second" not in key} for line in run["lines"]]
    weights = {name: hashlib.sha256(w.numpy().tobytes()).hexdigest() for name, w in run["weights"].items()}
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "events.out" not in path.name)
    events = any("events.out" in path.name for path in folder.rglob("*"))
    return {"lines": lines, "weights": weights, "files": files, "events": events, "best": run["summary"].get("best")}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(list(CASES)[::12], CASES))
def test_the_flag_changes_the_run(name: str, places: dict[str, str], tmp_path: Path) -> None:
    case = CASES[name]
    assert case.words.startswith((spelling(name), spelling(f"no_{name}"))), "the case has another flag"
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    without = _observed(case, "", places, tmp_path / "without")
    found = _observed(case, case.words, places, tmp_path / "with")
    assert "error" not in found, found["error"]
    assert found != without
