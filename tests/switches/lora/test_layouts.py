"""Adapters follow one process under every engine, move between engines, and are merged into the evaluated model."""

import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models import weight_files
from tests.support import mixtures, parity
from tests.support.jobs import OTHERS, VOCABULARY, CausalJob
from tests.support.messages import Says
from tests.support.parallel_jobs import begin
from tests.support.parity import assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
from peft import LoraConfig, get_peft_model

from rapidformer_templates.switches.lora.exported import _note_untied, merge, read_config, read_model

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LORA = "--lora-rank 3 --lora-alpha 24"
STEPS = f"--train-iters 4 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --no-export-model {LORA}"
DORA = "--lora-variant dora"
LAYOUTS = {  # name: (job, flags of the layout, flags that one process needs, too)
    "tp2-pp2": ("gpt2-4-tied", f"--micro-batch-size 4 {TENSOR} {PIPELINE}", ""),
    "tp2-dp2-zero-2": ("bert-4-untied", f"--micro-batch-size 2 {TENSOR} --zero-2-memory-optimization", ""),
    "pp2-dp2": ("neox-4-untied", f"--micro-batch-size 2 {PIPELINE} --use-distributed-optimizer", ""),
    "dp4-dora": ("gpt2-4-tied", "--micro-batch-size 2 --fsdp-memory-optimization", DORA),
}


@pytest.mark.longer
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_follows_one_process(layout: str) -> None:
    job, flags, more = LAYOUTS[layout]
    found = observed(4, job, True, f"{STEPS} {flags} {more}")[0]
    wanted = reference(job, True, f"{STEPS} --micro-batch-size 4 {more}")
    assert_follows(found, wanted, 1e-9, 1e-11)
    counts = [run["summary"]["receipts"]["trained_parameters"] for run in (found, wanted)]
    assert 0 < counts[0] == counts[1]  # from all pipeline stages
    assert len({loss for loss, _ in wanted["curve"]}) == 4
    assert len(wanted["evaluations"]) == 2
    assert all("lora" in name and float(weight.abs().sum()) > 0 for name, weight in wanted["weights"].items())


RESUMED = f"--train-iters 10 --save-interval 2 --global-batch-size 8 --lr 1e-2 --no-export-model {LORA}"
CHAINS = {
    "gpt2-8-double": (
        f"--micro-batch-size 4 {TENSOR} {PIPELINE}",
        "--micro-batch-size 2 --fsdp-memory-optimization --resume",
        "--micro-batch-size 2 --use-distributed-optimizer --resume",
        f"--micro-batch-size 4 {PIPELINE} --resume",
    ),
    "gpt2-8-tied": (
        "--micro-batch-size 2 --fsdp-memory-optimization",
        "--micro-batch-size 2 --zero-3-memory-optimization --resume",
        "--micro-batch-size 1 --zero-1-memory-optimization --resume",
        "--micro-batch-size 2 --oss-memory-optimization --resume",
    ),
}
OTHERS["gpt2-8-double"] = type("Double", (OTHERS["gpt2-8-tied"],), {"double": True})


def _chain(workers: Any, folder: str, job: str) -> list[tuple[float, float]]:
    """Return the curve of a run whose parts die after steps 3, 5, 7 and 9, one step after the last checkpoint."""
    curve: list[tuple[float, float]] = []
    for number, flags in enumerate(CHAINS[job]):
        curve = [*curve[:-1], *begin(job, folder, f"{RESUMED} {flags}", 2 * number + 3)]
    return curve


