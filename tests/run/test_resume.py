"""A run that died resumes as if nothing had happened: bit for bit, with dropout."""

import errno
import json
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from rapidformer_templates.errors import CheckpointError, ConfigError
from rapidformer_templates.run import folder as run_lock
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.system.files import crc32
from tests.support.dropout_runs import FLAGS, DropoutJob, assert_same, run
from tests.support.jobs import _bert
from tests.support.lines import Line
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


@pytest.fixture(scope="module")
def dead_after_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run with the checkpoint of step 3. Tests change copies of it."""
    run(folder := tmp_path_factory.mktemp("dead") / "run", dies_after=4)
    return folder


@pytest.fixture(scope="module")
def dead_after_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run with the checkpoints of steps 3 and 6. Tests change copies of it."""
    run(folder := tmp_path_factory.mktemp("dead") / "run", dies_after=8)
    return folder


DEATHS = [([1], []), ([5], []), ([4, 7, 11], []), ([5], ["--async-save"]), ([4, 7, 11], ["--async-save"])]


@pytest.mark.slow
@pytest.mark.parametrize(("deaths", "flags"), by_default(DEATHS[1:2], DEATHS), ids=str)
def test_a_resumed_run_is_bitwise_the_whole_one(
    deaths: list[int], flags: list[str], whole: Path, tmp_path: Path
) -> None:
    for death in deaths:
        run(tmp_path / "run", "--resume", *flags, dies_after=death)
    run(tmp_path / "run", "--resume", *flags)
    assert_same(whole, tmp_path / "run")


MEASURED = ("throughput", "receipts", "wall_seconds", "peak_memory_mb", "peak_memory_mb_by_rank")


def test_a_complete_run_can_be_resumed_to_its_summary(whole: Path, tmp_path: Path) -> None:
    def summary(folder: Path) -> Any:
        return json.loads((folder / "summary.json").read_text())

    folder, wanted = shutil.copytree(whole, tmp_path / "run"), summary(whole)
    run(folder, "--resume")
    assert all(wanted[name] == summary(folder)[name] for name in ("metrics", "best", "steps", *MEASURED))
    assert_same(whole, folder)
    (folder / "summary.json").write_text('{"throughput": ')  # a damaged one is written anew
    run(folder, "--resume")
    assert all(wanted[name] == summary(folder)[name] for name in ("best", "steps"))
    assert wanted["metrics"] == pytest.approx(summary(folder)["metrics"])


