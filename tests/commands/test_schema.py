"""Completions as bash requests them, the JSON schema of YAML files, and a command written as such a file."""

import dataclasses
import itertools
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rapidformer_templates.commands.completion import rendered, yaml_schema
from rapidformer_templates.commands.main import COMMANDS, main
from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.planning.config import RunConfig, settable_by_files, spelling, to_yaml
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from tests.support.messages import Says
from tests.support.selection import by_default

jsonschema: Any = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install jsonschema")
ROOT = Path(__file__).parents[2]
SCHEMA = yaml_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 5000, 2.5, 1e-5, -0.5, "1e-5", "-1e-5", "5", "-5", "1.5", "1_000", "abc", "bf16",
    "auto", "20000samples", "5e7tokens", "0.5steps", "30 minutes", "5E7Tokens", "1E-5", "+5", " 5 ", "BF16", "True",
    "3epochs", "1 Epoch", "yes", "WandB", "NONE", [], ["a", "b"], {"a": 1},
)  # fmt: skip
"""Correct and wrong values in files."""


def test_it_is_a_schema_and_the_one_in_the_repository_is_up_to_date() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    written = (ROOT / "examples/rapidformer.schema.json").read_text(encoding="utf-8")
    assert written == rendered() + "\n", "run make docs"


def test_it_accepts_what_the_parser_accepts() -> None:
    """Try each flag with each of the values. Only the parser checks the value of a string."""
    config = REGISTRY.complete(RunConfig())
    different = []
    settable = settable_by_files(config.kinds()) - {"config"}
    for field, value in itertools.product(config.fields(), VALUES):
        if field.name not in settable or isinstance(value, (list, dict)):
            continue
        valid = VALIDATOR.is_valid({field.name: value})
        if valid != _parses(config, field.name, value) and not (valid and isinstance(value, str)):
            different.append((field.name, value, valid))
    assert different == []
    assert VALIDATOR.is_valid({"data-path": ["a", "b"]})
    assert not VALIDATOR.is_valid({"lr": ["a", "b"]})
    assert not VALIDATOR.is_valid({"save": {"a": 1}})


def _parses(config: RunConfig, name: str, value: Any) -> bool:
    try:
        config.checked(name, value, "a test")
    except ConfigError:
        return False
    return True


def test_what_an_editor_finds(says: Says) -> None:
    for text in ("micro-batch-sise: 8", "task: casual_lm", "lr: fast", "epochs: 0", "tf32: 1", "config: other.yaml"):
        (error,) = VALIDATOR.iter_errors(yaml.safe_load(text))
        says.text(f"{text}: {error.message[:60]}")
    for text in ("micro-batch-size: 8", "micro_batch_size: 8", "micro_batch-size: 8", "fp16: true", "lr: 2e-4", ""):
        assert VALIDATOR.is_valid(yaml.safe_load(text)), text
    assert not VALIDATOR.is_valid(["lr"])


FILES = [ROOT / "examples/sentiment.yaml"]
BLOCKS = [
    block
    for page in (ROOT / "docs").glob("*.md")
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    if "apiVersion" not in block
]


@pytest.mark.parametrize("text", [*(file.read_text(encoding="utf-8") for file in FILES), *BLOCKS])
def test_files_of_the_repository(text: str) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))] == []


def _commands() -> list[str]:
    """Return the examples of all rules, each switch, and pairs of switches."""
    draw = random.Random(3)
    pairs = draw.sample(list(itertools.combinations(REGISTRY.switches, 2)), 60)
    commands = [rule.example for rule in REGISTRY.all_rules]
    for switches in [*((switch,) for switch in REGISTRY.switches), *pairs]:
        values = {name: value for switch in switches for name, value in switch.on.items()}
        words = [_word(name, value) for name, value in values.items()]
        commands.append(f"--device cpu --lr 3e-4 --eval-interval 2e3samples {' '.join(words)}")
    return commands


def _word(name: str, value: Any) -> str:
    flag = spelling(name)
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {shlex.quote(str(value))}"


