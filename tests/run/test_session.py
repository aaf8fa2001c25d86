"""A user's own loop: its steps equal those of a run with every way to divide the model, and it resumes after a kill."""

import copy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import own_loop
from rapidformer_templates import Data, OptimizerSpec, RapidformerError, Trainer, compose, flag
from rapidformer_templates.errors import CheckpointError, DataError, NonFiniteLoss, OutOfMemory
from tests.support.messages import Says
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

EXAMPLE = Path(own_loop.__file__)
LAYOUTS = {
    "ddp": "",
    "zero-3": "--zero-3-memory-optimization",
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2",
}
CPU = ["--device", "cpu"]


class InOrder:
    """The samples of the example in order, as its loop reads them."""

    in_order = True

    def __len__(self) -> int:
        return len(own_loop.TOKENS)

    def __getitem__(self, index: int) -> int:
        return index


class AsRun(Trainer):
    """Trains the model of the example with the loop of the library."""

    def build_model(self) -> nn.Module:
        return own_loop.build_model()

    def build_data(self) -> Data:
        samples: Any = InOrder()
        return Data(train=samples, collate=lambda rows: own_loop.collate(torch.tensor(rows)))

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.AdamW, {"lr": 3e-3})

    def build_scheduler(self, total_steps: int) -> Callable[[int], float]:
        return lambda step: 1.0

    def on_step_end(self, step: int, result: Any) -> None:
        self.losses = [*getattr(self, "losses", []), float(result.loss)]


def _run(*flags: str) -> list[float]:
    sizes = (
        f"--micro-batch-size 2 --global-batch-size {own_loop.BATCH} --train-iters {own_loop.STEPS} --lr 3e-3 --no-save"
    )
    template = AsRun([*CPU, *sizes.split(), *flags])
    template.fit()
    return template.losses


@pytest.fixture(scope="module")
def run() -> list[float]:
    return _run()


def _everywhere(workers: Any, folder: str, layouts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: own_loop.train([*CPU, *LAYOUTS[name].split()], f"{folder}/{name}") for name in layouts
    }
    found["resumed"] = _resumed(folder)
    found["replicas"] = _refusal(lambda: _tensor_parallel_step(workers.rank))
    found["uneven"] = _uneven(workers)
    found["instance"] = _instance(workers.rank, own_loop.collate(torch.arange(4) + 4 * workers.rank))
    return found


