"""Pretrained folders with quantized weights: refused, or dequantized while they are read."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)  # fmt: skip

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.loading import read_weights
from tests.support.messages import Says
from tests.support.preference_runs import pretrained, words
from tests.support.texts import write_jsonl

pytestmark = pytest.mark.slow

METHODS: Mapping[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes of former versions": {"load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    """A folder with a model and rows."""
    folder = tmp_path_factory.mktemp("quantized")
    pretrained(folder / "base", gpt_folder)
    write_jsonl(folder / "train.jsonl", [{"text": words(3 + i % 9, i)} for i in range(8)])
    write_jsonl(folder / "valid.jsonl", [{"text": words(4, i)} for i in range(4)])
    return folder


def _flags(root: Path, start: Path, more: str = "") -> list[str]:
    flags = f"--task causal_lm --data-dir {root} --pretrained-model-name-or-path {start} --train-iters 2 --lr 1e-2"
    return f"{flags} --seq-length 32 --micro-batch-size 4 --device cpu {more or '--no-save'}".split()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("more", ["", "--no-save --lora-rank 2"], ids=["whole", "adapters"])
def test_quantized_weights_are_not_trained(method: str, more: str, root: Path, tmp_path: Path, says: Says) -> None:
    """transformers would leave the codes unchanged, and train what is not quantized."""
    shutil.copytree(root / "base", tmp_path / "codes")
    config = json.loads((tmp_path / "codes/config.json").read_text())
    (tmp_path / "codes/config.json").write_text(json.dumps(config | {"quantization_config": METHODS[method]}))
    flags = _flags(root, tmp_path / "codes", more)
    for command in ("", "plan "):
        says.command(f"{command}{' '.join(flags)}")
    with says(ModelError):
        Trainer(flags).fit()


@pytest.fixture(scope="module")
def codes(root: Path) -> Path:
    """The model in bitsandbytes' 4 bits, as transformers saves it."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(root / "llama")
    model = AutoModelForCausalLM.from_pretrained(root / "llama", quantization_config=how, dtype=torch.float32)
    model.save_pretrained(root / "codes")
    tokenizer.save_pretrained(root / "codes")
    return root / "codes"


def test_the_way_out_is_the_model_in_4_bits(root: Path, codes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of bitsandbytes can be evaluated. Its weights, dequantized as the manual says, are the same model."""
    manual = (Path(__file__).parents[2] / "docs/adapters.md").read_text()
    (program,) = (part.partition("```")[0] for part in manual.split("```python\n")[1:] if "dequantize" in part)
    exec(program.replace('"FOLDER"', repr(str(codes))).replace('"DEQUANTIZED"', repr(str(root / "whole"))))
    functional = pytest.importorskip("bitsandbytes").functional
    whole = AutoModelForCausalLM.from_pretrained(root / "whole").state_dict()
    layers = [(n, m) for n, m in AutoModelForCausalLM.from_pretrained(codes).named_modules() if hasattr(m, "weight")]
    quantized = {name: layer.weight for name, layer in layers if hasattr(layer.weight, "quant_state")}
    assert len(quantized) == 14
    for name, weight in quantized.items():
        assert torch.equal(functional.dequantize_4bit(weight.data, weight.quant_state), whole[f"{name}.weight"]), name
    losses = []
    for folder in (codes, root / "whole"):
        capsys.readouterr()
        assert main(["evaluate", str(folder), "--task", "causal_lm", "--data-dir", str(root), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["eval_loss"])
    # Some processors multiply codes in bf16, which rounds to 8 bits.
    assert losses[0] == pytest.approx(losses[1], rel=2**-9)
    assert main(_flags(root, root / "whole", f"--lora-rank 2 --save {root / 'run'}")) == 0
    with pytest.raises(ModelError, match=r"the weights in .*codes are quantized"):
        Trainer(_flags(root, codes)).fit()


def test_a_model_of_a_script_is_not_trained_either(root: Path, codes: Path) -> None:
    class Job(Trainer):
        def build_model(self) -> nn.Module:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(codes)
            return model

    with pytest.raises(ModelError, match=r"the weights of LlamaForCausalLM are quantized \(bitsandbytes\)") as caught:
        Job(_flags(root, root / "base")).fit()
    assert "build_model()" in str(caught.value)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The 16 numbers of a code of 4 bits in mxfp4. 32 of them share a power of two."""


def test_mxfp4_is_dequantized(root: Path, tmp_path: Path, gpt_folder: Path) -> None:
    """gpt-oss has no other weights. Kernels for mxfp4 would leave its experts out of the training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vocabulary = len(AutoTokenizer.from_pretrained(gpt_folder))
    GptOssForCausalLM(GptOssConfig(vocab_size=vocabulary, **sizes, **experts)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(gpt_folder).save_pretrained(tmp_path)
    stored, expected = {}, {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = weight
            continue
        count, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 123, (count, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = E2M1[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()]
        values = values * 2.0 ** (scales[..., None].float() - 127)
        expected[name] = values.flatten(-2).transpose(1, 2)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    model, _ = read_weights(AutoModelForCausalLM, tmp_path, AutoConfig.from_pretrained(tmp_path))
    for name, weight in expected.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), weight)
    assert all(parameter.requires_grad for parameter in model.parameters())
    run = Trainer(_flags(root, tmp_path, f"--lora-rank 2 --save {tmp_path / 'run'}"))
    loss = run.fit()["metrics"]["eval_loss"]
    assert main(["evaluate", str(tmp_path / "run")]) == 0  # the base is dequantized here, too
    assert run.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)
