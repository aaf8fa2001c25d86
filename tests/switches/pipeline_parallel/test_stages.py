"""Stages have the lowest cost, and schedules make every pass once, cannot deadlock, and equal torch's."""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops, _get_warmup_ops

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.layout.pipeline import StageRunner, cut_into_stages
from rapidformer_templates.switches.layout.schedule import Action, Kind, compute_schedule, with_transfers
from rapidformer_templates.system.workers import Workers
from tests.support.architectures import tiny
from tests.support.messages import Says

COSTS = st.integers(0, 6)


@settings(deadline=None)
@given(front=COSTS, blocks=st.lists(st.integers(1, 5), min_size=1, max_size=7), back=COSTS, data=st.data())
def test_a_cut_is_the_best_of_all_cuts(front: int, blocks: list[int], back: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(blocks)))

    def costs(sizes: tuple[int, ...]) -> tuple[int, int]:
        edges = [0, *itertools.accumulate(sizes)]
        each = [sum(blocks[a:b]) for a, b in itertools.pairwise(edges)]
        each[0], each[-1] = each[0] + front, each[-1] + back
        return max(each), sum(cost**2 for cost in each)

    borders = itertools.combinations(range(1, len(blocks)), stages - 1)
    every = (tuple(b - a for a, b in itertools.pairwise((0, *cuts, len(blocks)))) for cuts in borders)
    found = tuple(balanced_cut(front, blocks, back, stages))
    assert sum(found) == len(blocks)
    assert costs(found) == min(costs(sizes) for sizes in every)


SCHEDULES = [(w, v, m) for w in range(1, 6) for v in range(1, 4) for m in range(1, 11) if w > 1 or v == 1]


@pytest.mark.parametrize("workers", range(1, 6))
def test_every_pass_is_made_once_and_after_what_it_needs(workers: int) -> None:
    """Simulate workers that stop at any action whose inputs are missing, and at a receive of something not yet sent.

    A worker also stops at a transfer until the neighbour has received the previous one in the same direction.
    """
    for _, per_worker, microbatches in (sizes for sizes in SCHEDULES if sizes[0] == workers):
        lists = [list(own) for own in with_transfers(workers, per_worker, microbatches)]
        last, sent, done = workers * per_worker - 1, set(), []
        on_their_way = OnTheirWay(workers, 1)
        while any(lists):
            moved = False
            for own in lists:
                while own and _may_be_done(own[0], sent, done, last) and on_their_way.room(own[0]):
                    action = own.pop(0)
                    on_their_way.see(action)
                    if action.kind is Kind.SEND_FORWARD:
                        sent.add((Kind.RECEIVE_FORWARD, action.stage + 1, action.microbatch))
                    elif action.kind is Kind.SEND_BACKWARD:
                        sent.add((Kind.RECEIVE_BACKWARD, action.stage - 1, action.microbatch))
                    else:
                        done.append(action)
                    moved = True
            assert moved, (workers, per_worker, microbatches)
        passes = [action for action in done if action.kind in (Kind.FORWARD, Kind.BACKWARD)]
        assert len(passes) == len(set(passes)) == 2 * (last + 1) * microbatches


class OnTheirWay:
    """Transfers that each worker has sent in each direction and that its neighbour has not begun to receive."""

    def __init__(self, workers: int, limit: int) -> None:
        self.workers, self.limit = workers, limit
        self._sent: dict[tuple[int, bool], list[Action]] = defaultdict(list)
        self._taken: set[Action] = set()

    def room(self, action: Action) -> bool:
        """Return whether a worker can continue with this action without waiting."""
        before = self._sent[action.stage % self.workers, action.kind is Kind.SEND_FORWARD]
        is_transfer = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        return not is_transfer or len(before) < self.limit or before[-self.limit] in self._taken

    def see(self, action: Action) -> None:
        """Record an action that is done."""
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self._sent[action.stage % self.workers, action.kind is Kind.SEND_FORWARD].append(action)
        elif action.kind is Kind.RECEIVE_FORWARD:
            self._taken.add(Action(Kind.SEND_FORWARD, action.stage - 1, action.microbatch))
        elif action.kind is Kind.RECEIVE_BACKWARD:
            self._taken.add(Action(Kind.SEND_BACKWARD, action.stage + 1, action.microbatch))


def _may_be_done(action: Action, sent: set[object], done: list[Action], last: int) -> bool:
    kind, stage, number = action
    if kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
        return (kind, stage, number) in sent
    if kind is Kind.FORWARD:
        return stage == 0 or Action(Kind.RECEIVE_FORWARD, stage, number) in done
    if kind is Kind.BACKWARD:
        own = Action(Kind.FORWARD, stage, number) in done
        return own and (stage == last or Action(Kind.RECEIVE_BACKWARD, stage, number) in done)
    return Action(Kind.FORWARD if kind is Kind.SEND_FORWARD else Kind.BACKWARD, stage, number) in done


