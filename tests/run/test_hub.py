"""Models and data by name, uploads, and code of model folders, against a local server of the Hugging Face protocol."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import huggingface_hub.utils
import pytest
import torch
import yaml
from huggingface_hub import constants
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Finetuner
from rapidformer_templates.commands.main import main
from rapidformer_templates.data.finetuning.hub_cache import find_or_download
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.models.loading import read_config_of
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.hub import is_hub_name, model_folder
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run import push_to_hub
from rapidformer_templates.run.saved_model import find_saved
from tests.support.hub_server import DATA, MODEL, TOKEN, Hub, model_files, using_hub
from tests.support.messages import Says
from tests.support.preference_runs import pairs, pretrained
from tests.support.saved_models import open_saved
from tests.support.selection import by_default
from tests.support.texts import write_jsonl
from tests.support.worker_pool import run_in_workers

RUN = f"--task sequence_classification --pretrained-model-name-or-path {MODEL} --data-name {DATA} --lr 1e-3"
STEPS = "--train-iters 2 --micro-batch-size 2 --device cpu"
DOWNLOADS = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
DATA_DOWNLOADS = {"README.md", "train.csv", "validation.csv"}


@pytest.fixture
def model(hub: Hub, bert_folder: Path, tmp_path: Path) -> dict[str, bytes]:
    """Put the model on the hub. Returns its files."""
    files = model_files(bert_folder, tmp_path / "model")
    hub.repository(f"models/{MODEL}").commit(files)
    return files


@pytest.fixture(autouse=True)
def asks_the_hub_again_and_shows_no_bars() -> Iterator[None]:
    push_to_hub.create_repository.cache_clear()
    for package in (datasets, huggingface_hub.utils):
        package.disable_progress_bars()
    yield
    for package in (datasets, huggingface_hub.utils):
        package.enable_progress_bars()


def _command(words: str, *more: str) -> int:
    return main([*words.split(), *STEPS.split(), *more])


@pytest.mark.longer
@pytest.mark.slow
def test_a_run_downloads_what_it_needs_and_the_next_one_nothing(
    hub: Hub, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The first run also tries to upload its export, to a hub that refuses it. The run is not lost."""
    hub.read_only = True
    assert _command(RUN, "--save", str(tmp_path / "first"), "--push-to-hub", "someone/judge") == 0
    printed, export = capsys.readouterr().err, tmp_path / "first/export"
    assert "error: the export was not uploaded to someone/judge: " in printed
    assert f"upload it again with: hf upload someone/judge {export} ." in printed
    assert {"README.md", "model.safetensors"} <= {path.name for path in export.iterdir()}
    texts = {name for name in model if name.endswith((".json", ".txt"))} - {"onnx/config.json"}
    expected = texts | {"model.safetensors"} | DATA_DOWNLOADS
    assert sorted(hub.downloads()) == sorted(expected)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert _command(RUN, "--save", str(tmp_path / "second")) == 0
    assert hub.requests == []
    weights = [(tmp_path / name / "export/model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]


def _find(workers: Any, url: str, home: Path) -> tuple[str, str]:
    with using_hub(url, home):
        return str(model_folder(MODEL, None, "weights", flag="")), str(find_or_download(DATA, None, ""))


@pytest.mark.longer
@pytest.mark.slow
def test_one_of_two_workers_downloads(hub: Hub, model: dict[str, bytes], tmp_path: Path) -> None:
    first, second = run_in_workers(2, _find, hub.url, tmp_path / "home")
    assert first == second
    downloads = hub.downloads()
    assert len(downloads) == len(set(downloads))
    assert set(downloads) >= DOWNLOADS | DATA_DOWNLOADS


def test_plan_needs_only_the_configuration(hub: Hub, model: dict[str, bytes], says: Says) -> None:
    assert main(["plan", *RUN.split(), *STEPS.split()]) == 0
    assert hub.downloads() == ["config.json"]
    hub.requests.clear()
    says.command(f"plan {RUN} {STEPS} --num-experts 2")
    assert hub.requests == []


def test_plan_goes_without_a_configuration_that_is_out_of_reach(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["plan", *RUN.split(), *STEPS.split()]) == 0
    assert f"note: the sizes of {MODEL} are not known here" in capsys.readouterr().out


@pytest.mark.longer
def test_revision_chooses_a_branch_a_tag_or_a_commit(hub: Hub, model: dict[str, bytes]) -> None:
    repository = hub.repository(f"models/{MODEL}")
    commit = repository.commit({**model, "config.json": b'{"model_type": "bert", "hidden_size": 48}'}, "v1", "branch")
    for revision in ("v1", "branch", commit):
        assert "48" in (model_folder(MODEL, revision, "config", flag="") / "config.json").read_text()
    assert "48" not in (model_folder(MODEL, None, "config", flag="") / "config.json").read_text()


@pytest.mark.slow
def test_an_evaluation_has_the_splits_and_the_reference_of_the_run(
    hub: Hub, gpt_folder: Path, model: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def same(*flags: str) -> None:
        run = str(tmp_path / flags[1])
        assert main([*flags, "--save", run, *STEPS.split(), "--lr", "1e-3", "--eval-interval", "2"]) == 0
        capsys.readouterr()
        assert main(["evaluate", run, "--json"]) == 0
        metrics = json.loads((tmp_path / flags[1] / "summary.json").read_text())["metrics"]
        assert json.loads(capsys.readouterr().out) == pytest.approx(metrics, rel=1e-5)

    same(*RUN.split(), "--data-config", "chosen", "--data-split", "test_sft,train_sft")
    repository = hub.repository("models/someone/gpt")
    for layers, name in enumerate(("main", "v1"), start=1):
        folder = pretrained(tmp_path / name, gpt_folder, layers)
        repository.commit({file.name: file.read_bytes() for file in folder.iterdir()}, name)
    write_jsonl(tmp_path / "pairs.jsonl", pairs())
    begin = ("--pretrained-model-name-or-path", "someone/gpt", "--revision", "v1", "--seq-length", "48")
    same("--task", "preference", *begin, "--data-dir", str(tmp_path), "--data-name", "pairs")


@pytest.mark.longer
def test_weights_of_torch_if_there_are_no_safetensors(hub: Hub, model: dict[str, bytes]) -> None:
    hub.repository("models/someone/old").commit({k: v for k, v in model.items() if k != "model.safetensors"})
    folder = model_folder("someone/old", None, "weights", flag="")
    assert (folder / "pytorch_model.bin").is_file()


@pytest.mark.longer
def test_an_interrupted_download_continues(hub: Hub, model: dict[str, bytes]) -> None:
    folder = model_folder(MODEL, None, "weights", flag="")
    (folder / "model.safetensors").unlink()
    assert model_folder(MODEL, None, "tokenizer", flag="") == folder
    assert model_folder(MODEL, None, "weights", flag="") == folder
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]


def test_own_code_is_only_downloaded_on_request(hub: Hub, model: dict[str, bytes]) -> None:
    own = {"config.json": b'{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}', "own.py": b"class Own: ..."}
    hub.repository("models/someone/own").commit({**model, **own})
    folder = model_folder("someone/own", None, "weights", flag="")
    assert not (folder / "own.py").exists()
    assert (model_folder("someone/own", None, "weights", flag="", code=True) / "own.py").is_file()


MISTAKES = [
    "--pretrained-model-name-or-path someone/none", "--pretrained-model-name-or-path someone/gated", "--revision v9",
    "--data-name someone/none", "--data-name someone/gated", "--data-config none", "--data-split train,none",
    "--data-config chosen", "--push-to-hub tiny", "--push-to-hub other/tiny",
    "--push-to-hub someone/tiny --no-export-model",
]  # fmt: skip


@pytest.mark.parametrize("words", by_default(MISTAKES[::4], MISTAKES))
def test_mistakes_are_found_before_the_run(
    words: str, hub: Hub, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    for kind, files in (("models", model), ("datasets", {"train.csv": b"text,label\na,1\n"})):
        gated = hub.repository(f"{kind}/someone/gated")
        gated.commit(files)
        gated.gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_stranger" if "gated" in words else TOKEN)
    says.command(f"{RUN} {words} {STEPS} --save {tmp_path}/run", URL=hub.url)
    assert "Traceback" not in says.said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "is_offline"), [("", True), ("--revision v1", False), ("--pretrained-model-name-or-path FOLDER", True)]
)
def test_without_a_network_the_message_says_what_to_run(
    words: str, is_offline: bool, hub: Hub, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    says: Says,
) -> None:  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    says.command(f"{RUN} {words.replace('FOLDER', str(tmp_path / 'model'))} {STEPS} --no-save")
    assert hub.requests == []


def test_configuration_and_splits_of_a_data_set(hub: Hub, model: dict[str, bytes], tmp_path: Path, says: Says) -> None:
    flags = ["--data-config", "chosen", "--data-split", "train_sft,test_sft"]
    data = Finetuner([*RUN.split(), *STEPS.split(), *flags]).task.read_rows()
    assert data.valid is not None
    assert (len(data.train), len(data.valid)) == (16, 2)
    (tmp_path / "train.csv").write_text("text,label\na,1\n")  # splits are not for local files
    local = {"data_dir": str(tmp_path), "data_split": "train", "train_iters": 1, "model_type": "bert"}
    with says(RapidformerError):
        Finetuner(task="sequence_classification", **local).task.read_rows()


@pytest.mark.slow
def test_a_push_has_a_card(
    hub: Hub, model: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(RUN, "--save", str(tmp_path / "run"), "--push-to-hub", "someone/judge") == 0
    assert f"uploaded   {hub.url}/someone/judge" in capsys.readouterr().err
    repository = hub.repositories["models/someone/judge"]
    uploaded = repository.commits[repository.refs["main"]]
    export = tmp_path / "run/export"
    assert uploaded == {path.name: path.read_bytes() for path in export.iterdir()}
    _, header, body = uploaded["README.md"].decode().split("---\n", 2)
    card = yaml.safe_load(header)
    assert card["base_model"] == MODEL
    assert card["datasets"] == [DATA]
    assert card["pipeline_tag"] == "text-classification"
    (results,) = card["model-index"][0]["results"]
    assert {metric["type"] for metric in results["metrics"]} == {"eval_loss", "accuracy", "f1", "matthews"}
    assert "| `--train-iters` | 2 |" in body
    assert str(tmp_path) not in body
    code = body.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    with using_hub(hub.url, tmp_path / "another-home"):
        exec(code.replace('("someone/judge")', f'("{model_folder("someone/judge", None, "weights", flag="")}")'), names)
    reference = AutoModelForSequenceClassification.from_pretrained(export).state_dict()
    assert all(tensor.equal(reference[name]) for name, tensor in names["model"].state_dict().items())
    assert names["tokenizer"]("it is good")["input_ids"]


@pytest.mark.longer
@pytest.mark.slow
def test_adapters_name_their_base_on_the_hub(hub: Hub, model: dict[str, bytes], tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = f"{RUN} --revision main --lora-rank 2 --push-to-hub someone/adapters"
    assert _command(flags, "--save", str(run)) == 0
    settings = json.loads((run / "export/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == MODEL
    assert (settings["revision"], settings["task_type"]) == ("main", "SEQ_CLS")
    card = (run / "export/README.md").read_text()
    assert "library_name: peft" in card
    names: dict[str, Any] = {}
    folders = {name: str(model_folder(name, None, "weights", flag="")) for name in (MODEL, "someone/adapters")}
    code = card.split("```python\n")[1].split("```")[0]
    for name, folder in folders.items():
        code = re.sub(rf'(?<!hf_hub_download\()"{name}"', f'"{folder}"', code)
    exec(code, names)
    rows = names["tokenizer"](["it is good", "it is bad"], return_tensors="pt")
    expected = open_saved(run).model(**rows).logits
    torch.testing.assert_close(names["model"].eval()(**rows).logits, expected)
    assert not torch.equal(expected[0], expected[1])


def test_a_file_in_a_folder_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``data/chat`` looks like the name of a data set there, and the card would link to it."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for folder in (".", "data"):
        (named,) = push_to_hub._data_sets(RunConfig().replace("the test", data_dir=folder, data_name="chat"))
        assert not is_hub_name(named)
        assert Path(named) == tmp_path / folder / "chat"


@pytest.mark.parametrize("token", by_default([""], ["", "hf_reader", "hf_wrong"]))
def test_a_push_needs_a_token_that_may_write(
    token: str, hub: Hub, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    says.command(f"{RUN} {STEPS} --save {tmp_path}/run --push-to-hub someone/judge", URL=hub.url)
    assert not any("repos/create" in request for request in hub.requests)


CODE = """
from pathlib import Path
from transformers import GPT2Config
Path({marker!r}).write_text("ran")
class Config(GPT2Config):
    pass
"""
ONLY_ON_COMMAND_LINE = [f.name for f in parse([], REGISTRY.options()).fields() if not f.metadata.get("in_files", True)]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Path of a file that exists once foreign code has run."""
    return tmp_path / "ran"


@pytest.fixture
def foreign(tmp_path: Path, gpt_folder: Path, marker: Path) -> Path:
    """Create an exported model with code, in a run folder whose plan trusts it."""
    run = tmp_path / "run"
    folder = run / "export"
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(CODE.format(marker=str(marker)))
    values = {"trust_remote_code": True, "task": "causal_lm", "user_script": str(folder / "mine.py")}
    plan = {"values": {spelling(name): {"value": value, "origin": "command line"} for name, value in values.items()}}
    (run / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.mark.parametrize("beside", ["run", "export"], ids=["of a run folder", "of a model in one"])
def test_a_plan_grants_nothing(beside: str, foreign: Path, marker: Path, tmp_path: Path, says: Says) -> None:
    given = str(foreign if beside == "export" else foreign.parent)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one"}) + "\n")
    for words in (
        f"predict {given} --input {rows} --output {tmp_path}/out.jsonl",
        f"evaluate {given} --device cpu --data-dir {tmp_path} --data-name rows",
        f"chat {given}",
    ):
        with mock.patch("sys.stdin", io.StringIO("hello\n")):
            says.command(words)
        assert "--trust-remote-code" in says.said[-1]
        assert not marker.exists(), words
    with pytest.raises(RapidformerError, match="trust"):
        open_saved(given)
    assert not marker.exists()
    assert not find_saved(given).values.keys() & set(ONLY_ON_COMMAND_LINE)


def test_the_command_line_grants_it(foreign: Path, marker: Path) -> None:
    """Otherwise the test above would not prove anything."""
    assert find_saved(foreign).config(trust_remote_code=True).model.trust_remote_code
    assert type(read_config_of(foreign, trust_remote_code=True)).__name__ == "Config"
    assert marker.exists()


def test_a_yaml_file_cannot_set_it(tmp_path: Path, says: Says) -> None:
    assert ONLY_ON_COMMAND_LINE == ["user_script", "trust_remote_code"]
    file = tmp_path / "flags.yaml"
    for name in ONLY_ON_COMMAND_LINE:
        file.write_text(f"lr: 1.0e-3\n{name}: true\n")
        with says(ConfigError):
            parse(["--config", str(file)], REGISTRY.options())
