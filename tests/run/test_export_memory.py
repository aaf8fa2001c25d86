"""An export needs memory for a few tensors, and not for the whole model. Files that are mapped do not count."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from rapidformer_templates.models import weight_files
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.export import export_checkpoint
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import VOCABULARY
from tests.support.measured_export import Weights, growth_of_process
from tests.support.worker_pool import run_in_workers

pytestmark = [
    pytest.mark.longer,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the memory from /proc"),
]

SHARD_BYTES = 16 << 20
WHOLE = 144
"""MB of each model, at least. The largest tensor has 4 MB."""
BOUND = 80
"""MB that an export may need, for a few tensors at a time and what Python and the allocator keep."""


def _mixtral() -> MixtralConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 4}
    return MixtralConfig(vocab_size=VOCABULARY, num_local_experts=4, num_key_value_heads=4, **sizes)


def _export_checkpoint(workers: Workers, folder: Path) -> float:
    torch.manual_seed(0)
    model = MixtralForCausalLM(_mixtral())
    saved = checkpoint.save(folder, 1, Weights(model), {}, workers)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "model")
    model.save_pretrained(folder / "plain")  # transformers imports other packages the first time
    del model
    with growth_of_process() as growth, mock.patch.object(weight_files, "SHARD_BYTES", SHARD_BYTES):
        export_checkpoint(saved, folder / "model", folder / "export", averages=False)
        return growth() / 2**20


def _merge(workers: Workers, folder: Path) -> float:
    from peft import LoraConfig, get_peft_model

    from rapidformer_templates.switches.lora.exported import merge

    torch.manual_seed(0)
    base = MixtralForCausalLM(_mixtral()).to(torch.bfloat16)
    base.save_pretrained(folder / "base")
    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    adapted = get_peft_model(base, LoraConfig(init_lora_weights=False, **targets))
    adapted.save_pretrained(folder / "adapters")
    base.config.save_pretrained(folder / "adapters")
    del base, adapted
    with growth_of_process() as growth, mock.patch.object(weight_files, "SHARD_BYTES", SHARD_BYTES):
        merge(folder / "adapters", folder / "export", str(folder / "base"))
        return growth() / 2**20


@pytest.mark.parametrize("export", [_export_checkpoint, _merge])
def test_an_export_needs_little_memory(export: Callable[[Workers, Path], float], tmp_path: Path) -> None:
    assert run_in_workers(1, export, tmp_path)[0] < BOUND
    files = list((tmp_path / "export").glob("model-*.safetensors"))
    assert len(files) >= WHOLE // (SHARD_BYTES >> 20)
    assert sum(file.stat().st_size for file in files) >= WHOLE << 20
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    shutil.rmtree(tmp_path)
