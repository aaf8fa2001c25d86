"""A flag changes a run: each is tried against the same run without it.

Other tests show flags whose effect needs several workers, a GPU or minutes. The flags that turn a switch on are
tried in every accepted pair of switches (``tests/switches/test_pairs.py``), where a switch without effect ends the run.
"""

import hashlib
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Pretrainer, Trainer
from rapidformer_templates.errors import RapidformerError
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


TRIED = {
    "classes": """
        --model-type electra; --num-layers 2; --hidden-size 32; --num-attention-heads 4; --max-position-embeddings 64
        --seq-length 8; --dropout 0.5; --micro-batch-size 4; --global-batch-size 8; --data-dir {data}/more
        --data-name other.csv; --text-column second; --pair-column second; --label-column number; --seed 1
        --validation-fraction 0.3; --max-train-samples 5; --max-eval-samples 1; --eval-data-name more=other.csv
        --group-by-length; --lr 2e-2; --lr-decay-style cosine; --min-lr 5e-3; --lr-decay-iters 9; --lr-warmup-iters 2
        --lr-warmup-fraction 0.5; --lr-warmup-samples 8; --weight-decay 0.5; --adam-beta1 0.5; --adam-beta2 0.5
        --adam-epsilon 1e-2; --layerwise-lr-decay 0.5; --ema-decay 0.5; --clip-grad 0.01; --label-smoothing 0.2
        --train-iters 4; --log-interval 2; --log-layer-grad-norms; --eval-interval 1; --save {run}; --optimizer lamb
        --freeze embeddings; --train-only classifier; --new-head | --pretrained-model-name-or-path {classifier}
        --problem-type regression | --label-column number; --skip-bad-lines | --data-dir {data}/bad
        --evaluate-test | --data-dir {data}/parts --export-model --save {run}
        --lr-power 2 | --lr-decay-style polynomial
        --lr-num-cycles 2 | --train-iters 6 --lr-decay-style cosine_with_restarts
        --lr-wsd-decay-iters 4 | --train-iters 6 --lr-decay-style warmup_stable_decay --lr-warmup-iters 1
        --lr-wsd-decay-style linear | --train-iters 6 --lr-decay-style warmup_stable_decay --lr-warmup-iters 1 \
          --lr-wsd-decay-iters 4
        --overwrite | --save {old}; --resume | --save {old} --train-iters 4; --load {old} | --train-iters 4 --save {run}
        --weights-only | --load {old} --save {run} --train-iters 4; --save-interval 1 | --save {run}
        --report-to tensorboard | --save {run}; --no-export-model | --save {run}
        --profile 1 | --train-iters 6 --save {run}
        --keep-checkpoints 1 | --save {run} --save-interval 1 --no-keep-best
        --keep-best | --save {run} --eval-interval 1 --metric-for-best accuracy --keep-checkpoints 1
        --metric-for-best accuracy | --save {run} --eval-interval 1 --keep-best
        --metric-for-best-mode min | --save {run} --eval-interval 1 --keep-best --metric-for-best accuracy
        --early-stopping-patience 1 | --train-iters 6 --save {run} --eval-interval 1 --keep-best --lr 1e-9
        --keep-fp32-parameters | --mixed-precision bf16; --grad-accum-dtype bf16 | --mixed-precision bf16""",
    "chats": "--tokenizer-path {bert}; --loss-on all; --pack-sequences; --neftune-alpha 5",
    "texts": """
        --data-path {data}/other.txt; --split 50,30,20; --text-unit line; --data-cache-dir {run}/cache; --streaming
        --keep-documents-apart | --micro-batch-size 4; --shuffle-buffer 2 | --streaming
        --eval-iters 1 | --split 50,50,0 --eval-interval 3 --micro-batch-size 1""",
    "masked": "--mask-prob 0.5; --whole-word-mask | --mask-prob 0.4",
    "words": "--task causal_lm",
    "passes": "--epochs 2",
    "pairs": """
        --pretrained-model-name-or-path {larger}; --preference-loss ipo; --preference-beta 0.5
        --simpo-gamma 2 | --preference-loss simpo""",
    "judged": "--kto-desirable-weight 2; --kto-undesirable-weight 2",
    "shapes": "--tokens-per-batch 64; --max-shapes 1; --shape-multiple 16",
    "experts": """
        --moe-top-k 1; --moe-ffn-hidden-size 8; --moe-loss-coeff 1; --moe-z-loss-coeff 1; --moe-capacity-factor 0.5
        --moe-layer-interval 2 | --num-layers 2""",
    "adapters": """
        --lora-alpha 64; --lora-dropout 0.5; --lora-target-modules c_fc; --lora-modules-to-save ln_f
        --lora-variant rslora; --quantize-base int8""",
}
"""Flags with values that change a run, by the keys of :data:`RUNS`. Both runs get the flags behind ``|``."""

