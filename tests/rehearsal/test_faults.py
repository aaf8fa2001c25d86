"""Messages of a run whose device fails: it is out of memory, a kernel fails, or the device is lost."""

import gc
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates import compose
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.folder import read_metrics
from tests.support import stand_in
from tests.support.jobs import VOCABULARY, CausalJob
from tests.support.worker_pool import end_pool, run_in_workers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.missing())]
FLAGS = "--global-batch-size 8 --lr 1e-3 --no-export-model --dataloader-num-workers 0 --device standin"


@pytest.fixture(autouse=True)
def no_other_test_gets_the_device() -> Iterator[None]:
    """End the worker whose device has failed."""
    yield
    end_pool()


class Silent(CausalJob):
    """Reads nothing from the device itself. In ``wrong_step`` its tokens are outside the vocabulary."""

    wrong_step: int | None = None
    gone_after: int | None = None
    done = 0

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.done + 1 == self.wrong_step:
            batch = {**batch, "input_ids": batch["input_ids"] + VOCABULARY}
        return super().compute_loss(model, batch)

    def on_step_end(self, step: int, result: Any) -> None:
        self.done = step
        if step == self.gone_after:
            stand_in.load().lose(0)


def _job(flags: str, **faults: int) -> Any:
    return type("Job", (Silent,), faults)([*FLAGS.split(), *flags.split()])


def _fitted(job: Any) -> Any:
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):  # it would end this process
        return job.fit()


def _ending(job: Any) -> tuple[str, str, str, str]:
    """Return the type, message, place and hint of the error that ends a run."""
    with pytest.raises(RapidformerError) as caught:
        _fitted(job)
    error = caught.value
    return type(error).__name__, error.message, error.where or "", error.hint or ""


def _peak(micro_batch: int, limit: int = 0) -> int:
    """Return the peak bytes of a run in addition to those that existed before it."""
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.standin.memory_allocated()  # type: ignore[attr-defined]
    torch.standin.reset_peak_memory_stats()  # type: ignore[attr-defined]
    stand_in.load().set_limit(0, before + limit if limit else 0)
    _fitted(_job(f"--train-iters 2 --micro-batch-size {micro_batch}"))
    return int(torch.standin.max_memory_allocated()) - before  # type: ignore[attr-defined]


def _climb(workers: Any) -> tuple[int, int, Any, int, int]:
    large, small = _peak(8), _peak(1)
    limit = (large + small) // 2
    with pytest.raises(RapidformerError) as caught:
        _peak(8, limit)
    said = (type(caught.value).__name__, caught.value.message, caught.value.hint)
    del caught
    return large, small, said, limit, _peak(1, limit)


def test_a_run_that_is_out_of_memory_names_the_step_that_fits() -> None:
    large, small, said, limit, climbed = run_in_workers(1, _climb, device=stand_in.NAME)[0]
    assert large > 1.5 * small
    kind, message, hint = said
    assert kind == "OutOfMemory"
    assert message.startswith(
        f"worker 0 on {gethostname()} is out of memory: standin:0 is out of memory: tried to allocate "
    )
    assert hint == "the next step that saves memory: --micro-batch-size 1 --global-batch-size 8"
    assert climbed <= limit


def _wrong_kernel(workers: Any, folder: str) -> dict[str, Any]:
    flags = "--train-iters 6 --micro-batch-size 8 --save-interval 2 --keep-checkpoints 9"
    found: dict[str, Any] = {}
    for name, more in (("logged", "--log-interval 1"), ("silent", "--log-interval 100")):
        save = f"--save {folder}/{name} {more}"
        found[name] = _ending(_job(f"{flags} {save}", wrong_step=3))
        found[f"{name}, saved"] = sorted(path.name for path in Path(folder, name, "checkpoints").glob("step-*"))
    _fitted(_job(f"{flags} --save {folder}/logged --log-interval 1 --resume"))
    _fitted(_job(f"{flags} --save {folder}/whole --log-interval 1"))
    return found


def test_a_kernel_that_goes_wrong_is_told_with_its_step(tmp_path: Path) -> None:
    found = run_in_workers(1, _wrong_kernel, str(tmp_path), device=stand_in.NAME)[0]
    for name, met_after in (("logged", (3,)), ("silent", (3, 4))):
        kind, message, where, hint = found[name]
        assert kind == "DeviceFailed"
        what = "work that was queued earlier on standin:0 failed: index out of range in self"
        assert message in [f"after step {step} the device failed: {what}" for step in met_after]
        assert "rapidformer_templates/" in where
        assert "--device cpu" in hint
        assert hint.endswith("continue with --resume")
        assert found[f"{name}, saved"] == ["step-2"]
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("logged", "whole")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def _gone(workers: Any) -> Any:
    return _ending(_job("--train-iters 6 --micro-batch-size 8", gone_after=2))


def test_a_device_that_is_gone_is_told_with_the_step() -> None:
    kind, message, _, hint = run_in_workers(1, _gone, device=stand_in.NAME)[0]
    assert (kind, message) == ("DeviceFailed", "after step 2 the device failed: standin:0 is gone")
    assert hint.endswith("nothing was saved: there is no --save")


def _own_loop(workers: Any) -> tuple[str, str]:
    """A user's own loop whose second step has a wrong token."""
    try:
        with (
            mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False),
            compose(lambda: torch.nn.Embedding(4, 2), None, _loss, lr=1e-3, device="standin") as session,
        ):
            for token in (1, 9, 1, 1, 1):
                session.step([{"x": torch.tensor([[token]])}])
    except RapidformerError as error:
        return type(error).__name__, error.message
    return "", ""


def _loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).square().mean()
    return loss


def test_a_loop_of_ones_own_is_told_too() -> None:
    kind, message = run_in_workers(1, _own_loop, device=stand_in.NAME)[0]
    assert kind == "DeviceFailed"
    assert "index out of range" in message
