"""Activations that go to the host and come back: their bits, bytes and order, in every engine and in the planner."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.stand_in_host import ROOM, StandInHost, taken_for_a_gpu
from rapidformer_templates.engines.forwards import Checkpointed, preserve_state
from rapidformer_templates.errors import ModelError, SwitchDidNothing
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import predict, variant_of
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.step_seconds import exposed_copies
from rapidformer_templates.switches.auto_strategy.timing import GB
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from rapidformer_templates.switches.offload_activations import transform as room
from rapidformer_templates.switches.offload_activations.transform import Offloader, offload_blocks
from tests.support.compiled_jobs import OneLength
from tests.support.jobs import DeepJob
from tests.support.messages import Says
from tests.support.model_shapes import MODELS, TOKENS, shapes
from tests.support.plans import planned
from tests.support.requests import CPU, GPUS, codes, refusal
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

DEVICE = torch.device("cpu")
BLOCKS = 4


@pytest.fixture(autouse=True)
def _small_storages_go() -> Iterator[None]:
    with mock.patch(f"{ROOM}.transform.MIN_BYTES", 1024):
        yield


def offloaded(blocks: list[nn.Module]) -> tuple[Offloader, StandInHost]:
    memory = StandInHost()
    offloader = Offloader(memory, DEVICE)
    offload_blocks(blocks, offloader)
    return offloader, memory


# Models.


def _trained(name: str, recompute: str, precision: str, *, offload: bool) -> dict[str, Any]:
    """Run two micro batches. Return the gradients, and the live bytes between forward and backward of the second."""
    torch.manual_seed(3)
    model = MODELS[name](BLOCKS)
    blocks = list(find_blocks(model).values())
    for block in blocks if recompute != "none" else ():
        block.forward = Checkpointed(block.forward, selective=recompute == "selective")
    counts = offloaded(blocks)[0].counts if offload else None
    losses = []
    with LiveStorages([*model.parameters(), *model.buffers()]) as live:
        for seed in range(2):
            tokens = torch.randint(TOKENS, (4, 24), generator=torch.Generator().manual_seed(seed))
            mask = torch.ones_like(tokens)
            mask[0, 20:] = 0
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
            kept = live.live
            loss.backward()
            losses.append(loss.item())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "kept": kept, "peak": live.peak, "counts": counts}


KINDS = [("gpt2", "none", "fp32"), ("gpt2", "selective", "bf16"), ("llama", "full", "bf16"), ("t5", "none", "fp32")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recompute", "precision"), KINDS)
def test_same_bits_and_what_was_sent_is_not_here(name: str, recompute: str, precision: str) -> None:
    plain, moved = (_trained(name, recompute, precision, offload=offload) for offload in (False, True))
    assert moved["losses"] == plain["losses"]
    for parameter, gradient in plain["gradients"].items():
        assert torch.equal(moved["gradients"][parameter], gradient), parameter
    counts = moved["counts"]
    assert counts.sent > 0
    assert counts.sent == 2 * counts.most_offloaded
    assert moved["kept"] == plain["kept"] - counts.most_offloaded
    assert moved["peak"] < plain["peak"]
    assert counts.late == counts.offloaded == 0


# Blocks with known bytes.

ROWS, WIDTH = 32, 32
UNIT = ROWS * WIDTH * 4


class Block(nn.Module):
    """Applies ``act`` to a product. The kept tensors follow from ``act``."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.act(self.inner(hidden if mask is None else hidden * mask))


def _half(values: torch.Tensor) -> torch.Tensor:
    return values * 0.5  # keeps nothing


def _chain(act: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.ModuleList, Offloader, StandInHost]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(act) for _ in range(BLOCKS))
    return blocks, *offloaded(list(blocks))


def _input() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def _through(blocks: nn.ModuleList, hidden: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden = block(hidden, *more)
    return hidden.square().mean()


def test_copies_go_beside_the_next_block_and_come_back_one_block_ahead() -> None:
    blocks, _, memory = _chain(_half)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda module, args, n=number: memory.journal.append((f"F{n}", 0)))
        block.act = lambda values, n=number: _noting(values, memory.journal, f"B{n}")
    _through(blocks, _input()).backward()
    done = [what for what, _ in memory.journal]
    assert " ".join(done) == "F0 F1 send sent F2 send sent F3 send sent B3 fetch B2 back fetch B1 back fetch B0 back"
    assert {size for what, size in memory.journal if what in ("send", "fetch")} == {UNIT}