DAMAGES = {
    "flipped byte": "weights-00000-00000.safetensors is damaged",
    "missing": "random-00000.safetensors is missing",
    "unreadable": "weights-00000-00000.safetensors cannot be read",
    "unreadable manifest": "manifest.json cannot be read",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", by_default(["flipped byte"], DAMAGES))
def test_damaged_checkpoint_is_named_and_passed_over(
    damage: str, whole: Path, dead_after_8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a line at the end of the metrics is dropped, too."""
    folder = shutil.copytree(dead_after_8, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 9, "lo')
    file, real = folder / "checkpoints" / "step-6" / DAMAGES[damage].split()[0], Path.open
    if damage == "missing":
        file.unlink()
    elif damage == "flipped byte":
        content = file.read_bytes()
        half = len(content) // 2
        file.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])

    def open_unless_bad(path: Path, *arguments: Any, **named: Any) -> Any:
        if path == file and "unreadable" in damage:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *arguments, **named)

    with mock.patch.object(Path, "open", open_unless_bad):
        run(folder, "--resume")
    said = capsys.readouterr().err
    assert "warning: skipped step-6: " in said
    assert DAMAGES[damage] in said
    assert f"resuming from {folder}/checkpoints/step-3" in said
    assert_same(whole, folder)


def test_no_whole_checkpoint_is_an_error(dead_after_4: Path, tmp_path: Path, says: Says) -> None:
    folder = shutil.copytree(dead_after_4, tmp_path / "run")
    (folder / "checkpoints" / "step-3" / "optimizer-00000-00000.safetensors").unlink()
    with says(CheckpointError):
        run(folder, "--resume")


class Other(DropoutJob):
    def make(self) -> torch.nn.Module:
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


class Wider(DropoutJob):
    def make(self) -> torch.nn.Module:
        config = _bert()
        config.num_labels = 5
        return BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (DropoutJob, "--seed 5"), (DropoutJob, "--global-batch-size 8"), (DropoutJob, "--optimizer lamb"), (Wider, ""),
        (Other, ""),
    ],
    ids=["seed", "batch", "optimizer", "wider", "other"],
)  # fmt: skip
def test_checkpoints_that_do_not_fit(
    kind: type[DropoutJob], flags: str, dead_after_4: Path, tmp_path: Path, says: Says
) -> None:
    folder = shutil.copytree(dead_after_4, tmp_path / "run")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan["values"]["--model-type"] = {"value": "bert", "origin": "command line"}
    (folder / "plan.json").write_text(before := json.dumps(plan), encoding="utf-8")
    with says(CheckpointError):
        kind([*FLAGS.split(), "--save", str(folder), "--resume", *flags.split()]).fit()
    assert (folder / "plan.json").read_text(encoding="utf-8") == before, "the refused run has written something"


@pytest.mark.slow
def test_weights_only_starts_anew_with_the_weights(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "next", "--load", str(whole), "--weights-only", "--seed", "9")
    first = read_metrics(tmp_path / "next" / "metrics.jsonl")[0]
    assert first["step"] == 1
    assert first["loss"] != read_metrics(whole / "metrics.jsonl")[0]["loss"]


def _die_and_resume(workers: Any, root: Path) -> None:
    run(root / "whole")
    run(root / "died", dies_after=8)
    run(root / "died", "--resume")


@pytest.mark.distributed
def test_two_workers_resume_bitwise(tmp_path: Path) -> None:
    """With dropout, of which each worker has its own."""
    run_in_workers(2, _die_and_resume, tmp_path)
    assert_same(tmp_path / "whole", tmp_path / "died")


@pytest.mark.longer
@pytest.mark.distributed
def test_two_workers_save_in_the_background(tmp_path: Path, says: Says) -> None:
    """The results are bit-identical to waiting saves. Both fail if one worker's disk is full or one sees no folder.

    Only one of them reads the data back to check that it is complete.
    """
    root, results = tmp_path, run_in_workers(2, _cases, tmp_path)
    for rank, result in enumerate(results):
        says.text(result["unseen"], ROOT=root, HOST=socket.gethostname())
        says.text(result["full"], ROOT=root)
        told, bug = result["errors"]
        says.text(told, ROOT=root)
        assert "weight is torch.complex128, which safetensors cannot hold" in bug
        assert "Traceback" in bug or rank
    files = [path for path in (root / "async" / "checkpoints" / "step-12").iterdir() if path.stem != "manifest"]
    sizes = {path.name: path.stat().st_size for path in files}
    for name in ("saved", "saved in the background", "resumed"):
        read = [result["read"][name] for result in results]
        assert sorted(read[0] + read[1]) == sorted(sizes), name
        assert max(sum(map(sizes.__getitem__, part)) for part in read) < 0.7 * sum(sizes.values()), name
    assert not (root / "node-0" / "run").exists(), "seen before anything is trained or written"
    assert_same(root / "waiting", root / "async")
    for name in ("full", "memory", "bug"):
        assert {path.name for path in (root / name / "checkpoints").iterdir()} == {"latest", "step-3"}


def _cases(workers: Any, root: Path) -> dict[str, Any]:
    """Run these cases in each of two workers."""
    read: dict[str, list[str]] = {"saved": [], "saved in the background": [], "resumed": []}

    def counting(name: str, step: str) -> Any:
        def seen(path: Path) -> int:
            if path.parent.name == step:
                read[name].append(path.name)
            return crc32(path)

        return mock.patch.object(checkpoint, "crc32", seen)

    with counting("saved", "step-12"):
        run(root / "waiting")
    run(root / "async", "--async-save", dies_after=8)
    with counting("saved in the background", "step-12"):
        run(root / "async", "--async-save", "--resume")
    with counting("resumed", "step-12"):
        run(root / "async", "--async-save", "--resume")
    with mock.patch.object(run_lock, "VISIBILITY_SECONDS", 0.3), pytest.raises(ConfigError) as unseen:
        run(root / f"node-{workers.rank}" / "run")
    full = _failing_save(workers, root / "full", OSError(errno.ENOSPC, "No space left on device"), "--async-save")
    bug = ValueError("weight is torch.complex128, which safetensors cannot hold")
    errors = [_failing_save(workers, root / "memory", MemoryError()), _failing_save(workers, root / "bug", bug)]
    return {"full": full, "unseen": str(unseen.value), "errors": errors, "read": read}


def _failing_save(workers: Any, folder: Path, error: Exception, *flags: str) -> str:
    """Return the error on both ranks if the saves from step 6 on fail on the second one."""
    unbuffered = tensor_file.unbuffered

    def fail(path: Path) -> Any:
        if workers.rank == 1 and path.parent.name != "step-3.tmp":
            raise error
        return unbuffered(path)

    told = CheckpointError if not isinstance(error, ValueError) else ValueError if workers.rank else RuntimeError
    with mock.patch.object(tensor_file, "unbuffered", fail), pytest.raises(told) as caught:
        run(folder, *flags)
    workers.barrier()
    return str(caught.value)


def test_a_resume_that_finds_nothing_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Line(["--lr", "1e-3", "--train-iters", "1", "--save", str(tmp_path / "rum"), "--resume"]).fit()
    wanted = f"warning: --resume found no checkpoint in {tmp_path}/rum/checkpoints: training starts from the beginning"
    assert wanted in capsys.readouterr().err
