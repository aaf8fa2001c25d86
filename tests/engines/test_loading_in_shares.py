"""Pretrained weights that each worker reads in part have the bits of those that one process reads whole."""

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import modeling_utils

from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.engines.gather_on_use import divided_construction
from rapidformer_templates.models import weight_files
from rapidformer_templates.models.loading import build_model
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.switches.mixture_of_experts import transform as mixtures
from rapidformer_templates.switches.mixture_of_experts.transform import KEY, MixtureSizes
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import VOCABULARY, PretrainedJob
from tests.support.parity import Trained, trained, weights_apart
from tests.support.selection import by_default, few
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.distributed]

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
MODELS = {
    "gpt2": {"n_positions": 64, "n_inner": 96},
    "llama": {"intermediate_size": 96, "num_key_value_heads": 2},
    "mixtral": {"intermediate_size": 96, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2},
    "bert": {"intermediate_size": 96, "max_position_embeddings": 64},
}
HEADS = {"bert": "AutoModelForSequenceClassification"}


class Case(NamedTuple):
    """A saved model: its architecture, the type of its weights, and how it is saved."""

    architecture: str
    dtype: str
    files: str = "one"


CASES = [
    Case("gpt2", "float16"), Case("llama", "bfloat16", "several"), Case("mixtral", "bfloat16"), Case("bert", "float32"),
    Case("gpt2", "bfloat16", "adapters"), Case("llama", "float16", "bin"), Case("llama", "bfloat16", "old bin"),
    Case("gpt2", "bfloat16", "converted"), Case("gpt2", "float32"), Case("llama", "float32"),
    Case("mixtral", "float16", "several"), Case("mixtral", "float32"), Case("bert", "bfloat16"),
]  # fmt: skip
DEFAULT = [(2, CASES[1]), (2, CASES[2])]


def _save(case: Case, folder: Path) -> Path:
    """Save a model with random weights, and return the folder to load."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(case.architecture, **SIZES, **MODELS[case.architecture])
    kind = transformers.AutoModelForMaskedLM if case.architecture == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).to(getattr(torch, case.dtype))
    if case.files == "converted":
        setattr(model.config, KEY, asdict(MixtureSizes(experts=3, top_k=1)))
        mixtures.rebuild(model)
    model.save_pretrained(folder / "base", max_shard_size="100KB" if case.files == "several" else "1GB")
    if case.files == "converted":
        mixtures.mark(folder / "base")
    if "bin" in case.files:
        is_archive = case.files == "bin"
        torch.save(model.state_dict(), folder / "base/pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
        (folder / "base/model.safetensors").unlink()
    if case.files != "adapters":
        return folder / "base"
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    settings = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model.name_or_path = str(folder / "base")
    peft.get_peft_model(model, settings).save_pretrained(folder / "adapters")
    model.config.save_pretrained(folder / "adapters")
    return folder / "adapters"


class Loaded(NamedTuple):
    """The cost of loading a model for a worker.

    Attributes:
        read: bytes that it has read in parts of tensors.
        divisions: how many tensors were sent from the first worker to the others.
        gathers: how many tensors all workers have exchanged.
    """

    read: int
    divisions: int
    gathers: int


def _load(workers: Workers, folder: Path, tokenizer: Path, head: str, least_whole: int) -> Loaded:
    """Load a model in shares and whole, and compare all bits."""
    flags = {"pretrained_model_name_or_path": str(folder), "tokenizer_path": str(tokenizer)}
    config, read = RunConfig().replace("command line", **flags), []

    def build() -> nn.Module:
        torch.manual_seed(3)
        labels = {"num_labels": 80} if "Classification" in head else {}
        return build_model(config, head, **labels)

    def count(file: weight_files.WeightFile, start: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        read_file(file, start, buffer)

    whole, read_file = build(), weight_files._read
    construction = ModelUnderConstruction()
    construction.least_whole = least_whole
    with divided_construction(construction), mock.patch.object(weight_files, "_read", count):
        model = build()
        divisions, gathers = construction.divisions, construction.gathers
        construction.finish()  # reads what was not used
        cost = Loaded(sum(read), divisions, gathers)
    expected, found = whole.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name]), name
    assert [len(set(map(id, one.parameters()))) for one in (whole, model)] == [len(list(whole.parameters()))] * 2
    return cost


@pytest.mark.parametrize(("world", "case"), few(DEFAULT, itertools.product((2, 4), CASES)))
def test_weights_are_read_in_shares(
    world: int, case: Case, tmp_path: Path, gpt_folder: Path, bert_folder: Path
) -> None:
    folder = _save(case, tmp_path)
    tokenizer = bert_folder if case.architecture == "bert" else gpt_folder
    head = HEADS.get(case.architecture, "AutoModelForCausalLM")
    reads_whole = case.files in ("old bin", "adapters")
    least_whole = 8 << 10 if reads_whole else 1 << 20  # all that is not read in shares would be whole
    costs = run_in_workers(world, _load, folder, tokenizer, head, least_whole)
    assert len({(cost.divisions, cost.gathers) for cost in costs}) == 1
    assert (costs[0].divisions > 0) == reads_whole
    assert (costs[0].gathers > 0) == (case.files == "adapters")  # they are merged
    if case.files == "old bin":
        assert sum(cost.read for cost in costs) == 0
        return
    sizes = [size for size in _bytes_of_tensors(tmp_path / "base") if size >= weight_files.SMALLEST]
    for cost in costs:
        assert 0 < cost.read <= sum(sizes) / world + len(sizes) * weight_files.SMALLEST
    is_part = case.architecture == "bert"  # the head of the file is not used
    assert sum(cost.read for cost in costs) == sum(sizes) or (is_part and sum(cost.read for cost in costs) < sum(sizes))


def _bytes_of_tensors(folder: Path) -> list[int]:
    sizes = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes += [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118 - it is not a dictionary
    for path in folder.glob("*.bin"):
        sizes += [tensor.nbytes for tensor in torch.load(path).values()]
    return sizes


class Unusual(nn.Module):
    """Uses tensors of a file in other ways than as parameters."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        with modeling_utils.safe_open(path, framework="pt") as file:
            whole, split, table, scaled, overwritten, copied, *joined = (file.get_slice(f"{i}")[...] for i in range(9))
        self.whole = nn.Parameter(whole)
        self.upper, self.lower = (nn.Parameter(part.contiguous()) for part in split.chunk(2))
        self.register_buffer("table", table)
        self.scaled = nn.Parameter(scaled.float() * 2)
        overwritten.fill_(3.0)
        self.register_buffer("overwritten", overwritten)
        self.row = nn.Parameter(copied[1].clone())
        self.copied = nn.Parameter(copied)
        self.joined = nn.Parameter(torch.cat([joined[0], joined[1].half()], dim=1))
        self.with_another = nn.Parameter(torch.stack([joined[0], torch.ones_like(joined[0])]))
        self.rest = nn.Parameter(torch.cat([joined[2].double(), joined[1].double()], dim=-2))
        self.loaded = nn.ParameterList(torch.zeros(6, 64, 65) for _ in range(2))
        with torch.no_grad():
            self.loaded[0].copy_(joined[2])
            self.loaded[1].copy_(self.loaded[0])
            self.loaded[0].add_(1.0)
        self.transposed = nn.Parameter(torch.stack([joined[0].mT, joined[1].mT.half()], dim=-1))


