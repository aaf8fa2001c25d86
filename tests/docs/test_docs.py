"""The documentation is correct: links, flags, commands, tabs, tables and their output."""

import argparse
import ast
import dataclasses
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import QUESTIONS
from benchmarks.__main__ import build_parser as evidence_parser
from rapidformer_templates.commands.bench.cli import build_parser as bench_parser
from rapidformer_templates.commands.completion import whole_parser
from rapidformer_templates.commands.convert.cli import build_parser as convert_parser
from rapidformer_templates.commands.data import build_parser as data_parser
from rapidformer_templates.commands.demo import build_parser as demo_parser
from rapidformer_templates.commands.demo import new_parser
from rapidformer_templates.commands.export import build_parser as export_parser
from rapidformer_templates.commands.main import main
from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY, switch_options
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.trainer import Trainer
from scripts.manual import tabs
from tests.support.manual import PAGES, RECIPES, ROOT, blocks, commands, name

START = ROOT / "docs/index.md"
MADE = ("reference/", "switches/")  # generated with the site. tests/docs/test_site.py follows every link there
OTHERS = {  # flags of other programs, and flags that examples declare
    "hf": ["--private"],
    "mlflow": ["--backend-store-uri"],
    "pip": ["--constraint", "--editable", "--index-url", "--no-deps"],
    "pytest": ["--write-messages"],
    "rapidformer": ["--help", "--help-all", "--version"],
    "ruff": ["--check"],
    "tensorboard": ["--logdir"],
    "torchrun": [
        "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts", "--master-addr", "--master-port",
        "--nnodes", "--node-rank", "--nproc-per-node", "--standalone",
    ],
    "vllm": ["--enable-lora", "--lora-modules", "--max-lora-rank"],
    "docs/bench.md": ["--tiny"],
    "docs/white-box.md": ["--temperature"],
}  # fmt: skip


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)


def test_relative_links_lead_somewhere() -> None:
    links = [(page, target) for page in PAGES for target in _links(page)]
    assert len(links) > 200
    assert [f"{name(page)}: {target}" for page, target in links if not _leads_somewhere(page, target)] == []


