"""An equal search is read from the user's cache, without torch. Every other search is new."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from rapidformer_templates.commands.main import main
from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.switches.auto_strategy import results
from rapidformer_templates.switches.auto_strategy.command import search
from rapidformer_templates.switches.auto_strategy.results import cache_file, cache_folder
from rapidformer_templates.switches.auto_strategy.search import Search
from rapidformer_templates.switches.auto_strategy.timing import find_hardware

SMALL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --model-type gpt2 --device cpu"
FLAGS = f"{SMALL} --auto-strategy --world-size 2 --micro-batch-size 1 --tensor-model-parallel-size 1"
FLAGS += " --no-checkpoint-activations --context-parallel-size 1"
FLAGS += " --use-distributed-optimizer"


@pytest.fixture(autouse=True)
def user_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder, as a process that the test starts sees it."""
    monkeypatch.setattr(results, "cache_folder", cache_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    return tmp_path / "rapidformer_templates" / "searches"


def file_of(flags: str) -> Path:
    config, environment, _ = plan_request(flags.split())
    file = cache_file(config, environment, find_hardware(environment, "fp32"), by_memory=False)
    assert file is not None
    return file


@pytest.mark.longer
def test_an_equal_search_is_read(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, environment, _ = plan_request(FLAGS.split())
    searched, _ = search(config, environment)
    assert searched.layouts
    assert searched.rejected
    (file,) = user_cache.iterdir()
    assert file == file_of(FLAGS)

    def unwanted(self: Search) -> None:
        raise AssertionError("a new search")

    with monkeypatch.context() as patched:
        patched.setattr(Search, "run", unwanted)
        stored, _ = search(config, environment)
        assert stored == searched
        assert stored.file == file
        with pytest.raises(AssertionError, match="a new search"):
            search(config, environment, cached=False)
        assert main(["plan", *FLAGS.split()]) == 0
        assert f"note: read from {file}; --no-search-cache searches again" in capsys.readouterr().out
    code = "import sys; from rapidformer_templates.commands.main import main; status = main(sys.argv[1:])\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(status)"
    command = [sys.executable, "-c", code, "plan", *FLAGS.split(), "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
    assert len(json.loads(printed)["layouts"]) == len(searched.layouts)

    file.write_text(file.read_text(encoding="utf-8")[:-20], encoding="utf-8")  # a crash of the machine
    again, _ = search(config, environment)
    assert again == searched
    assert again.file is None
    assert f"note: {file} is damaged and is ignored" in capsys.readouterr().err
    assert search(config, environment)[0].file == file  # it has been written again
    assert [path.name for path in user_cache.iterdir()] == [file.name]  # and no temporary file is left


def test_another_search_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {file_of(FLAGS), file_of(FLAGS)}
    assert len(files) == 1
    for more in ("--seq-length 8", "--world-size 4", "--global-batch-size 4", "--optimizer lion"):
        files.add(file_of(f"{FLAGS} {more}"))
    monkeypatch.setenv("DEVICE_TFLOPS", "7")
    files.add(file_of(FLAGS))
    monkeypatch.setattr(results, "_source_hash", lambda: "of another version")
    files.add(file_of(FLAGS))
    assert len(files) == 7


def test_a_changed_model_has_another_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    flags = f"--pretrained-model-name-or-path {folder} --auto-strategy --device cpu"
    files = set()
    for layers in (10, 11):
        AutoConfig.for_model("gpt2", n_layer=layers).save_pretrained(folder)
        files.add(file_of(flags))
    assert len(files) == 2


def test_the_oldest_results_are_deleted(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "KEPT", 2)
    result = results.SearchResult((), (), results.ModelTotals(1, 1, True, True))
    for number in range(4):
        results.write_result(user_cache / f"{number}.json", result)
        os.utime(user_cache / f"{number}.json", (number, number))
    assert sorted(path.name for path in user_cache.iterdir()) == ["2.json", "3.json"]
    assert results.read_result(user_cache / "3.json") == result
    blocked = user_cache / "2.json" / "folder"
    results.write_result(blocked / "4.json", result)
    assert f"note: the result of the search is not stored in {blocked}" in capsys.readouterr().err
