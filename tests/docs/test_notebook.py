"""A kernel runs the example notebook from the first cell to the last, and the output matches the saved output."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat", reason="needs nbformat: pip install nbformat")
nbclient: Any = pytest.importorskip("nbclient", reason="needs nbclient: pip install nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/notebook.ipynb"


def said(cell: Any, name: str) -> str:
    """Return the printed output of a cell, or its value (``value``)."""
    if name == "value":
        values = [output["data"] for output in cell.outputs if output.output_type == "execute_result"]
        return "".join(value["text/plain"] for value in values)
    return "".join(output["text"] for output in cell.outputs if output.get("name") == name)


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.distributed
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    kept = nbformat.read(NOTEBOOK, 4)
    notebook = nbformat.read(NOTEBOOK, 4)
    place = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    cells = {kind: [cell for cell in read.cells if cell.cell_type == "code"]
             for kind, read in (("run", notebook), ("kept", kept))}  # fmt: skip
    for kind in ("run", "kept"):
        _, _, alone, predicted, evaluated, together, one, mistake = cells[kind]
        for cell, workers in ((alone, 1), (together, 2)):
            assert f"{workers} × cpu, fp32" in said(cell, "stderr")
            assert "step 80/80  eval_loss" in said(cell, "stderr")
            assert "results" in said(cell, "stdout")
            first, last = re.findall(r"80 steps, loss (\S+) to (\S+)", said(cell, "stdout"))[0]
            assert float(last) < float(first) / 2
        assert [record["label"] for record in ast.literal_eval(said(predicted, "value"))] == ["bad", "good"]
        assert said(evaluated, "stdout") == "BertForSequenceClassification\n"
        assert ast.literal_eval(said(evaluated, "value"))["accuracy"] == 1.0
        assert ast.literal_eval(said(one, "value"))["label"] == "bad"
        (error,) = mistake.outputs
        lines = ["error: unknown flag 'epoch'", "  where  In[9]:1", "  help   did you mean epochs?"]
        assert error["traceback"] == lines
    assert [path.name for path in tmp_path.iterdir()] == ["notebook-data"]
