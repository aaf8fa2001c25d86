"""Shell scripts that start a training: the words of its command."""

from __future__ import annotations

import pytest

from rapidformer_templates.commands.convert.shell import commands

SHELLS = {
    "A=1\npython x.py --a $A": ["--a", "1"],
    "A=(--a 1)\nA+=(--b 2)\npython x.py ${A[@]}": ["--a", "1", "--b", "2"],
    'A=("--a 1" "--b")\npython x.py ${A[@]}': ["--a", "1", "--b"],
    "A='--a 1'\npython x.py $A --b": ["--a", "1", "--b"],
    "python x.py --a ${A:-3} --b ${B:-$C}": ["--a", "3", "--b", "$C"],
    "N=4\nM=$((N*2))\npython x.py --a $M --b $(($M+1))": ["--a", "8", "--b", "9"],
    "python x.py \\\n  --a 1 \\\n  --b 2 # not --c 3": ["--a", "1", "--b", "2"],
    'A="x # y"\npython x.py --a "$A"': ["--a", "x # y"],
    'S=b\nif [ $S == "a" ]; then\nA=1\nelif [[ "$S" == "b" ]]; then\nA=2\nelse\nA=3\nfi\npython x.py --a $A': [
        "--a",
        "2",
    ],
    'A=1\nif [ -n "${KEY}" ]; then A=2; fi\npython x.py --a $A': ["--a", "1"],
    "if [ -z ${KEY} ]; then\n  A=2\nfi\npython x.py --a $A": ["--a", "2"],
    'S=b\ncase "${S}" in\n  "a")\n  A=1\n  ;;\n  b|c)\n  A=2\n  ;;\n  *)\n  A=3\n  ;;\nesac\npython x.py --a $A': [
        "--a",
        "2",
    ],
    "cat <<EOF\nit's a text\nEOF\npython x.py --a 1": ["--a", "1"],
}
"""Scripts, each with the arguments of its training script."""


@pytest.mark.parametrize("script", SHELLS)
def test_shell_script_is_read(script: str) -> None:
    assert [words[2:] for words in commands(script)] == [SHELLS[script]]
