"""The ``rapidformer`` command: its output, and how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from rapidformer_templates.commands.doctor import build_parser as doctor_parser
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.registry import REGISTRY


@dataclass(frozen=True)
class MyFlags:
    """Mine"""

    margin: float = flag(0.5, "distance between classes")


TITLES = ["\ncommands:", "\nLaunch:", "\nModel:", "\nData:", "\nTraining:", "\nAcceleration:"]


def test_help_is_grouped_with_the_commands_first(capsys: pytest.CaptureFixture[str]) -> None:
    for words, titles in (([], TITLES), (["--help"], TITLES), (["--help-all"], [*TITLES, "\nPlan:"])):
        assert main(words) == 0
        text = capsys.readouterr().out
        places = [text.index(title) for title in titles]
        assert places == sorted(places)
        assert text.count("\nAcceleration:") == 1


def flags_in(text: str) -> set[str]:
    """Return the flags that a help text explains, one per entry."""
    return set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", text, re.MULTILINE))


def test_the_short_help_has_the_usual_flags_and_the_long_one_all(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--task", "causal_lm", "--help"])
    usual = flags_in(capsys.readouterr().out)
    main(["--help-all"])
    every = flags_in(capsys.readouterr().out)
    assert 25 <= len(usual) <= 32
    assert {"--task", "--lr", "--save", "--data-dir", "--lora-rank", "--mixed-precision"} < usual < every
    fields = {spelling(f.name) for f in parse([], REGISTRY.options()).fields()}
    assert fields <= every


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "plan",
            {"--help", "--json", "--yaml", "--world-size", "--local-world-size", "--device-kind", "--device-file"}
            | {"--tokens", "--price-per-hour", "--disk-gb-per-second", "--compare", "--plot", "--search-cache"}
            | {"--engine-memory"},
        ),
        ("doctor", {"--help", "--json", "--build"}),
        ("switches", {"--help"}),
        ("explain", {"--help"}),
    ],
)
def test_commands_have_their_own_help(command: str, flags: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: rapidformer {command} ")
    assert flags_in(text) == flags


@pytest.mark.parametrize("command", ["plan", "explain", "doctor"])
def test_the_example_of_a_command_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    example = re.findall(r"^example: rapidformer (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(example) == 1
    words = example[0].split()
    if command == "doctor":
        assert not doctor_parser().parse_known_args(words[1:])[1]  # the example compiles for minutes
    else:
        assert main(words) == 0


def test_a_script_has_both_helps(capsys: pytest.CaptureFixture[str]) -> None:
    for word, has_all in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit, match="0"):
            parse([word], REGISTRY.options(), prog="mine.py", user=MyFlags)
        text = capsys.readouterr().out
        assert text.startswith("usage: mine.py [flags]")
        assert {"--margin", "--lr"} <= flags_in(text)
        assert ("--lr-power" in flags_in(text)) == has_all


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rapidformer_templates ")


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "plan --json --world-size 4 --device cpu --task pretraining --fsdp_memory_optimization --global-batch-size 8"
    )
    assert main(words.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    plan = answer["plan"]
    assert plan["template"] == "Pretrainer"
    assert plan["sizes"]["data"] == 4
    assert plan["sizes"]["accumulation"] == 2
    assert plan["values"]["--fsdp-memory-optimization"] == {"value": True, "origin": "command line"}
    assert plan["values"]["template"] == {"value": "Pretrainer", "origin": "chosen for task pretraining"}
    assert "--json" not in plan["values"]


def test_refused_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--tf32", "--device", "cpu", "--epochs", "1", "--train-iters", "2"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert [error["rule"] for error in answer["errors"]] == ["RF015", "RF018"]
    for error in answer["errors"]:
        assert set(error) == {"rule", "message", "why", "source", "asked", "works"}
        assert error["works"]


def test_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "cpu", "--nproc-per-node", "2", "--task", "causal_lm", "--mixed-precision"]) == 0
    text = capsys.readouterr().out
    for words in (
        "Finetuner",
        "chosen for task causal_lm",
        "mixed-precision → optimizer",
        "ParallelEngine",
        "bf16",
        "note:",
    ):
        assert words in text


def test_refusal_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "cpu", "--tf32"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error[RF018]")
    assert "Traceback" not in captured.err


def test_auto_strategy_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--auto-strategy", "--world-size", "8"]) == 2
    assert capsys.readouterr().err.startswith("error: no model is named")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("pln --tf32", "error: unknown command 'pln'", "did you mean plan?"),
        (
            "train",
            "error: unknown command 'train'",
            "to train: rapidformer --task TASK …; commands: plan, switches, explain, doctor, data, export, evaluate, "
            "predict, chat, bench, demo, new, convert, schema, completion",
        ),
        (
            "fit --task causal_lm --lr 1e-4",
            "error: unknown command 'fit'",
            "to train: rapidformer --task causal_lm --lr",
        ),
        ("plan --tf31", "error: unknown flag --tf31", "did you mean --tf32?"),
        ("plan --lr -1e-4 --task causal_lm", "error: --lr must be at least 0, not -0.0001", "command line"),
        ("plan --lr -.5 --task causal_lm", "error: --lr must be at least 0, not -0.5", "command line"),
        ("plan --task classification", "error: --task cannot be 'classification'", "or sequence_classification?"),
        ("plan --optimizer sgd", "error: --optimizer cannot be 'sgd'", "from build_optimizer()"),
        ("plan --lr-decay-style step", "error: --lr-decay-style cannot be 'step'", "from build_scheduler()"),
        ("explain RF999", "error: there is no rule RF999", "rapidformer explain lists all rules"),
        ("switches --json", "error: unrecognized arguments: --json", "rapidformer switches --help"),
        ("docter", "error: unknown command 'docter'", "did you mean doctor?"),
        ("doctor --jsn", "error: unrecognized arguments: --jsn", "rapidformer doctor --help"),
        ("doctor --build cpu_adm", "error: DeepSpeed has no part 'cpu_adm'", "did you mean cpu_adam?"),
    ],
)
def test_wrong_use(capsys: pytest.CaptureFixture[str], words: str, message: str, hint: str) -> None:
    assert main(words.split()) == 2
    text = capsys.readouterr().err
    assert text.startswith(message)
    assert hint in text


@pytest.mark.parametrize("code", ["rf002", "RF2", "2", "rf02"])
def test_explain(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 0
    text = capsys.readouterr().out
    assert text.startswith("RF002: ZeRO needs the Trainer template.")
    assert "rapidformer plan --template Finetuner --zero-3-memory-optimization --world-size 2" in text


@pytest.mark.parametrize(
    ("words", "codes"),
    [("", {"RF002", "RF225"}), ("fsdp", {"RF035", "RF140"}), ("lora", {"RF120"}), ("Warmup", {"RF032"})],
)
def test_explain_lists_rules_by_title(words: str, codes: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = {rule.code: rule.title for rule in REGISTRY.all_rules}
    listed = [line.partition("  ")[0] for line in lines]
    assert lines == [f"{code}  {titles[code]}" for code in listed]
    assert codes <= set(listed)
    assert ("RF018" in listed) == (not words)


@pytest.mark.slow
def test_switches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["switches"]) == 0
    assert "--zero-3-memory-optimization" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["plan --json --fsdp-memory-optimization --world-size 2", "--help", "explain RF010"])
def test_no_torch_is_imported(words: str) -> None:
    program = (
        "import sys; from rapidformer_templates.commands.main import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_module_is_the_command() -> None:
    words = [sys.executable, "-m", "rapidformer_templates", "plan", "--device", "cpu", "--tf32"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error[RF018]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task causal_lm --mask-prob 0.2", "the task causal_lm does not use --mask-prob"),
        ("--task causal_lm --split 9,1", "the task causal_lm does not use --split"),
    ],
)
def test_a_plan_refuses_what_the_task_has_no_use_for(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_whoever_reads_no_further_gets_no_stack_trace() -> None:
    """This happens in ``rapidformer schema | head``."""
    command = f"{sys.executable} -m rapidformer_templates schema | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 141  # as for any program that SIGPIPE ends


@pytest.mark.parametrize("word", ["0", "-2", "many", "1.5"])
@pytest.mark.parametrize(
    "command",
    [
        "bench run --turns",
        "bench mfu --steps-a-turn",
        "convert none.yaml --world-size",
        "data tokenizer --input none.txt --output folder --vocab-size",
        "demo --held-out",
    ],
)
def test_count_of_a_command_is_a_whole_number(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{command}={word}".split()) == 2
    flag_name = command.split()[-1]
    message = f"error: argument {flag_name}: needs a whole number of at least 1, not '{word}'\n"
    assert capsys.readouterr().err.startswith(message)