def _answer(words: list[str]) -> tuple[Any, ...]:
    """Return what ``rapidformer plan`` resolves from the words, without the origins of the values."""
    config, detected, _ = plan_request(words)
    values = {name: config.get(name) for name in (field.name for field in config.fields()) if name != "config"}
    try:
        plan = resolve(config, detected)
        given = {name: given["value"] for name, given in plan.values.items() if name != "--config"}
        return values, dataclasses.replace(plan, values=given)
    except Refused as refused:
        return values, [found.rule for found in refused.diagnostics]


@pytest.mark.slow
@pytest.mark.parametrize("part", by_default([0], range(5)))
def test_a_command_written_as_a_file_is_the_same_command(part: int, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    commands = _commands()
    assert len(commands) > 150
    for command in commands[part::5]:
        words = shlex.split(command)
        try:
            config = plan_request(words)[0]
        except ConfigError:
            continue  # a file that the example names does not exist
        text = to_yaml(config)
        assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))] == [], command
        file.write_text(text, encoding="utf-8")
        of_the_plan = " ".join(re.findall(r"--(?:local-)?world-size \d+", command))
        assert _answer(["--config", str(file), *of_the_plan.split()]) == _answer(words), command


def test_the_file_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "first.yaml"
    first.write_text("lr: 2e-4\nepochs: 3\ntf32: false\nsave-interval: 50\n", encoding="utf-8")
    words = ["plan", "--device", "cpu", "--config", str(first), "--train-iters", "9", "--mixed_precision", "--yaml"]
    assert main(words) == 0
    assert capsys.readouterr().out == (
        "# rapidformer --config FILE\n"
        "device: cpu\nlr: 0.0002\ntrain-iters: 9\nsave-interval: 50\ntf32: false\nmixed-precision: auto\n"
    )


def test_no_file_of_a_command_that_is_refused(capsys: pytest.CaptureFixture[str], says: Says) -> None:
    says.command("plan --device cpu --tf32 --yaml")
    assert capsys.readouterr().out == ""
    says.command("plan --device cpu --yaml --json")


def test_the_file_of_a_script_leaves_out_what_stands_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "examples/new/trainer.py")
    assert main(["plan", "--user-script", script, "--width", "8", "--device", "cpu", "--yaml"]) == 0
    assert capsys.readouterr().out == f"# python {script} --config FILE\ndevice: cpu\nwidth: 8\n"


ASK = """
source "$1"; shift
function=$(complete -p rapidformer | sed -E 's/.*-F ([^ ]+) .*/\\1/')
for line in "$@"; do
  COMP_WORDS=($line); [[ $line == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$line; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
  $function "${COMP_WORDS[0]}" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  echo "${COMPREPLY[@]}"
done
"""
OFFERED = {
    "rapidformer comp": {"completion"},
    "rapidformer --task c": {"causal_lm"},
    "rapidformer --mixed-precision ": {"fp16", "bf16"},
    "rapidformer plan --local-world": {"--local-world-size"},
    "rapidformer data preprocess --tokenizer-backend g": {"gigatoken"},
    "rapidformer new trainer job": {"job.yaml"},
    "rapidformer --config j": {"job.yaml"},
    "rapidformer --data-dir ": {"tweets"},
}
OF_MANY = ("rapidformer ", "rapidformer --", "rapidformer plan --")
"""Lines with many completions."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Bash's completions for the last word of each line. One bash in one folder answers for all lines."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    folder = tmp_path_factory.mktemp("completion")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", printed.append)
        assert main(["completion", "bash"]) == 0
    (folder / "bash").write_text(printed[0], encoding="utf-8")
    (folder / "tweets").mkdir()
    (folder / "job.yaml").touch()
    lines = [*OFFERED, *OF_MANY]
    words = ["bash", "-c", ASK, "bash", str(folder / "bash"), *lines]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {line: set(offered.split()) for line, offered in zip(lines, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("line", OFFERED)
def test_what_is_offered(line: str, answers: dict[str, set[str]]) -> None:
    assert answers[line] == OFFERED[line]


def test_every_command_and_every_flag_are_offered(answers: dict[str, set[str]]) -> None:
    assert set(COMMANDS) <= answers["rapidformer "]
    flags = {spelling(field.name) for field in REGISTRY.complete(RunConfig()).fields()}
    assert len(flags) > 140
    assert flags <= answers["rapidformer --"]
    assert flags | {"--world-size", "--yaml"} <= answers["rapidformer plan --"]
