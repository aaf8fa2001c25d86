"""Memory, random numbers and outputs of a divided model, in addition to following the whole model."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rapidformer_templates.engines.boxes import Index
from rapidformer_templates.errors import DataError
from tests.support.made import Made
from tests.support.parity import EXACT, assert_close, assert_follows, observed, reference
from tests.support.selection import by_default
from tests.support.tensor_jobs import HIDDEN, MODELS, VOCABULARY, Case, batch_of, build, divided, loss_of, shard_dims
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

TEMPERATURE = 0.5


def _shapes_in_a_step(case: Case, workers: Any) -> set[tuple[int, ...]]:
    model = build(case, workers)
    with Made() as seen:
        loss_of(case, model, batch_of()).backward()
    return seen.shapes


def _tied_and_sharded(workers: Any) -> dict[str, Any]:
    model: Any = build(Case("gpt2", 2), workers)
    plain = build(Case("gpt2"))
    whole = dict(plain.named_parameters())
    parts = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        for box in Index.of(parameter).boxes:
            torch.testing.assert_close(local[box.local], whole[name][box.whole], rtol=0, atol=0)
        parts[name] = (local.numel(), whole[name].numel())
    return {"tied": model.lm_head.weight is model.transformer.wte.weight, "parts": parts, "dims": shard_dims(plain)}


def _outputs(workers: Any) -> dict[str, Any]:
    """Compare evaluation, hidden states, operations on logits and generation of a divided and a whole model."""
    found: dict[str, Any] = {}
    for name, case in {"divided": Case("llama", 2, sequence=True), "whole": Case("llama")}.items():
        model: Any = build(case, workers if name == "divided" else None)
        batch = batch_of()
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        logits = model(**inputs).logits
        operations = {
            "temperature": nn.functional.cross_entropy(
                (logits / TEMPERATURE)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            ),
            "by_sample": nn.functional.cross_entropy(
                logits.reshape(-1, VOCABULARY), batch["labels"].flatten(), reduction="none"
            ),
            "transposed": nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"]),
            "likelihood": torch.log_softmax(logits, -1)[..., 3].mean(),
            "masked": logits[batch["attention_mask"].bool()].float().logsumexp(-1).sum(),
            "squares": (logits * logits).sum(),
        }
        sum(value.sum() for value in operations.values()).backward()
        gradient = model.lm_head.weight.grad
        found[name] = {key: value.detach() for key, value in operations.items()}
        found[name]["gradient"] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        hidden = model(**inputs, output_hidden_states=True).hidden_states
        found[name] |= {f"hidden {i}": value.detach() for i, value in enumerate(hidden)}
        model.eval()
        found[name]["evaluated"] = model(**inputs).logits.detach()
        found[name]["is plain"] = type(model(**inputs).logits) is torch.Tensor
        found[name]["generated"] = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False, use_cache=True)
    return found


def _masks(workers: Any, sequence: bool, checkpointed: bool) -> dict[str, Any]:
    """Return the dropout masks of two steps, of attention and of the rest, and the generator's state after them."""
    case = Case("gpt2", 2, dropout=0.3, sequence=sequence, checkpointed=checkpointed)
    model: Any = build(case, workers)
    model.config._attn_implementation = "eager"
    torch.manual_seed(1000)
    masks: dict[str, list[torch.Tensor]] = {"attention": [], "other": []}
    original = nn.functional.dropout

    def watched(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(x, *args, **kwargs)
        masks["attention" if x.ndim == 4 else "other"].append(out.detach().eq(0) & x.detach().ne(0))
        return out

    nn.functional.dropout = watched
    try:
        for _ in range(2):
            loss_of(case, model, batch_of()).backward()
    finally:
        nn.functional.dropout = original
    return {**masks, "state": torch.get_rng_state()}


def _beyond(workers: Any) -> dict[str, str]:
    """Return the errors of a divided model for tokens outside the vocabulary."""
    found = {}
    for token in (VOCABULARY, VOCABULARY + 900, -1):
        for key in ("input_ids", "labels"):
            batch = {name: tensor.clone() for name, tensor in batch_of().items()}
            batch[key][0, 3] = token
            with pytest.raises(DataError) as caught:
                build(Case("gpt2", 2), workers)(**batch)
            found[f"{key} {token}"] = caught.value.message
    return found


def _behave(workers: Any) -> dict[str, Any]:
    place = divided(workers, 2)
    return {
        "beyond": _beyond(place),
        "shapes": {
            (model, own): _shapes_in_a_step(Case(model, 2, own_loss=own), place)
            for model, own in (("llama", False), ("bert", True), ("t5", False))
        },
        "fused shapes": _shapes_in_a_step(Case("llama", 2, fused=True, tied=False), place),
        "shapes on shards": _shapes_in_a_step(Case("llama", 2, sequence=True), place),
        "tied": _tied_and_sharded(place),
        "outputs": _outputs(place),
        "masks": {
            (sequence, checkpointed): _masks(place, sequence, checkpointed)
            for sequence in (False, True)
            for checkpointed in (False, True)
        },
    }


@pytest.mark.longer
def test_tokens_beyond_the_vocabulary_are_errors(found: Any) -> None:
    for on_rank in found:
        for case, error in on_rank["beyond"].items():
            what = "target" if "labels" in case else "token of the input"
            assert error.startswith(f"a {what} is not one of the 67 tokens of the model"), case


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_in_workers(2, _behave)


def test_logits_never_exist_whole(found: Any) -> None:
    columns = {0: (VOCABULARY + 1) // 2, 1: VOCABULARY // 2}
    for rank, results in enumerate(found):
        for case, shapes in results["shapes"].items():
            wide = {shape for shape in shapes if shape and shape[-1] == VOCABULARY}
            assert not wide, case
            assert any(shape and shape[-1] == columns[rank] for shape in shapes), case


def test_fused_loss_has_its_own_words_of_a_few_rows(found: Any) -> None:
    """There are at least 22 rows. No logits have all words, and those of this worker's words have one chunk of rows."""
    columns = {0: (VOCABULARY + 1) // 2, 1: VOCABULARY // 2}
    for rank, results in enumerate(found):
        shapes = {shape for shape in results["fused shapes"] if len(shape) == 2}
        assert not {shape for shape in shapes if shape[-1] == VOCABULARY}
        rows = {shape[0] for shape in shapes if shape[-1] == columns[rank]} - {HIDDEN}  # weight's gradient, transposed
        assert max(rows) == 3


def test_the_watch_sees_whole_logits() -> None:
    with Made() as seen:
        case = Case("llama")
        loss_of(case, build(case), batch_of()).backward()
    assert any(shape[-1] == VOCABULARY for shape in seen.shapes if len(shape) > 1)


def test_every_parameter_is_the_share_that_its_plan_says(found: Any) -> None:
    for results in found:
        assert results["tied"]["tied"]
        for name, (held, whole) in results["tied"]["parts"].items():
            divided_by_plan = results["tied"]["dims"][name] is not None
            assert (held < 0.52 * whole) if divided_by_plan else held == whole, name


def test_outputs_are_those_of_the_whole_model(found: Any) -> None:
    for results in found:
        actual, expected = results["outputs"]["divided"], results["outputs"]["whole"]
        assert actual["is plain"]
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_sequence_shards_are_half_as_long(found: Any) -> None:
    length = batch_of()["input_ids"].shape[1]
    shapes = found[0]["shapes on shards"]
    assert (3, -(-length // 2), HIDDEN) in shapes


@pytest.mark.parametrize("checkpointed", [False, True])
def test_masks_differ_where_the_work_is_divided_and_agree_where_it_is_whole(found: Any, checkpointed: bool) -> None:
    ours, theirs = (results["masks"][False, checkpointed] for results in found)
    assert len(ours["attention"]) == len(theirs["attention"]) > 0
    assert not any(torch.equal(a, b) for a, b in zip(ours["attention"], theirs["attention"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours["other"], theirs["other"], strict=True))
    share = torch.cat([mask.flatten() for mask in ours["other"]]).float().mean()
    assert 0.25 < float(share) < 0.35


def test_masks_of_sequence_shards_differ(found: Any) -> None:
    ours, theirs = (results["masks"][True, False]["other"] for results in found)
    equal = [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert sum(equal) == 2, "of each of two forwards, the dropout of the embeddings alone is whole"


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_computed_again_draws_its_masks_again(found: Any, sequence: bool) -> None:
    for results in found:
        once, twice = (results["masks"][sequence, checkpointed] for checkpointed in (False, True))
        before, again = (masks["attention"] + masks["other"] for masks in (once, twice))
        assert len(again) > len(before)
        assert all(any(torch.equal(a, b) for b in before if a.shape == b.shape) for a in again)
        assert torch.equal(once["state"], twice["state"])


def test_generators_are_equal_after_a_step(found: Any) -> None:
    for key in found[0]["masks"]:
        assert torch.equal(*(results["masks"][key]["state"] for results in found))


# Training: every architecture with a plan, on two and four workers.

STEPS = "--train-iters 3 --eval-interval 2 --global-batch-size 8 --micro-batch-size 4 --clip-grad 0.1 --no-export-model"
SEQUENCE, AGAIN, FUSED = "--sequence-parallel", "--checkpoint-activations", "--fused-linear-cross-entropy"
ALL = f"{SEQUENCE} {AGAIN}"
CASES = [  # (workers, model, double precision, flags). In fp32, the model computes the loss from the labels
    *((2, f"{model}-tied", True, "") for model in ("llama", "gpt_neox", "gpt2", "bert", "t5")),
    *((2, f"{model}-untied", True, ALL) for model in MODELS),
    *((2, f"{model}-tied", False, SEQUENCE) for model in ("llama", "bert")),
    *((2, f"{model}-tied", True, FUSED) for model in ("gpt2", "bert", "t5")),
    (2, "llama-untied", True, f"{ALL} {FUSED}"),
    (2, "roberta-untied", False, f"{ALL} {FUSED}"),
    (2, "own-tied", True, AGAIN),
    (4, "gpt2-tied", True, SEQUENCE),
    (4, "gpt2-tied", True, f"{SEQUENCE} {FUSED}"),
    (4, "llama-untied", False, ""),
]
SHORT = [(2, "llama-untied", True, ALL), (2, "bert-tied", False, SEQUENCE)]
"""Cases that run by default: a decoder with every switch, and an encoder that computes its loss itself."""
BF16 = [("llama-tied", SEQUENCE), ("bert-tied", ""), ("llama-tied", f"{SEQUENCE} {FUSED}")]


@pytest.mark.parametrize(("workers", "model", "double", "flags"), by_default(SHORT, CASES))
def test_it_follows_one_worker(workers: int, model: str, double: bool, flags: str) -> None:
    expected = reference(f"tensor-{model}", double, STEPS)
    found = observed(workers, f"tensor-{model}", double, f"{STEPS} --tensor-model-parallel-size {workers} {flags}")
    # The router of Mixtral computes in fp32, independent of the model's type.
    exact = double and not model.startswith("mixtral")
    assert_follows(found[0], expected, *(EXACT if exact else ()), weights=None if exact else (0, 1e-5))
    losses, norms = zip(*expected["curve"], strict=True)
    assert len(set(losses)) == 3
    assert max(norms) > 0.15  # so that clipping has an effect


@pytest.mark.longer
@pytest.mark.parametrize(("model", "flags"), BF16)
def test_bf16_follows_one_worker_within_its_rounding(model: str, flags: str) -> None:
    words = f"{STEPS} --mixed-precision bf16"
    found = observed(2, f"tensor-{model}", False, f"{words} --tensor-model-parallel-size 2 {flags}")[0]["curve"]
    expected = reference(f"tensor-{model}", False, words)["curve"]
    for column, rtol in enumerate((5e-3, 3e-2)):  # of the losses and of the norms
        assert_close([step[column] for step in found], [step[column] for step in expected], rtol, 0)
