"""``rapidformer export --gguf`` on a converter that writes with the gguf package, as llama.cpp's own does."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from tests.support.messages import Says
from tests.support.preference_runs import make

CONVERTER = """#!/usr/bin/env python3
import argparse, sys
from gguf import GGUFWriter
from safetensors.numpy import load_file
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
for name in ("model", "--outfile", "--outtype"):
    parser.add_argument(name)
options = parser.parse_args()
FAILURE
tokenizer = AutoTokenizer.from_pretrained(options.model)
writer = GGUFWriter(options.outfile, "gpt2")
writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
writer.add_eos_token_id(tokenizer.eos_token_id)
CHANGE
for name, weight in load_file(options.model + "/model.safetensors").items():
    writer.add_tensor(name, weight)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
NEEDS_GGUF = pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf: make test-optional")
TEMPLATE = "writer.add_chat_template(tokenizer.chat_template)"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a converter on PATH."""

    def put(failure: str = "", change: str = TEMPLATE) -> None:
        file = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(CONVERTER.replace("FAILURE", failure).replace("CHANGE", change))
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")

    return put


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, gpt_folder: Path) -> Path:
    given = make(tmp_path / "data", gpt_folder, [{"text": "the cat sat"}] * 5)
    given.remove("--no-export-model")
    (tmp_path / "data/model/chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    flags = f"--task causal_lm --micro-batch-size 2 {getattr(request, 'param', '')}".split()
    Trainer([*flags, *given, "--save", str(tmp_path / "run")]).fit()
    return tmp_path / "run"


def test_what_is_missing_is_told(run: Path, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    says.command(f"export {run} --gguf q8_0")
    says.command(f"export {run} --gguf q4_k")


@NEEDS_GGUF
def test_the_file_is_compared_with_the_export(run: Path, install: Install, says: Says) -> None:
    import gguf

    install()
    assert main(["export", str(run), "--gguf", "f32"]) == 0
    reader = gguf.GGUFReader(run / "export/model-f32.gguf")
    assert reader.fields["tokenizer.chat_template"].contents() == (run / "export/chat_template.jinja").read_text()
    (run / "export/model-f32.gguf").unlink()
    before = sorted(run.rglob("*"))
    for failure, change in (
        ("sys.exit('NotImplementedError: BPE pre-tokenizer was not recognized')", TEMPLATE),
        ("", ""),
        ("", "writer.add_eos_token_id(5)" + "; " + TEMPLATE),
    ):
        install(failure, change)
        says.command(f"export {run} --gguf f32")
    assert sorted(run.rglob("*")) == before
    install()
    assert main(["export", str(run), "--gguf", "bf16", "--step", "3"]) == 0
    assert (run / "export-step-3/model-bf16.gguf").is_file()


@NEEDS_GGUF
def test_adapters_are_merged_first(run: Path, install: Install, says: Says) -> None:
    install()
    (run / "export/adapter_config.json").write_text("{}")
    says.command(f"export {run} --gguf f32")


@NEEDS_GGUF
@pytest.mark.parametrize("run", ["--lora-rank 2"], indirect=True)
def test_a_file_is_added_to_a_merged_model(run: Path, install: Install) -> None:
    import gguf

    install()
    export = ["export", str(run), "--merge", "--gguf"]
    weights = run / "merged/model.safetensors"
    assert main([*export, "f32"]) == 0
    merged = weights.stat().st_ino
    assert main([*export, "bf16"]) == 0
    assert weights.stat().st_ino == merged  # it is not merged again
    tensors = load_file(weights)
    for kind in ("f32", "bf16"):
        found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(run / f"merged/model-{kind}.gguf").tensors}
        assert found.keys() == tensors.keys()
        assert all((found[name] == tensor).all() for name, tensor in tensors.items())
    os.utime(run / "export/adapter_config.json")  # other adapters
    assert main([*export, "f16"]) == 2
    assert main([*export, "f16", "--overwrite"]) == 0
    assert [file.name for file in (run / "merged").glob("*.gguf")] == ["model-f16.gguf"]