@pytest.mark.longer
@pytest.mark.parametrize("job", CHAINS)
def test_adapters_go_from_any_engine_to_any_other(job: str, tmp_path: Path) -> None:
    first = run_in_workers(4, _chain, str(tmp_path / "chain"), job)[0]
    last = begin(job, str(tmp_path / "chain"), f"{RESUMED} --micro-batch-size 2 --resume")
    whole = begin(job, str(tmp_path / "whole"), f"{RESUMED} --micro-batch-size 8")
    # Gradients of the first matrices start at zero, and Adam's first steps divide rounding by its own magnitude.
    limits = {"rtol": 1e-9, "atol": 1e-11} if job.endswith("double") else {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(torch.tensor([*first[:-1], *last]), torch.tensor(whole), **limits)


# Mixtures of experts, under every engine, with whole or divided experts.

MIXTURE = (
    "--train-iters 3 --eval-interval 2 --global-batch-size 8 --clip-grad 0.1 --weight-decay 0.1 --no-export-model"
    " --optimizer adamw_torch --num-experts 4 --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02 --lora-rank 3"
)
CONTEXT, GROUPS = "--context-parallel-size 2", "--expert-model-parallel-size 2"
FSDP, DIVIDED = "--fsdp-memory-optimization", "--expert-parallel"
ALL_OF_MIXTRAL = (  # adapters on all linear layers, experts and gates
    f"--micro-batch-size 1 {FSDP} --quantize-base int4",
    "--micro-batch-size 2 --oss-sdp-memory-optimization",
    f"--micro-batch-size 2 {TENSOR} --sequence-parallel",
    f"--micro-batch-size 2 {CONTEXT} --zero-1-memory-optimization",
    f"--micro-batch-size 2 {TENSOR} {DIVIDED}",
    f"--micro-batch-size 1 {GROUPS} {FSDP}",
)
EXPERTS_ALONE = (
    f"--micro-batch-size 2 {PIPELINE} {TENSOR}",
    f"--micro-batch-size 1 {GROUPS} --checkpoint-activations",
)
IN_MIXTURES = [("mixtral", "all-linear,experts,gate", flags) for flags in ALL_OF_MIXTRAL]
IN_MIXTURES += [("qwen3-moe", "experts", flags) for flags in EXPERTS_ALONE]
"""For ``make test-longer``. The covering table has adapters in mixtures under every engine."""


@pytest.mark.longer
@pytest.mark.parametrize(("kind", "targets", "flags"), IN_MIXTURES)
def test_adapters_in_mixtures_follow_one_process(kind: str, targets: str, flags: str) -> None:
    job = f"{kind}-wide" if PIPELINE in flags else f"{kind}-shallow"  # four blocks for stages
    divided = any(size in flags for size in (TENSOR, CONTEXT, GROUPS))
    double = divided or "zero-" not in flags  # DeepSpeed's masters are in fp32
    steps, coding = f"{MIXTURE} --lora-target-modules {targets}", flags.partition("--quantize-base ")[1:]
    found = observed(4, job, double, f"{steps} {flags}", lr="1e-2")[0]
    wanted = reference(job, double, f"{steps} --micro-batch-size 8 {''.join(coding)}", lr="1e-2")
    within = (1e-10, 1e-10) if double else (1e-4, 1e-5)
    assert_follows(found, wanted, *within)
    assert_close(*(mixtures.losses_of(run["lines"]) for run in (found, wanted)), *within)
    load = "expert_load_by_layer"
    assert found["summary"]["receipts"][load] == wanted["summary"]["receipts"][load]
    assert len({loss for loss, _ in wanted["curve"]}) == 3
    assert len(wanted["evaluations"]) == 2
    assert all("lora" in name and float(weight.abs().sum()) > 0 for name, weight in wanted["weights"].items())


MERGED = "--train-iters 3 --eval-interval 3 --lr 1e-1 --no-keep-best --export-model --device cpu --lora-rank 4"
SHARD_BYTES = 5000
KINDS = {
    "adapters of the head": "--lora-target-modules c_attn,lm_head",
    "adapters of the embeddings": "--lora-target-modules c_attn,wte",
    "trained head": "--lora-modules-to-save lm_head",
    "trained embeddings": "--lora-modules-to-save wte",
    "dora": "--lora-variant dora --lora-target-modules c_attn,lm_head",
}
SHARDING = {"fsdp": "--fsdp-memory-optimization", "zero-3": "--zero-3-memory-optimization"}
CASES = [*((kind, "") for kind in KINDS), ("adapters of the head", "fsdp"), ("trained head", "zero-3")]


class Tied(CausalJob):
    tied = ""

    def make(self) -> torch.nn.Module:
        model: torch.nn.Module = GPT2LMHeadModel.from_pretrained(self.base, dtype=torch.float32)
        return model


def _train(workers: Any, folder: str, tied: str, flags: str) -> parity.Trained:
    job = type("Tied", (Tied,), {"base": tied})
    return parity.trained(job([*f"{MERGED} {flags}".split(), "--save", folder]))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "layout"),
    by_default([(kind, "") for kind in ("adapters of the head", "trained embeddings", "dora")], CASES),
)
def test_the_merged_model_is_the_one_that_was_evaluated(
    kind: str, layout: str, tied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, flags = str(tmp_path / "run"), f"{KINDS[kind]} --micro-batch-size {4 if layout else 8}"
    if layout:
        run = run_in_workers(2, _train, folder, str(tied), f"{flags} {SHARDING[layout]}")[0]
    else:
        run = _train(None, folder, str(tied), flags)
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as caught:
        merge(tmp_path / "run/export", tmp_path / "merged")
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == []
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    config = read_config(tmp_path / "run/export")
    here, _ = read_model(GPT2LMHeadModel, tmp_path / "run/export", config)
    _assert_same_weights(here, tmp_path / "run/export", tmp_path)
    data = CausalJob().build_data()
    assert data.valid is not None
    for model in (plain.eval(), here.eval()):
        assert model.config.tie_word_embeddings is False
        with torch.no_grad():
            loss = float(model(**data.collate(list(data.valid))).loss)
        assert loss == pytest.approx(run["evaluations"][-1], rel=1e-5)


def _assert_same_weights(in_memory: Any, adapters: Path, root: Path) -> None:
    """Assert that the merged files have the bits that peft computes in memory, in one file and in shards."""
    in_memory.config.use_cache = True
    in_memory.save_pretrained(root / "in memory")
    assert (root / "merged/model.safetensors").read_bytes() == (root / "in memory/model.safetensors").read_bytes()
    with mock.patch.object(weight_files, "SHARD_BYTES", SHARD_BYTES):
        merge(adapters, root / "shards")
    shards = [load_file(file) for file in (root / "shards").glob("*.safetensors")]
    assert len(shards) > 2
    expected = load_file(root / "in memory/model.safetensors")
    together = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[name], expected[name]) for name in expected)
    again = AutoModelForCausalLM.from_pretrained(root / "shards").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in in_memory.state_dict().items())


def test_a_weight_that_neither_folder_has_is_named(tied: Path, tmp_path: Path, says: Says) -> None:
    """Adapters of other programs have no fingerprints, so nothing else would notice it."""
    model = GPT2LMHeadModel.from_pretrained(tied)
    adapters, part = tmp_path / "adapters", tmp_path / "part"
    model.config.save_pretrained(adapters)
    get_peft_model(model, LoraConfig(target_modules=["c_attn"], base_model_name_or_path=str(tied))).save_pretrained(
        adapters
    )
    merge(adapters, tmp_path / "merged")
    shutil.copytree(tied, part)
    weights = load_file(part / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    with says(ModelError):
        merge(adapters, tmp_path / "random", str(part))
    assert not (tmp_path / "random").exists()


def test_an_architecture_that_ties_always_is_refused(tmp_path: Path, says: Says) -> None:
    """T5 scales the output of a tied head, so untied weights make a different model."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes)).save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    _note_untied(model)
    assert model.config.tie_word_embeddings
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with says(ModelError):
        _note_untied(model)
