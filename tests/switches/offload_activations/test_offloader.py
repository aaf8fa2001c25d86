"""The tensors that go to the host and come back, and when: bits and bytes of models with and without offload."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.stand_in_host import ROOM, StandInHost
from rapidformer_templates.engines.forwards import Checkpointed, preserve_state
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from rapidformer_templates.switches.offload_activations import transform as room
from rapidformer_templates.switches.offload_activations.transform import Offloader, offload_blocks
from tests.support.model_shapes import MODELS, TOKENS

CPU = torch.device("cpu")
BLOCKS = 4


@pytest.fixture(autouse=True)
def _small_storages_go() -> Iterator[None]:
    with mock.patch(f"{ROOM}.transform.MIN_BYTES", 1024):
        yield


def offloaded(blocks: list[nn.Module]) -> tuple[Offloader, StandInHost]:
    memory = StandInHost()
    offloader = Offloader(memory, CPU)
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
    memory = room.PinnedMemory(CPU)
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