def _noting(values: torch.Tensor, journal: list[tuple[str, int]], word: str) -> torch.Tensor:
    result = values * 0.5
    result.register_hook(lambda gradient: journal.append((word, 0)))
    return result


def test_weights_their_casts_and_what_blocks_share_stay() -> None:
    """In a bf16 block, the product keeps its 16-bit input and weight. All blocks share the mask."""
    blocks, offloader, memory = _chain(_half)
    mask = torch.full((ROWS, WIDTH), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _through(blocks, _input(), mask)
    loss.backward()
    assert [size for what, size in memory.journal if what == "send"] == [UNIT // 2] * (BLOCKS - 1)
    assert offloader.counts.sent == (BLOCKS - 1) * UNIT // 2


def test_what_two_blocks_keep_goes_once() -> None:
    """Its block keeps an output of tanh, and the next block keeps it as its input."""
    blocks, offloader, _ = _chain(torch.tanh)
    _through(blocks, _input()).backward()
    assert offloader.counts.sent == BLOCKS * UNIT  # the first input, and the outputs of all but the last block
    assert offloader.counts.late == 0


def test_an_input_that_somebody_holds_stays() -> None:
    blocks, offloader, memory = _chain(_half)
    _through(blocks, _input().requires_grad_()).backward()
    assert [size for what, size in memory.journal if what == "send"] == [UNIT] * (BLOCKS - 2)
    assert offloader.counts.offloaded == 0


def _gradients(blocks: nn.ModuleList) -> list[torch.Tensor]:
    gradients = [parameter.grad.clone() for parameter in blocks.parameters()]
    blocks.zero_grad()
    return gradients


def _pipelined(blocks: nn.ModuleList, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Train the first of three stages with 1F1B."""
    waiting = [_through(blocks, inputs[0]), _through(blocks, inputs[1])]
    for hidden in inputs[2:]:
        waiting.append(_through(blocks, hidden))
        waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    return _gradients(blocks)


def test_micro_batches_in_flight_come_back_in_the_order_of_a_pipeline() -> None:
    inputs = [(_input() + number).requires_grad_() for number in range(5)]
    plain = nn.ModuleList(Block(torch.tanh) for _ in range(BLOCKS))
    blocks, offloader, _ = _chain(torch.tanh)
    plain.load_state_dict(blocks.state_dict())
    for found, wanted in zip(_pipelined(blocks, inputs), _pipelined(plain, inputs), strict=True):
        assert torch.equal(found, wanted)
    counts = offloader.counts
    assert counts.offloaded == 0
    assert counts.most_offloaded == 3 * BLOCKS * UNIT  # the outputs of three in flight, whose inputs are held
    assert counts.late == 2 * UNIT  # the output and the input of the first block whose backward runs


def test_forwards_without_a_backward_leave_nothing() -> None:
    blocks, offloader, memory = _chain(torch.tanh)
    with torch.no_grad():
        _through(blocks, _input())
    with preserve_state(blocks):
        _through(blocks, _input())
    assert memory.journal == []
    loss = _through(blocks, _input())
    assert offloader.counts.offloaded > 0
    del loss
    assert offloader.counts.offloaded == 0
    _through(blocks, _input()).backward()
    wanted = _gradients(blocks)
    stop = blocks[1].inner.weight.register_hook(_fail)  # while something is on its way back to block 0
    with pytest.raises(ZeroDivisionError):
        _through(blocks, _input()).backward()
    stop.remove()
    blocks.zero_grad()
    for _ in range(2):  # autograd drops its remaining work when the next backward begins
        _through(blocks, _input()).backward()
        assert all(torch.equal(found, gradient) for found, gradient in zip(_gradients(blocks), wanted, strict=True))
    assert offloader.counts.offloaded == 0
    done = [what for what, _ in memory.journal]
    assert done.count("fetch") == done.count("back")  # including tensors that nobody used


def _fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_graph_can_be_gone_through_twice() -> None:
    blocks, _, _ = _chain(torch.tanh)
    loss = _through(blocks, _input())
    loss.backward(retain_graph=True)
    once = _gradients(blocks)
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(once, _gradients(blocks), strict=True))


def test_what_is_changed_in_place_is_told() -> None:
    """Autograd does not see changes of tensors that it does not hold."""

    def changing(values: torch.Tensor) -> torch.Tensor:
        result = values.tanh()
        with torch.no_grad():
            result.add_(1)
        return result

    plain = nn.ModuleList(Block(changing) for _ in range(BLOCKS))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _through(plain, _input()).backward()
    with pytest.raises(ModelError, match="a tensor that is kept for the backward is changed in place") as caught:
        _through(_chain(changing)[0], _input()).backward()
    assert caught.value.where == "Block with --offload-activations"


# The host of a GPU.


class _Stream:
    """Records the calls on a stream."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def wait_stream(self, other: "_Stream") -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"what {self.name} has copied"

    def __enter__(self) -> None:
        self.told.append(f"on {self.name}")

    def __exit__(self, *exception: object) -> None:
        self.told.append(f"off {self.name}")


def test_a_copy_waits_for_the_computation_and_the_computation_for_the_copy_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    names = iter(("out", "back"))
    empty = torch.empty
    monkeypatch.setattr(torch, "Stream", lambda device: _Stream(next(names), told))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: _Stream("main", told))
    monkeypatch.setattr(room.accelerator, "recorded_event", lambda device, stream: stream.record_event())
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
    memory = room.PinnedMemory(DEVICE)
    values = _input()
    copies, wait = memory.send([values])
    assert told == ["out waits for main", "on out", "off out"]
    wait()
    assert told[3:] == ["main waits for what out has copied"]
    (again,), wait = memory.fetch(copies)
    wait()
    assert told[4:] == ["back waits for main", "on back", "off back", "main waits for what back has copied"]
    assert torch.equal(again, values)
    assert again.data_ptr() != values.data_ptr()


# Every engine trains as it does without, bit for bit.

STEPS = "--train-iters 2 --global-batch-size 8 --log-interval 1 --lr 1e-2"
ENGINES = {
    "ddp": "--micro-batch-size 2",
    "fsdp": "--micro-batch-size 4 --fsdp-memory-optimization --mixed-precision bf16",
    "distributed": "--micro-batch-size 4 --use-distributed-optimizer",
    "tensor": "--micro-batch-size 8 --tensor-model-parallel-size 2 --recompute-activations",
    "sequence": "--micro-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--micro-batch-size 2 --pipeline-model-parallel-size 2",
    "interleaved": "--micro-batch-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-size 2",
    "compiled": "--micro-batch-size 4 --torch-compile aot_eager",
    "checkpointed": "--micro-batch-size 4 --checkpoint-activations --mixed-precision bf16",
    "experts": "--micro-batch-size 4 --num-experts 4 --expert-parallel",
}
if "deepspeed" in installed_packages():
    ENGINES["zero-2"] = "--micro-batch-size 2 --zero-2-memory-optimization"
    ENGINES["zero-3"] = "--micro-batch-size 4 --zero-3-memory-optimization --recompute-activations"
if "fairscale" in installed_packages():
    ENGINES["sdp"] = "--micro-batch-size 4 --oss-sdp-memory-optimization"
if installed_packages().keys() >= {"onnxruntime", "onnxscript"}:
    ENGINES["onnx"] = "--micro-batch-size 4 --onnx-runtime-training"

IN_GRAPHS = {"compiled", "onnx"}
"""Engines that need seconds for each shape of a batch."""
IN_FLIGHT = {"pipeline", "interleaved"}
"""Engines with several micro batches in flight. Which backward comes first is unknown until it begins."""


class OneLengthJob(OneLength, DeepJob):
    pass


def _run(name: str, switch: str) -> tuple[dict[str, Any], list[Any]]:
    kind = OneLengthJob if name in IN_GRAPHS else DeepJob
    job = kind(f"{STEPS} {ENGINES[name]} {switch}".split())
    return job.fit()["receipts"], job.curve


def _both(workers: Any, name: str) -> list[Any]:
    with taken_for_a_gpu(256):
        return [_run(name, switch) for switch in ("", "--offload-activations")]


@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", by_default(["interleaved"], ENGINES))
def test_every_engine_computes_the_same_bits(name: str) -> None:
    for (before, wanted), (receipts, curve) in run_in_workers(2, _both, name):
        assert curve == wanted
        assert receipts["offloaded_bytes"] > 0
        late = receipts["late_bytes"]
        assert (0 < late < receipts["offloaded_bytes"] / 4) if name in IN_FLIGHT else late == 0
        # Tensors that recomputation keeps count the same on the host.
        assert receipts.get("saved_tensor_bytes") == before.get("saved_tensor_bytes")


def test_a_cpu_is_refused_before_any_worker_starts(says: Says) -> None:
    says.text(refusal("--offload-activations --checkpoint-activations", CPU))
    assert codes("--offload-activations", GPUS) == []
    assert codes("--offload-activations --torch-compile", GPUS) == []
    assert codes("--offload-activations --torch-compile cudagraphs", GPUS) == ["RF216"]


class Flat(DeepJob):
    layers = 1


class Blockless(DeepJob):
    def make(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(("job", "error"), [(Flat, SwitchDidNothing), (Blockless, ModelError)])
def test_a_model_with_nothing_to_send_is_told(job: type[DeepJob], error: type[Exception], says: Says) -> None:
    with taken_for_a_gpu(256), says(error):
        job([*f"{STEPS} --micro-batch-size 4 --offload-activations".split()]).fit()


# The prediction of the planner.

HERE, AWAY = MemoryOptions(gpu=True), MemoryOptions(gpu=True, offloads_activations=True)


@pytest.fixture(scope="module")
def model() -> Iterator[ModelShapes]:
    with mock.patch(f"{ROOM}.transform.MIN_BYTES", 1024):
        yield shapes("gpt2", blocks=8)


@pytest.mark.longer
def test_all_but_two_blocks_are_on_the_host(model: ModelShapes) -> None:
    layout = Layout(micro_batch=4)
    here, away = (predict(model, layout, setting) for setting in (HERE, AWAY))
    a_block = model.trace(variant_of(layout, AWAY)).sent / 7
    assert here.host == 0
    assert away.host == pytest.approx(7 * a_block)
    saved = here.total - away.total
    assert 5 * a_block < saved < 7 * a_block
    assert here.parameters + here.optimizer == away.parameters + away.optimizer


@pytest.mark.longer
def test_micro_batches_in_flight_are_on_the_host(model: ModelShapes) -> None:
    """The first of two stages has two micro batches in flight, and also sends what its last block keeps."""
    layout = Layout(pipeline=2, micro_batch=4, accumulation=4)
    here, away = (predict(model, layout, setting) for setting in (HERE, AWAY))
    a_block = model.trace(variant_of(layout, AWAY)).sent / 7
    assert away.host == pytest.approx(8 * a_block, rel=0.05)
    assert here.total - away.total > 4 * a_block


def test_a_step_waits_for_what_the_computation_does_not_hide() -> None:
    """The forward is a third of the computation and hides the outgoing copies. The rest hides the returning copies."""
    assert exposed_copies(1.0, 3.0) == 0
    assert exposed_copies(1.5, 3.0) == pytest.approx(0.5)
    assert exposed_copies(3.0, 3.0) == pytest.approx(2 + 1)


@pytest.mark.longer
def test_the_plan_tells_what_the_link_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--model-type gpt2 --num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --device cuda"
    flags = f"--auto-strategy {sizes} --world-size 1 --micro-batch-size 8 --global-batch-size 8"
    flags += " --no-checkpoint-activations"
    (plain,) = planned(flags, 16)["layouts"]
    assert plain["memory_gb"]["host"] == 0
    seconds = []
    for link in ("100000", "10", "5"):
        monkeypatch.setenv("HOST_LINK_GBS", link)
        answer = planned(f"{flags} --offload-activations", 16)
        assert f"{float(link):g} GB/s to the host and back (HOST_LINK_GBS)" in answer["assumed"]
        assert not [unknown for unknown in answer["not_predicted"] if unknown["switch"] == "offload-activations"]
        (layout,) = answer["layouts"]
        assert layout["memory_gb"]["total"] < plain["memory_gb"]["total"]
        seconds.append(layout["step_seconds"])
    copies = layout["memory_gb"]["host"] * GB
    assert seconds[2] - seconds[1] == pytest.approx(2 * copies * (1 / 5 - 1 / 10) / GB, rel=1e-3)
    assert seconds[0] < seconds[1]