@pytest.mark.parametrize("workers", range(2, 6))
def test_two_workers_name_their_transfers_in_one_order(workers: int) -> None:
    """Over a link that carries one transfer at a time, another order would deadlock."""
    for _, per_worker, microbatches in (sizes for sizes in SCHEDULES if sizes[0] == workers):
        lists = with_transfers(workers, per_worker, microbatches)
        for a, b in itertools.combinations(range(workers), 2):
            assert list(_between(lists[a], b, workers)) == list(_between(lists[b], a, workers))


def _between(actions: Sequence[Action], peer: int, workers: int) -> list[tuple[str, int, int]]:
    found = []
    for kind, stage, number in actions:
        direction = 1 if kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
        if kind not in (Kind.FORWARD, Kind.BACKWARD) and (stage + direction) % workers == peer:
            sender = stage if kind.value.startswith("send") else stage + direction
            found.append((kind.value[-1], sender, number))
    return found


@pytest.mark.parametrize(
    ("workers", "per_worker", "microbatches"),
    [(2, 1, 4), (4, 1, 8), (4, 1, 4), (2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 3)],
)
def test_orders_are_those_of_torch(workers: int, per_worker: int, microbatches: int) -> None:
    rounds = max(1, microbatches // workers)
    size = microbatches // rounds
    for rank in range(workers):
        warmup = _get_warmup_ops(rank, per_worker, size, workers, microbatches, 1 if per_worker == 1 else 2)
        in_all = per_worker * microbatches
        theirs = _get_1f1b_rank_ops(
            per_worker,
            workers,
            warmup,
            in_all - warmup,
            warmup,
            rank,
            lambda step, rank=rank: (step // size) % per_worker * workers + rank,
            lambda step, rank=rank, warmup=warmup: (
                (per_worker - 1 - ((step - warmup) // size) % per_worker) * workers + rank
            ),
        )
        expected = [(str(a.computation_type.value), a.stage_index, a.microbatch_index) for a in theirs if a]
        ours = compute_schedule(workers, rank, per_worker, microbatches)
        assert [(a.kind.value, a.stage, a.microbatch) for a in ours] == expected


# The stages of a model, run in turn in one process, equal the model.

V = 64
SIZES = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | float = 0.0) -> torch.Tensor:
        return x + self.linear(x + beside).tanh()


class Own(nn.Module):
    """A model from no library, with its own parameters next to the blocks and one that nothing uses."""

    def __init__(self, way: str = "straight") -> None:
        super().__init__()
        self.way = way
        self.head = nn.Linear(8, V)  # named before the blocks, called after them
        self.embedding = nn.Embedding(V, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.spare = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        embedded = self.embedding(input_ids)
        x = embedded * self.scale
        for block in self.blocks:
            x = block(x, embedded) if self.way == "beside" else block(x)
            x = x * 1.5 if self.way == "between" else x
        if self.way == "around":
            x = x + embedded
        return SimpleNamespace(logits=self.head(x * self.scale), loss=None)


MASKED = transformers.AutoModelForMaskedLM
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c"]}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tiny("gpt2", blocks=4, may_skip=False),
    "bert": lambda: tiny("bert", MASKED, blocks=4, may_skip=False),
    "gemma": lambda: tiny("gemma", blocks=4, may_skip=False),  # its head is tied to its embedding
    "bloom": lambda: tiny("bloom", blocks=4, may_skip=False),  # its blocks also return attention weights
    "opt": lambda: tiny("opt", blocks=4, may_skip=False),  # names its final norm before its blocks
    "deberta": lambda: transformers.DebertaV2ForMaskedLM(  # gives every block an embedding of relative positions
        transformers.DebertaV2Config(**SIZES, **NO_DROPOUT, **RELATIVE, intermediate_size=32)
    ),
    "own": Own,
    "own-around": lambda: Own("around"),
    "own-beside": lambda: Own("beside"),
}


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def _loss(model: nn.Module) -> torch.Tensor:
    batch = _batch()
    output = model(**batch)
    if output.loss is not None:
        return output.loss
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())


def _cut(model: nn.Module, rank: int, loss: Any = _loss, *, workers: int = 2, **options: Any) -> Assembly:
    worker = Workers(rank, rank, workers, torch.device("cpu"), pipeline=workers)
    flags = SimpleNamespace(**{"virtual_pipeline_size": 1, "pipeline_stages": None, **options})
    assembly = Assembly(model)
    cut_into_stages(assembly, Building(flags, Plan("Trainer"), worker, loss))
    return assembly


@pytest.mark.parametrize(
    "options", [{}, {"virtual_pipeline_size": 2}, {"pipeline_stages": "3,1"}], ids=["1f1b", "interleaved", "uneven"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_the_stages_are_the_model(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    whole = MODELS[kind]().train()
    if hasattr(whole, "config"):
        whole.config.use_cache = False
    stages = [_cut(copy.deepcopy(whole), rank, **options) for rank in range(2)]
    expected = _loss(whole)
    expected.backward()

    passages = [StageRunner(stage, begins=rank == 0, ends=rank == 1) for rank, stage in enumerate(stages)]
    chain: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    hidden = None
    for number in range(2 * options.get("virtual_pipeline_size", 1)):
        given = None if hidden is None else hidden.detach().requires_grad_()
        hidden = passages[number % 2].run(number // 2, given, lambda model=stages[number % 2].model: _loss(model))
        chain.append((given, hidden))
    gradient = None
    for given, output in reversed(chain):
        output.backward(gradient)
        gradient = None if given is None else given.grad

    torch.testing.assert_close(chain[-1][1], expected, rtol=0, atol=0)
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                name = stage.placement.whole_name(name)
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_heavy_head_leaves_its_stage_fewer_blocks() -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=900, n_embd=16, n_layer=8, n_head=2, tie_word_embeddings=False)
    )
    sizes = [len(_cut(copy.deepcopy(model), rank, workers=4).blocks) for rank in range(4)]
    assert sum(sizes) == 8
    assert sizes[0] < sizes[1]
    assert sizes[3] < sizes[2]


def test_hidden_states_have_the_places_that_they_have_in_the_whole_model() -> None:
    whole = MODELS["gemma"]().eval()
    batch = _batch()
    expected = whole(**batch, output_hidden_states=True).hidden_states
    seen: list[Any] = []

    def loss(model: nn.Module) -> torch.Tensor:
        output = model(**batch, output_hidden_states=True)
        seen.append(output.hidden_states)
        return output.loss + output.hidden_states[-1].square().mean()

    first, last = (_cut(copy.deepcopy(whole), rank, loss) for rank in range(2))
    seen.clear()
    hidden = StageRunner(first, begins=True, ends=False).run(0, None, lambda: loss(first.model))
    StageRunner(last, begins=False, ends=True).run(0, hidden, lambda: loss(last.model))
    assert [state is None for state in seen[0]] == [True, True, False, False, False]
    for mine, theirs in zip(seen[0][2:], expected[2:], strict=True):
        torch.testing.assert_close(mine, theirs)


def _with_router_losses() -> nn.Module:
    model: Any = tiny("mixtral", blocks=4, may_skip=False)
    model.config.output_router_logits = True
    return model


T5 = transformers.T5Config(
    vocab_size=V, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
)
REFUSED: dict[str, Callable[[], object]] = {
    "no blocks": lambda: _cut(nn.Linear(4, 4), 0),
    "one shared block": lambda: _cut(tiny("albert", MASKED, may_skip=False), 0),
    "4 blocks for 3 workers": lambda: _cut(MODELS["gpt2"](), 0, workers=3),
    "no room for the head": lambda: _cut(MODELS["gpt2"](), 0, workers=4),
    "too many blocks": lambda: _cut(MODELS["gpt2"](), 0, pipeline_stages="3,2"),
    "encoder and decoder": lambda: _cut(transformers.T5ForConditionalGeneration(T5), 0),
    "stacks of several kinds": lambda: _cut(tiny("bart", transformers.AutoModelForSeq2SeqLM, may_skip=False), 0),
    "something between the blocks": lambda: _cut(Own("between"), 0),
    # The balancing loss of experts is a mean over all blocks, but a stage has only some of them.
    "a loss of what blocks keep aside": lambda: _cut(_with_router_losses(), 0),
    "two calls": lambda: _cut(MODELS["gpt2"](), 0, lambda model: _loss(model) + _loss(model)),
    "no call": lambda: _cut(MODELS["gpt2"](), 0, lambda model: torch.ones((), requires_grad=True)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(name: str, says: Says) -> None:
    with says(RapidformerError):
        REFUSED[name]()


def test_a_hook_that_calls_the_model_twice_later_on(says: Says) -> None:
    """The first sample need not show it."""
    last = _cut(MODELS["gpt2"](), 1)
    hidden = torch.zeros(3, 7, 32)
    with says(RapidformerError):
        StageRunner(last, begins=False, ends=True).run(0, hidden, lambda: _loss(last.model) + _loss(last.model))
