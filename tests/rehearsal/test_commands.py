"""What a user of a new kind of accelerator sees, whose package makes it known to torch as all such packages do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stand_in

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.SKIP)]
ROOT = Path(__file__).parents[2]
PACKAGE = "def load():\n    from tests.support import stand_in\n    stand_in.load()\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package that torch loads when it is imported."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "stand_in_package.py").write_text(PACKAGE)
    about = folder / "stand_in_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nstandin = stand_in_package:load\n")
    return folder


def _told(package: Path, words: str) -> str:
    paths = os.pathsep.join([str(package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "rapidformer_templates", *words.split()]
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "120"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_doctor_tells_of_the_accelerator(package: Path) -> None:
    machine = json.loads(_told(package, "doctor --json"))["machine"]
    assert machine["accelerator"] == {"kind": stand_in.NAME, "count": 4, "name": None}
    assert machine["gpus"] == []


def test_a_plan_takes_it_without_a_flag(package: Path) -> None:
    sizes = "--model-type gpt2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    assert f"device       │ {stand_in.NAME}" in _told(package, f"plan {sizes}")