def _instance(rank: int, batch: dict[str, torch.Tensor]) -> list[float]:
    """Return the losses of a model that each worker has initialised differently, with an optimizer of torch."""
    torch.manual_seed(rank)
    model = own_loop.build_model()
    with compose(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", micro_batch_size=4) as session:
        return [float(session.step([batch]).loss) for _ in range(3)]


def _contrastive(workers: Any) -> list[float]:
    """Return the losses of rows that are told apart from all others of the global batch."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        rows = model(batch["x"])
        similar = batch["x"] @ session.gather(rows).repeat(1, 2).T
        return nn.functional.cross_entropy(similar, torch.arange(len(rows)), reduction="sum"), len(rows)

    with compose(lambda: nn.Linear(6, 3), torch.optim.SGD, loss, lr=0.1, device="cpu") as session:
        batch = {"x": x.chunk(session.workers.data)[session.workers.data_rank]}
        return [float(session.step([batch]).loss) for _ in range(3)]


@pytest.mark.distributed
def test_a_loss_sees_the_rows_of_all_workers() -> None:
    alone = _contrastive(None)
    assert alone[0] > alone[-1]
    assert run_in_workers(2, _contrastive) == [pytest.approx(alone, rel=1e-5)] * 2


def _refusal(body: Callable[[], Any]) -> str:
    try:
        body()
    except RapidformerError as error:
        return error.render()
    return "accepted"


def _tensor_parallel_step(rank: int) -> None:
    with compose(own_loop.build_model, lr=1e-3, device="cpu", tensor_model_parallel_size=2) as session:
        session.step([own_loop.collate(torch.tensor([rank]))])


def _resumed(folder: str) -> tuple[list[float], list[float]]:
    """Return the losses of the second half of a session with dropout, and those after a load."""

    def build() -> nn.Module:
        model = own_loop.build_model()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        return model

    def steps(session: Any) -> list[float]:
        batches = [own_loop.collate(torch.arange(4) + 4 * session.workers.data_rank + 8 * i) for i in range(3)]
        return [float(session.step([batch]).loss) for batch in batches]

    flags: Any = {"lr": 1e-2, "device": "cpu", "micro_batch_size": 4, "clip_grad": 0.1}
    with compose(build, **flags) as first:
        steps(first)
        first.save(f"{folder}/half", {"epoch": 1})
        whole = steps(first)
    with compose(build, **flags) as second:
        assert second.load(f"{folder}/half") == {"epoch": 1}
        assert second.steps == 3
        return whole, steps(second)


def _uneven(workers: Any) -> list[float]:
    """Return the losses if the second worker has fewer samples than the first, and then none."""
    with compose(own_loop.build_model, lr=1e-2, device="cpu", micro_batch_size=2, global_batch_size=8) as session:
        shares: list[tuple[list[int], ...]] = [([0, 1], [2, 3]), ([4, 5],)] if workers.rank else [([6],), ([7],)]
        shares = [*shares, () if workers.rank else ([8, 9],)]
        losses = [float(session.step([own_loop.collate(torch.tensor(r)) for r in step]).loss) for step in shares]
        return [*losses, session.evaluate(None if workers.rank else own_loop.collate(torch.arange(3))).loss]


def _around(flags: str, between: Callable[[Any, Any], None] | None) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of the steps of a session, and do something after the first step."""
    spoils = [False]

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        mean: torch.Tensor = model(**batch).loss
        return mean * float("nan") if spoils[0] else mean

    sizes: Any = {"lr": 1e-2, "device": "cpu", "micro_batch_size": 2, "global_batch_size": 8}
    with compose(own_loop.build_model, compute_loss=loss, argv=flags.split(), **sizes) as session:
        batches = [own_loop.collate(torch.arange(2) + 2 * i + 4 * session.workers.data_rank) for i in range(2)]
        results = [session.step(batches)]
        if between:
            spoils[0] = between is _spoiled
            between(session, batches)
            spoils[0] = False
        results += [session.step(batches) for _ in range(2)]
        return [(float(result.loss), float(result.grad_norm)) for result in results]


def _left(session: Any, batches: Any) -> None:
    with session.open_step(batches) as step:
        model, batch = step.forward(step.microbatches[0])
        step.backward(model(**batch).loss)


def _spoiled(session: Any, batches: Any) -> None:
    with pytest.raises(NonFiniteLoss):
        session.step(batches)


def _in_one_session(workers: Any, flags: str) -> list[list[tuple[float, float]]]:
    return [_around(flags, between) for between in (None, _left, _spoiled)]


KEEPS_GRADIENTS = [
    "--zero-3-memory-optimization", "--fsdp-memory-optimization --no-fsdp-reduce-every-micro-batch",
    "--zero-2-memory-optimization", "--zero-2-memory-optimization --cpu-offload",
    "--zero-3-memory-optimization --cpu-offload", "--use-distributed-optimizer", "--oss-sdp-memory-optimization",
]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("flags", by_default(KEEPS_GRADIENTS[:3], KEEPS_GRADIENTS))
def test_the_gradients_of_a_step_without_an_update_are_gone(flags: str) -> None:
    expected, *others = run_in_workers(2, _in_one_session, flags)[0]
    assert others == [expected, expected]


@pytest.mark.slow
def test_a_script_shows_mistakes_without_a_stack_trace(says: Says) -> None:
    words = [sys.executable, str(EXAMPLE), "--fsdp-memory-optimisation", "--device", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=EXAMPLE.parents[1])
    assert done.returncode == 1
    says.text(done.stderr)


class Noisy(nn.Module):
    """Counts its forwards in training, and draws random numbers in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def _noisy_steps(*, looks: bool, fails: bool = False) -> tuple[list[float], int]:
    """Return the losses of three steps, and the step of the session. The last one may end with an error."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    flags: Any = {"lr": 1e-2, "device": "cpu", "micro_batch_size": 6}
    with compose(Noisy(), compute_loss=lambda model, batch: model(batch["x"]).square().mean(), **flags) as session:
        losses = []
        for number in range(3):
            if looks:
                assert torch.equal(session.forward(x), session.forward(x))
            try:
                with session.open_step([{"x": x}]) as step:
                    losses.append(float(step.run(1.0).loss))
                    if fails and number == 2:
                        raise KeyError
            except KeyError:
                pass
        return losses, session.steps


def test_a_forward_changes_nothing() -> None:
    assert _noisy_steps(looks=True) == _noisy_steps(looks=False)


def test_a_step_counts_if_the_code_after_its_update_fails() -> None:
    assert _noisy_steps(looks=False, fails=True) == _noisy_steps(looks=False)


def _share(workers: Any, **flags: int) -> tuple[int, int, float, float]:
    """Return micro batch, accumulation, the loss of a step of eight samples in one batch per worker, and of torch."""
    torch.manual_seed(0)
    model, samples = own_loop.build_model(), torch.arange(8)
    batch = own_loop.collate(samples)
    whole = float(model(**batch).loss)
    with compose(model, lr=1e-2, device="cpu", global_batch_size=8, **flags) as session:
        mine = samples[session.workers.data_rank :: session.workers.data]
        result = session.step([own_loop.collate(mine)])
        return session.plan.sizes.micro_batch, session.plan.sizes.accumulation, float(result.loss), whole


@pytest.mark.distributed
def test_without_a_micro_batch_each_worker_takes_its_share_of_a_step_in_one_batch() -> None:
    assert _share(None, micro_batch_size=2)[:2] == (2, 4)
    for size, found in ((8, [_share(None)]), (4, run_in_workers(2, _share))):
        for micro, accumulation, loss, whole in found:
            assert (micro, accumulation) == (size, 1)
            assert loss == pytest.approx(whole, rel=1e-5)


@pytest.fixture(scope="module")
def in_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_in_workers(2, _everywhere, str(tmp_path_factory.mktemp("sessions")), selected(request, "layout"))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(["pipeline"], LAYOUTS))
def test_own_loop_has_the_losses_of_a_run(layout: str, run: list[float], in_workers: list[dict[str, Any]]) -> None:
    assert len(run) == own_loop.STEPS
    for found in in_workers:
        assert found[layout] == pytest.approx(run, abs=1e-6)


