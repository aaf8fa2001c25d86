"""Messages of errors, in one file per folder of tests. ``--write-messages`` writes them, and a review reads the diff.

A test names the situation only::

    def test_a_word_instead_of_a_number(says: Says) -> None:
        says.command("rapidformer plan --task pretraining --lr fast")
        with says(DataError):
            read_dataset(config)
"""

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import RapidformerError

FILE = "messages.txt"
HEAD = "#### "
"""Begins the line with the name of a test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-messages", action="store_true", help="store what errors say now")


def read_messages(file: Path) -> dict[str, str]:
    """Return the messages of each test, as ``test_file.py::test_name[case]``."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    parts = f"\n{text}".split(f"\n{HEAD}")[1:]
    return {name: said.strip("\n") for name, _, said in (part.partition("\n") for part in parts)}


class Says:
    """The messages of one test. They are compared when the test ends.

    Call it with a kind of error: the code in the context must raise it. Its message then belongs to the test.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self.said: list[str] = []
        self._names = names

    def text(self, text: str, **names: object) -> None:
        """Add a message.

        Args:
            names: what to write in place of values that differ in each run, such as ``PID=os.getpid()``.
        """
        for value, name in [*((str(value), name) for name, value in names.items()), *self._names.items()]:
            text = text.replace(value, name)
        # The identity of a cached corpus depends on the times of its files. Python versions quote choices differently.
        text = re.sub(r"\b[0-9a-f]{24}\b", "IDENTITY", text)
        text = re.sub(r"\bjobs\.py:\d+", "jobs.py:LINE", text)
        text = re.sub(r"(invalid choice: .*) \(choose from .*\)", r"\1 (…)", text)
        self.said.append("\n".join(line.rstrip() for line in text.strip().splitlines()))

    @contextmanager
    def __call__(self, kind: type[BaseException], **names: object) -> Iterator[None]:
        """Expect an error of this kind, and add its message."""
        with pytest.raises(kind) as caught:
            yield
        error = caught.value
        self.text(error.render() if isinstance(error, RapidformerError) else str(error), **names)

    def command(self, line: str, status: int = 2, **names: object) -> None:
        """Expect that a command ends with this status, and add what it prints to standard error."""
        words, errors = shlex.split(line), io.StringIO()
        with contextlib.redirect_stderr(errors):
            assert main(words[words[0] == "rapidformer" :]) == status, errors.getvalue()
        self.text(errors.getvalue(), **names)


@pytest.fixture
def says(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Says]:
    base = tmp_path_factory.getbasetemp()
    names = {str(request.getfixturevalue("tmp_path")): "FOLDER"} if "tmp_path" in request.fixturenames else {}
    cache = os.environ.get("HF_HOME", f"{Path.home()}/.cache/huggingface")
    says = Says(names | {str(base): "TMP", cache: "CACHE"})
    yield says
    node = request.node
    name, said = f"{node.path.name}::{node.name}", "\n".join(says.said)
    file = node.path.parent / FILE
    if request.config.getoption("write_messages"):
        with FileLock(f"{base}/messages.lock"):
            kept = read_messages(file) | {name: said}
            file.write_text("\n".join(f"{HEAD}{key}\n{kept[key]}\n" for key in sorted(kept)), encoding="utf-8")
    assert read_messages(file).get(name) == said, "run this test with --write-messages, and read the diff"