def _links(page: Path) -> Iterator[str]:
    """Yield the link targets that are files of the repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not (page == START and target.startswith(MADE)):
            yield target


def _leads_somewhere(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    goal = page.parent / file if file else page
    return goal.exists() and (not anchor or anchor in _anchors(goal))


@cache
def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


FLAG = r"(?<![\w-])--[a-z][a-z0-9_-]*"
IN_CODE = {  # flags of other programs that only code and examples name, and beginnings of flags
    "deepspeed": ["--master", "--port", "--worker"],
    "git": ["--abbrev", "--always", "--dirty", "--exclude", "--name-only"],
    "lm_eval": ["--batch_size", "--limit", "--model", "--model_args", "--output_path", "--tasks"],
    "accelerate": ["--num_processes"],
    "llama.cpp": ["--outfile", "--outtype"],
    "nvidia-smi": ["--format", "--query-gpu"],
    "pip": ["--no-build-isolation"],
    "slurm": [
        "--cpus-per-task", "--gpus-per-node", "--job-name", "--kill-on-bad-exit", "--nodes", "--ntasks-per-node",
        "--open-mode", "--requeue", "--signal", "--time",
    ],
    "trackers": ["--project", "--name"],
    "examples": ["--words"],
    "beginnings": ["--adam-", "--no-", "--oss", "--zero", "--zero-", "--zero-1-", "--zero-3-"],
    "other spellings": ["--micro_batch_size", "--trust_remote_code"],
}  # fmt: skip


def test_flags_exist() -> None:
    """Pages name flags of :data:`OTHERS`, and code and examples those of :data:`IN_CODE`, too."""
    known = {flag for parser in (whole_parser(), evidence_parser()) for flag in _flags(parser)}
    known |= {flag for flags in OTHERS.values() for flag in flags}
    for recipe in (ROOT / "examples/recipes").glob("*.py"):
        declared = re.findall(r"^    (\w+): .*= flag\(", recipe.read_text(encoding="utf-8"), flags=re.M)
        known |= {f"--{no}{name.replace('_', '-')}" for name in declared for no in ("", "no-")}
    in_code = known | {flag for flags in IN_CODE.values() for flag in flags}
    folders = [ROOT / "src", ROOT / "examples", ROOT / "docs", ROOT / "benchmarks"]
    kinds = (".py", ".toml", ".sh", ".yaml", ".sbatch", ".ipynb", ".md")
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in kinds and file.is_file()]
    named = {file: set(re.findall(FLAG, file.read_text(encoding="utf-8"))) for file in {*files, *PAGES}}
    assert len(set().union(*named.values())) > 140
    unknown = {name(file): flags - (known if file in PAGES else in_code) for file, flags in named.items()}
    assert {file: flags for file, flags in unknown.items() if flags} == {}


SEARCHES = ("--auto-strategy", "--engine-memory")
"""Flags of plans that take half a minute. Their rules are tried below, and two of the searches."""
PLANS = [
    (page, command)
    for page in PAGES
    for command in commands(page)
    if command.startswith("rapidformer plan") and not any(part in command for part in ("…", *SEARCHES))
]


@pytest.mark.parametrize(("page", "command"), PLANS, ids=lambda value: name(value) if isinstance(value, Path) else None)
def test_plans_succeed(
    page: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands read examples of this checkout, but write elsewhere."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


ANSWERS = [(page, block) for page in PAGES for block in blocks(page, "text") if block.startswith("$ rapidformer ")]


@pytest.mark.parametrize(("page", "block"), ANSWERS, ids=lambda value: name(value) if isinstance(value, Path) else None)
def test_answers_are_those_that_are_shown(page: Path, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, shown = block.partition("\n")
    main(shlex.split(command.removeprefix("$ "))[1:])
    answer = capsys.readouterr()
    assert answer.out + answer.err == shown


def test_python_blocks_are_python() -> None:
    all_blocks = [(page, block) for page in PAGES for block in blocks(page, "python")]
    assert len(all_blocks) > 20
    for page, block in all_blocks:
        ast.parse(block, filename=name(page))


def test_every_hook_is_described() -> None:
    text = (ROOT / "docs/white-box.md").read_text(encoding="utf-8")
    hooks = [name for name in vars(Trainer) if name.startswith(("build_", "compute_", "count_", "on_", "read_"))]
    assert len(hooks) >= 14
    assert [name for name in hooks if f"{name}(self" not in text] == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in PAGES:
        named = {command.split()[1] for command in commands(page) if command.startswith("make ")}
        assert named <= targets


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["dev"], *extras["deepspeed"], *extras["fairscale"]]
    names = {re.split(r"[<>=!\[ ]", requirement)[0].lower().replace("_", "-") for requirement in needed}
    assert names - pinned == set()


SOURCE = ROOT / "src/rapidformer_templates"
CUDA_LINES = tomllib.loads((ROOT / "tests/support/cuda_lines.toml").read_text(encoding="utf-8"))


def test_lines_that_name_cuda_are_listed_with_a_reason() -> None:
    named = {
        path.relative_to(SOURCE).as_posix(): sum("cuda" in line for line in path.read_text("utf-8").splitlines())
        for path in SOURCE.rglob("*.py")
        if "commands/examples" not in path.as_posix()
    }
    named.pop("system/accelerator.py")
    assert {name: entry["lines"] for name, entry in CUDA_LINES.items()} == {name: n for name, n in named.items() if n}
    assert all(entry["why"] for entry in CUDA_LINES.values())


def test_each_engine_is_in_the_row_of_what_it_keeps() -> None:
    page = (ROOT / "docs/mixed-precision.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for line in page.splitlines():
        names, _, kept = line.removeprefix("| ").partition(" | ")
        if line.startswith("| `") and re.match(r"16 bits|fp32", kept):
            found |= dict.fromkeys(re.findall(r"`([a-z0-9-]+)`", names), kept)
    for switch in REGISTRY.switches:
        if switch.master_weights:
            assert found.pop(switch.name).startswith("16 bits;"), switch.name
        elif switch.master_weights is False:
            assert found.pop(switch.name).startswith("fp32, under every engine"), switch.name
        elif switch.name.startswith("zero-"):
            assert "by DeepSpeed" in found.pop(switch.name), switch.name
        elif switch.engine:
            assert found.pop(switch.name).startswith("fp32; cast"), switch.name
    assert not found


TABBED = [
    pytest.param(words, id=f"{name(page)}-{i}")
    for page in PAGES
    for i, block in enumerate(blocks(page, "bash"))
    if (words := tabs.training_words(block))
]


def _given(config: RunConfig) -> Mapping[str, Any]:
    """Return the given values. Only one side has the name of the file and that of the template."""
    left_out = ("config", "template")
    return {name: value for name, value in config.items() if config.origin(name) != "default" and name not in left_out}


@pytest.mark.parametrize("words", TABBED)
def test_the_file_is_the_command(words: Sequence[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(tabs.as_yaml(words), encoding="utf-8")
    assert _given(parse(["--config", str(file)], switch_options())) == _given(parse(words, switch_options()))


@pytest.mark.parametrize("words", TABBED)
def test_the_call_is_the_command(words: Sequence[str]) -> None:
    _, statement = ast.parse(tabs.as_python(words)).body
    assert isinstance(statement, ast.Expr)
    fit = statement.value
    assert isinstance(fit, ast.Call)
    assert isinstance(fit.func, ast.Attribute)
    assert isinstance(fit.func.value, ast.Call)
    values = {str(word.arg): ast.literal_eval(word.value) for word in fit.func.value.keywords}
    for word in fit.keywords:
        assert word.arg == "workers"
        values["nproc_per_node"] = ast.literal_eval(word.value)
    called = parse([], switch_options(), in_code={name: (value, "a cell") for name, value in values.items()})
    assert _given(called) == _given(parse(words, switch_options()))


def test_figures_of_benchmarks_are_in_their_results() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    figure = r"\d[\d,]*(?:\.\d+)?"
    known = set(re.findall(figure, "".join(file.read_text(encoding="utf-8") for file in files)))
    rows = re.sub(r"`[^`]*`|\]\([^)]*\)", "", "".join(line for line in page.splitlines(True) if line.startswith("|")))
    shown = re.findall(figure, rows)
    assert len(shown) > 250
    assert [number for number in shown if number.rstrip(",") not in known] == []
    again = "".join(re.findall(r"Measure again: [^.]*", " ".join(page.split())))
    named = re.findall(r"`(?:python -m benchmarks )?([a-z-]+8?)", again)
    assert len(named) > 20
    assert {*named, *(file.stem for file in files)} <= set(QUESTIONS)


LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip
EXAMPLES = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
LAYOUT = re.compile(r"(\d+) · (\d+) · (\d+), (\d+)(, full recomputation)?(, two stages per worker)?")


def _example(words: str) -> list[str]:
    """Return the words of the example's command that has these words."""
    for block in re.findall(r"```\w+\nrapidformer (.*?)```", EXAMPLES, re.DOTALL):
        if words in block:
            return shlex.split(block.replace("\\\n", " "))
    raise AssertionError(f"no example has {words}")