CASES = [
    (run, *(part.strip() for part in f"{case}|".split("|")[:2]))
    for run, cases in TRIED.items()
    for case in cases.replace("\n", ";").split(";")
    if case.strip()
]
"""(run, the flag and its value, flags of both runs)."""


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
    talks = [(("user", words(2 + i % 5, i)), ("assistant", words(1 + i % 6, 40 + i))) for i in range(14)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    write_jsonl(data / "chats/train.jsonl", chats)
    write_jsonl(data / "texts/train.jsonl", [{"text": text} for text in DOCUMENTS])
    write_jsonl(data / "pairs/train.jsonl", pairs())
    write_jsonl(data / "judged/train.jsonl", judged())
    (data / "corpus.txt").write_text("\n\n".join(f"{d}\n{d[::-1]}. {d}." for d in DOCUMENTS))
    (data / "other.txt").write_text("\n\n".join(DOCUMENTS[::-1]))
    models = tmp_path_factory.mktemp("models")
    found = {"bert": bert_folder, "gpt": gpt_folder, "data": data, "cache": models / "cache", "run": models / "old"}
    found |= {"model": pretrained(models / "gpt", gpt_folder)}
    found |= {"larger": pretrained(models / "larger", gpt_folder, layers=3)}
    places = {name: str(path) for name, path in found.items()}
    Trainer(_filled(f"{RUNS['classes']} --save {{run}}", places)).fit()
    return {**places, "classifier": str(models / "old" / "export"), "saved": str(models / "old")}


def _filled(text: str, places: dict[str, str]) -> list[str]:
    return [word.format(**places) for word in text.split()]


def _observed(run: str, flags: str, places: dict[str, str], folder: Path) -> dict[str, Any]:
    """Train, and return everything about the run that is the same each time."""
    shutil.copytree(places["saved"], folder / "old")
    here = {**places, "run": str(folder / "run"), "old": str(folder / "old")}
    template = Pretrainer if run == "shapes" else Trainer
    argv = _filled(f"{RUNS[run]} {flags}" if "--save" in flags else f"{RUNS[run]} {flags} --no-save", here)
    try:
        found = trained(template(argv))
    except RapidformerError as error:
        return {"error": error.render()}
    lines = [{key: value for key, value in line.items() if "per_second" not in key} for line in found["lines"]]
    weights = {name: hashlib.sha256(w.numpy().tobytes()).hexdigest() for name, w in found["weights"].items()}
    files = sorted(re.sub("events.out.*", "events", str(path.relative_to(folder))) for path in folder.rglob("*"))
    return {"lines": lines, "weights": weights, "files": files, "best": found["summary"].get("best")}


@pytest.fixture(scope="module")
def without(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """Train without the flag, once for all flags of a run."""
    return cache(lambda run, given: _observed(run, given, places, tmp_path_factory.mktemp("without") / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(("run", "words", "given"), by_default(CASES[::24], CASES))
def test_the_flag_changes_the_run(
    run: str, words: str, given: str, without: Any, places: dict[str, str], tmp_path: Path
) -> None:
    found = _observed(run, f"{given} {words}", places, tmp_path / "with")
    assert "error" not in found, found["error"]
    assert found != without(run, given)
