"""``rapidformer completion``: completions as bash requests them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rapidformer_templates.commands.main import COMMANDS, main
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.registry import REGISTRY

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
    "rapidformer plan --tf32 --device ": {"auto", "cpu", "cuda", "xpu", "mps", "npu"},
    "rapidformer plan --local-world": {"--local-world-size"},
    "rapidformer data preprocess --tokenizer-backend g": {"gigatoken"},
    "rapidformer new ": {"finetuner", "pretrainer", "trainer", "examples"},
    "rapidformer new trainer job": {"job.yaml"},
    "rapidformer --config j": {"job.yaml"},
    "rapidformer --data-dir ": {"tweets"},
    "rapidformer explain RF00": {f"RF00{n}" for n in range(1, 10)},
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


@pytest.mark.parametrize("shell", ["zsh", "tcsh", "fish", "powershell"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("fsdp-memory-optimization", "causal_lm", *COMMANDS))