def _memory_of(layout: re.Match[str], partitioning: str, found: list[dict[str, object]]) -> dict[str, float]:
    """Return the predicted memory of a layout of the table."""
    tensor, pipeline, data, micro = map(int, layout.groups()[:4])
    fields: dict[str, object] = {"tensor": tensor, "pipeline": pipeline, "data": data, "micro_batch_size": micro}
    fields |= {"recompute": "full" if layout[5] else "none", "virtual": 2 if layout[6] else 1}
    fields |= {"partitioning": partitioning.replace(" ", "-"), "shard_size": None, "offload_activations": False}
    (one,) = [entry for entry in found if all(entry[key] == value for key, value in fields.items())]
    memory = one["memory_gb"]
    assert isinstance(memory, dict)
    return memory


@pytest.mark.longer
@pytest.mark.parametrize(("model", "words"), [("70 B", "FOLDER"), ("22 B", "a100-80gb")])
def test_the_table_has_the_memory_that_the_command_predicts(
    model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER/config.json").write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    main([*_example(words), "--json"])
    found = json.loads(capsys.readouterr().out)["layouts"]
    rows = [
        [cell.strip() for cell in line.split("|")[2:-1]] for line in EXAMPLES.splitlines() if f"| {model} |" in line
    ]
    assert rows
    for text, partitioning, *numbers in rows:
        layout = LAYOUT.fullmatch(text)
        assert layout, text
        memory = _memory_of(layout, partitioning, found)
        state = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        activations = memory["activations"] + memory["buffers"]
        predicted = [state, activations, memory["setup"], memory["needed"], memory["node_host"]]
        assert [float(number) for number in numbers] == pytest.approx(predicted, abs=0.0501), text


ELSEWHERE = {
    r"pip install": "needs the network; tests/docs/test_docs.py holds the extras",
    r"hf (download|upload)|python -c 'import datasets": "needs the network; tests/run/test_hub.py",
    r"(\.venv/bin/)?python -m pytest": "the tests themselves",
    r"cat |head |rm -r |python3 -m venv|\. \.venv/bin/activate|case \$\?|eval ": "the shell's",
    r"make |\.ci/run": "what runs the tests; tests/docs/test_docs.py holds the targets",
    r"python -m benchmarks": "tests/benchmarks",
    r"(\.venv/bin/)?python -m tests\.support\.covering": "tests/switches/test_pairs.py reads what it writes",
    r"python scripts/gpu_check": "needs a GPU; tests/scripts/test_gpu_check.py",
    r"python scripts/(compare|resume)_older": "needs an older checkout",
    r"(torchrun --nproc-per-node 2 |python )examples/": "tests/docs/test_examples.py",
    r"python smoothed.py": "the flags of the black box, tests/docs/test_examples.py",
    r"python (balanced|focal|slow_embeddings|odd_ones).py": "tests/docs/test_examples.py",
    r"python (before|after).py": "tests/docs/test_pages_in_order.py",
    r"python my_(task|grpo).py": "tests/commands/test_demo.py",
    rf"python ({'|'.join(RECIPES)}).py": "tests/recipes",
    r"rapidformer evaluate ": "tests/commands/test_evaluate.py",
    r"PATH=\$PATH:llama.cpp": "needs llama.cpp; tests/commands/test_gguf.py",
    r"vllm serve ": "needs vLLM; tests/commands/test_export.py compares the command",
    r"rapidformer predict ": "tests/commands/test_predict.py",
    r"rapidformer chat ": "tests/commands/test_chat.py",
    r"rapidformer data inspect --task": "tests/commands/test_inspect_samples.py",
    r"rapidformer .*--fp8-recipe": "needs torchao; tests/switches/fp8/test_products.py",
    r"rapidformer plan --auto-strategy --device-file": "tests/switches/auto_strategy/test_device_file.py",
    r"rapidformer doctor": "tests/commands/test_doctor.py",
    r"rapidformer --task TASK": "a form, not a command",
}
"""Commands that are not tested here, by their beginning, with the test that runs them or what they need."""

PARSERS = {
    "bench": bench_parser, "convert": convert_parser, "data": data_parser, "demo": demo_parser, "export": export_parser,
    "new": new_parser,
}  # fmt: skip
TRAINING = r"(?:\w+=\S+ )*(?:rapidformer (?:plan )?(?=-|…)|torchrun .*? -m rapidformer_templates )"
COMMANDS = sorted({(command.strip(), name(page)) for page in PAGES for command in commands(page)})
WORKERS = re.compile(r"--nnodes (\d+).*--nproc-per-node (\d+)")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with the files that the commands name."""
    for folder in ("FOLDER", "gpt2", "bert-base-uncased"):
        (tmp_path / folder).mkdir(parents=True)
        sizes = {"model_type": "gpt2", "n_layer": 8, "n_head": 8, "n_embd": 64, "architectures": ["GPT2LMHeadModel"]}
        (tmp_path / folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    for file in ("my.yaml", "pretrain.yaml"):
        (tmp_path / file).write_text("task: pretraining\nmodel_type: gpt2\nsave: runs/mine\n", encoding="utf-8")
    for file in ("ours", "from-axolotl", "from-llama-factory", "from-megatron"):
        text = "task: causal_lm\nmixed-precision: bf16\nsave: runs/ours\n"
        (tmp_path / f"{file}.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _handler(command: str) -> Callable[[str], None] | None:
    if any(re.match(start, command) for start in ELSEWHERE):
        return _elsewhere
    if re.match(TRAINING, command):
        return _planned
    if re.match(rf"(\w+=\$\()?rapidformer ({'|'.join(PARSERS)})\b", command):
        return _parsed
    return None


@pytest.mark.parametrize(("command", "page"), COMMANDS)
def test_each_command_is_tried_or_says_who_does(command: str, page: str, desk: Path) -> None:
    handler = _handler(command)
    assert handler, f"{page}: say in ELSEWHERE of this test who runs '{command}', or what it needs"
    handler(command)


def _elsewhere(command: str) -> None:
    """Do nothing: the table shows what tests this command."""


def _planned(command: str) -> None:
    """Assert that all rules accept its flags if all packages are installed.

    The tests of auto-strategy (tests/switches/auto_strategy) search for layouts.
    """
    words = shlex.split(re.sub(TRAINING, "", command).replace("$MODEL", "FOLDER").replace("…", ""), comments=True)
    workers = WORKERS.search(command)
    if workers and command.startswith("torchrun"):
        words += ["--world-size", str(int(workers[1]) * int(workers[2])), "--local-world-size", workers[2]]
    config, machine, _ = plan_request(words)
    machine = dataclasses.replace(machine, packages=dict.fromkeys(OPTIONAL_PACKAGES, "999.0"))
    assert resolve(config, machine)


def _parsed(command: str) -> None:
    _, program, *words = shlex.split(re.sub(r"^\w+=\$\((.*)\)$", r"\1", command).replace("…", ""), comments=True)
    _, unknown = PARSERS[program]().parse_known_args(words)
    assert not unknown or words[0] in ("run", "mfu")  # flags of the measured training command
