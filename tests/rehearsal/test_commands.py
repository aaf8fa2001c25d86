"""Commands on a new kind of accelerator, whose package registers it with torch as all such packages do."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rapidformer_templates.commands.bench import models
from rapidformer_templates.commands.bench.models import MatrixProduct
from rapidformer_templates.commands.main import main
from tests.support import stand_in
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.missing())]
ROOT = Path(__file__).parents[2]
PACKAGE = "def load():\n    from tests.support import stand_in\n    stand_in.load()\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package that torch loads during its own import."""
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
    assert machine["device"] == f"4 × {stand_in.NAME}"


def _planned(workers: Any) -> str:
    """Return the output of ``plan`` in a process whose torch knows the accelerator."""
    sizes = "--model-type gpt2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    said = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": "120"}), contextlib.redirect_stdout(said):
        assert main(["plan", *sizes.split()]) == 0
    return said.getvalue()


def test_a_plan_takes_it_without_a_flag() -> None:
    assert f"device       │ {stand_in.NAME}" in run_in_workers(1, _planned, device=stand_in.NAME)[0]


def _measured(workers: Any) -> tuple[dict[str, Any], float]:
    """Return the result of ``bench mfu`` on the accelerator, and the rate of a matrix product."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        words = f"bench mfu --scale tiny --turns 1 --steps-a-turn 1 --json {folder}/mfu.json --mixed-precision bf16"
        with mock.patch.dict(models.PRODUCT_SIZES, accelerator=32):
            assert main(words.split()) == 0
        return json.loads(Path(folder, "mfu.json").read_text()), MatrixProduct(stand_in.NAME, "fp32", size=32).rate()


def test_bench_computes_on_it() -> None:
    result, rate = run_in_workers(1, _measured, device=stand_in.NAME)[0]
    assert result["plan"]["device"] == stand_in.NAME
    assert 0 < result["peak_mb"] < 100  # of the device, where torch itself takes nothing
    assert result["utilisation"] > 0
    assert rate > 0