def test_own_loop_alone_is_a_run_bitwise(run: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert own_loop.train(CPU, str(tmp_path)) == run
    capsys.readouterr()
    assert own_loop.train(CPU, str(tmp_path)) == run
    assert capsys.readouterr().out == f"all {own_loop.STEPS} steps are done: delete {tmp_path} to train again\n"
    assert len(EXAMPLE.read_text(encoding="utf-8").partition("from pathlib")[2].splitlines()) < 45


@pytest.mark.distributed
def test_a_session_goes_on_bitwise(in_workers: list[dict[str, Any]], says: Says) -> None:
    """Also: a model is that of the first worker, and workers of a replica must bring the same batches."""
    alone = _instance(0, own_loop.collate(torch.arange(8)))
    for found in in_workers:
        whole, again = found["resumed"]
        assert whole == again  # with dropout
        assert len(set(whole)) == 3
        assert found["instance"] == pytest.approx(alone, abs=1e-6)
        assert found["replicas"] == in_workers[0]["replicas"]
    says.text(in_workers[0]["replicas"])


@pytest.mark.distributed
def test_a_worker_with_fewer_samples_counts_for_what_it_has(in_workers: list[dict[str, Any]]) -> None:
    with compose(own_loop.build_model, lr=1e-2, device="cpu", micro_batch_size=8) as session:
        steps = ([6, 0, 1, 2, 3], [7, 4, 5], [8, 9])
        wanted = [float(session.step([own_loop.collate(torch.tensor(rows))]).loss) for rows in steps]
        wanted.append(session.evaluate(own_loop.collate(torch.arange(3))).loss)
    assert in_workers[0]["uneven"] == pytest.approx(wanted, abs=1e-6)
    assert in_workers[1]["uneven"] == in_workers[0]["uneven"]


def test_a_folder_loads_the_branch_that_was_saved_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 1 to 4, then from step 1 again, first to 2, later to 3. Step 4 remains, for want of others."""
    batch, root = own_loop.collate(torch.arange(4)), tmp_path / "checkpoints"
    with compose(own_loop.build_model, lr=1e-2, device="cpu", micro_batch_size=4) as session:

        def save(branch: str) -> None:
            session.step([batch])
            session.save(tmp_path, {"branch": branch})

        for _ in range(4):
            save("old")
        session.load(root / "step-1")
        save("new")
        capsys.readouterr()
        assert (session.load(tmp_path), session.steps) == ({"branch": "new"}, 2)
        assert "skipped step-4: training went back to an earlier step" in capsys.readouterr().err
        save("new")
        (root / "step-3/index.json").unlink()
        assert (session.load(tmp_path), session.steps) == ({"branch": "new"}, 2)
        for step in (1, 2, 3):
            shutil.rmtree(root / f"step-{step}")
        assert (session.load(tmp_path), session.steps) == ({"branch": "old"}, 4)


def test_summary_has_the_receipts(tmp_path: Path) -> None:
    with compose(own_loop.build_model, lr=1e-3, device="cpu", checkpoint_activations=True) as session:
        session.step([own_loop.collate(torch.arange(4))])
        summary = session.summary()
        session.export(tmp_path / "export")
    assert (summary["steps"], summary["samples"]) == (1, 4)
    assert "checkpoint-activations" in summary["switches"]
    assert summary["receipts"]["micro_steps"] == 1
    assert (tmp_path / "export/model.safetensors").is_file()


WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"save": "runs/x"}, {"epochs": 3}, {"neftune_alpha": 5.0}, {"lr_decay_style": "cosine"},
    {"data_iterator": "dynamic-shape"}, {"optimizer": OptimizerSpec(torch.optim.SGD, {"lr": 0.1})},
    {"zero_1_memory_optimization": True, "fsdp_memory_optimization": True},
]  # fmt: skip


def test_flags_without_effect_are_refused(says: Says) -> None:
    for flags in WITHOUT_EFFECT:
        with pytest.raises(RapidformerError) as caught:
            compose(own_loop.build_model, **{"lr": 1e-3, "device": "cpu", **flags})
        says.text(str(caught.value), HERE=f"test_session.py:{sys._getframe().f_lineno - 1}")


def test_running_out_of_memory_names_the_next_step(says: Says) -> None:
    def fails(model: Any, batch: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with (
        says(OutOfMemory, HOST=socket.gethostname()),
        compose(own_loop.build_model, None, fails, lr=1e-3, device="cpu", micro_batch_size=8) as session,
    ):
        session.step([own_loop.collate(torch.arange(8))])
    with pytest.raises(ZeroDivisionError), compose(own_loop.build_model, lr=1e-3, device="cpu"):
        _ = 1 / 0


def test_what_a_step_cannot_use_is_told(tmp_path: Path, says: Says) -> None:
    batch = own_loop.collate(torch.arange(1))
    with compose(own_loop.build_model, lr=1e-3, device="cpu") as session:
        with says(DataError):
            session.step([])
        with says(DataError):
            session.step([batch, batch])
        with says(CheckpointError):
            session.load(tmp_path)
        assert session.steps == 0


@dataclass(frozen=True)
class Widths:
    """Widths"""

    layers: int = flag(4, "number of layers")


class WithHooks(Trainer):
    """Has the model of the example, and a loss that is twice as large."""

    Flags = Widths

    def build_model(self) -> nn.Module:
        model: Any = own_loop.build_model()
        del model.transformer.h[self.flags.layers :]
        return model

    def compute_loss(self, model: Any, batch: Any) -> Any:
        return 2 * model(**batch).loss


@pytest.mark.parametrize("layers", [4, 2])
def test_a_template_opens_a_session_with_its_hooks_and_flags(layers: int) -> None:
    """The expected losses are those of torch alone."""
    batch, sizes = own_loop.collate(torch.arange(4)), ["--micro-batch-size", "4", "--lr", "1e-2", "--seed", "3"]
    task = WithHooks([*CPU, *sizes, "--layers", str(layers), "--clip-grad", "0", "--weight-decay", "0"])
    with task.compose() as session:
        model = copy.deepcopy(session.model)
        found = [float(session.step([batch]).loss) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0, betas=(0.9, 0.999))
    expected = []
    for _ in range(2):
        loss = 2 * model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))
    assert len(model.transformer.h) == layers
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RapidformerError, match="--epochs"):
        WithHooks([*CPU, *sizes, "--epochs", "3"]).compose()


def _generated(workers: Any, flags: str) -> Any:
    with compose(own_loop.build_model, lr=1e-2, micro_batch_size=4, argv=[*CPU, *flags.split()]) as session:
        prompts = own_loop.TOKENS[session.workers.data_rank :: session.workers.data][:3, :5]
        settings = {"do_sample": False, "max_new_tokens": 6 + 3 * session.workers.data_rank, "pad_token_id": 0}
        texts = session.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **settings)
        return prompts, texts, session.model.training, session.workers.data_rank


@pytest.mark.distributed
@pytest.mark.parametrize(
    "flags",
    [
        "", "--fsdp-memory-optimization", "--tensor-model-parallel-size 2", "--context-parallel-size 2",
        "--context-parallel-size 2 --context-parallel-kind ring",
    ],
)  # fmt: skip
def test_sessions_generate_texts_of_different_lengths(flags: str) -> None:
    """The expected texts are those of repeated forwards of a single model."""
    with compose(own_loop.build_model, lr=1e-2, micro_batch_size=4, argv=CPU) as alone:
        for prompts, texts, trains, rank in run_in_workers(2, _generated, flags):
            expected = prompts
            for _ in range(6 + 3 * rank):
                following = alone.forward(input_ids=expected).logits[:, -1].argmax(-1)
                expected = torch.cat([expected, following[:, None]], 1)
            assert torch.equal(texts, expected)
            assert trains


def _sampled(workers: Any, flags: str, folder: str) -> list[list[int]]:
    """Return tokens of two calls, of the next after a save, of the same after a load, and of another session."""
    prompts = own_loop.TOKENS[:1, :3]

    def texts(session: Any) -> list[int]:
        mask = torch.ones_like(prompts)
        sampled = session.generate(
            input_ids=prompts, attention_mask=mask, do_sample=True, max_length=20, eos_token_id=0
        )
        return sampled[0].tolist()

    def build() -> nn.Module:
        model: Any = own_loop.build_model()
        model.transformer.drop.p = model.transformer.h[0].attn.attn_dropout.p = 0.1
        return model

    argv = [*CPU, *flags.split()]
    with compose(build, lr=1e-9, micro_batch_size=4, argv=argv) as session:
        found = [texts(session), texts(session)]
        session.step([own_loop.collate(torch.arange(4))])
        session.save(folder)
        found.append(texts(session))
        session.load(folder)
        found.append(texts(session))
    with compose(build, lr=1e-9, micro_batch_size=4, argv=argv) as session:
        return [*found, texts(session)]


@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2", "--context-parallel-size 2"])
def test_each_call_samples_other_tokens_from_the_seed(flags: str, tmp_path: Path) -> None:
    both = run_in_workers(2, _sampled, flags, str(tmp_path))
    for first, second, third, loaded, again in both:
        assert first != second != third != first
        assert loaded == third
        assert again == first
    assert (both[0] == both[1]) == bool(flags)
    assert flags or both[0][0] != both[1][0]


@pytest.mark.distributed
def test_a_pipeline_cannot_generate() -> None:
    refused = run_in_workers(2, _pipeline_generates)
    assert all("a pipeline cannot generate texts" in text for text in refused)


def _pipeline_generates(workers: Any) -> str:
    flags: Any = {"lr": 1e-2, "device": "cpu", "micro_batch_size": 4, "pipeline_model_parallel_size": 2}
    example = own_loop.collate(torch.arange(1))
    with compose(own_loop.build_model, example=example, **flags) as session:
        return _refusal(lambda: session.generate(input_ids=example["input_ids"]))