def _build_unusual(workers: Workers, path: Path) -> list[int]:
    whole = Unusual(path).double()
    construction = ModelUnderConstruction()
    construction.least_whole = 8 << 10
    with divided_construction(construction):
        model = Unusual(path)
        construction.divide_all()
        before = construction.gathers
        assert before > 0
        model.double()
        assert construction.gathers == before + 2  # the halves, which are views of one tensor
        construction.divide_all()
        with construction.paused():
            assert {name for name, p in model.named_parameters() if p.untyped_storage().nbytes()} == set()
        exchanges = [construction.divisions, construction.gathers]
        construction.finish()
    for (name, wanted), (other, found) in zip(whole.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(wanted, found), name
    return exchanges


def test_tensors_of_files_are_used_like_others(tmp_path: Path) -> None:
    types = [torch.float32] * 7 + [torch.float16, torch.bfloat16]
    tensors = {f"{i}": torch.randn(6, 64, 65).to(dtype) for i, dtype in enumerate(types)}
    save_file(tensors, tmp_path / "model.safetensors")
    first, *others = run_in_workers(3, _build_unusual, tmp_path / "model.safetensors")
    assert all(exchanges == first for exchanges in others)


def _use_twice(workers: Workers, path: Path) -> list[tuple[bool, bool]]:
    """Return whether each tensor of a file is still in the file, and in memory, after all were read and one written."""
    construction, whole = ModelUnderConstruction(), load_file(path)
    with divided_construction(construction):
        with modeling_utils.safe_open(path, framework="pt") as file:
            tensors = [nn.Parameter(file.get_slice(name)[...], requires_grad=False) for name in ("read", "written")]
        for _ in range(2):
            assert torch.equal(tensors[0].sum(), whole["read"].sum())
            construction.divide_all()
        tensors[1].mul_(2.0)
        construction.divide_all()
        storages = construction.storages_of(tensors)
        places = [(storage.source is not None, storage.share is not None) for storage in storages]
        construction.finish()
    assert torch.equal(tensors[0], whole["read"])
    assert torch.equal(tensors[1], whole["written"] * 2.0)
    return places


def test_only_what_was_written_needs_memory(tmp_path: Path) -> None:
    save_file({"read": torch.randn(64, 65), "written": torch.randn(64, 65)}, tmp_path / "model.safetensors")
    for places in run_in_workers(2, _use_twice, tmp_path / "model.safetensors"):
        assert places == [(True, False), (False, True)]


STEPS = "--train-iters 2 --global-batch-size 4 --lr 1e-3 --log-interval 1"
FLAGS = [
    "--fsdp-memory-optimization",
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--zero-3-memory-optimization",
]


def _train(folder: Path, flags: str) -> Trained:
    kind = type("Job", (PretrainedJob,), {"folder": str(folder), "double": True})
    return trained(kind([*STEPS.split(), *flags.split()]))


def _train_in_shares(workers: Workers, folder: Path, flags: str) -> tuple[Trained, int]:
    """Train with everything divided while the model is built. Return also how often a tensor in a file was read."""
    with (
        mock.patch.object(ModelUnderConstruction, "least_whole", 8 << 10),
        mock.patch.object(weight_files, "_read", side_effect=weight_files._read) as read,
    ):
        return _train(folder, flags), read.call_count


@pytest.mark.parametrize("flags", by_default(FLAGS[:1], FLAGS))
def test_engines_train_a_model_that_was_read_in_shares(flags: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))
    model.bfloat16().save_pretrained(tmp_path)
    wanted = _train(tmp_path, "--micro-batch-size 4")
    rounding = 1e-6 if "zero" in flags else 1e-11  # DeepSpeed updates weights in fp32
    for run, count in run_in_workers(2, _train_in_shares, tmp_path, f"{flags} --micro-batch-size 2"):
        assert count > 0
        assert [loss for loss, _ in run["curve"]] == pytest.approx([loss for loss, _ in wanted["curve"]], rel=rounding)
        assert weights_apart(run["weights"], wanted["weights"]) < rounding
