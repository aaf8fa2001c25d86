"""NEFTune: which noise is added where. Micro batches and resumes do not change it.

``test_features_of_a_step.py`` has the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import T5Config, T5ForConditionalGeneration
from transformers.integrations.neftune import activate_neftune

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.current_batch import add_noise, keys_of, rows_of, uniform
from rapidformer_templates.errors import ModelError
from tests.support.jobs import VOCABULARY, DeepJob
from tests.support.parity import Trained, assert_follows, trained
from tests.support.requests import codes

SEED, ALPHA = 1234, 20.0
STEPS = (
    f"--train-iters 4 --global-batch-size 8 --clip-grad 0.5 --log-interval 1 --no-export-model --lr 1e-3 --seed {SEED}"
)
ON = f"--neftune-alpha {ALPHA}"


def run(flags: str) -> Trained:
    return trained(DeepJob(f"{STEPS} {flags}".split()))


def numpys(place: int, tokens: int, features: int) -> np.ndarray:
    """Compute the random numbers of a sample with numpy's unsigned arithmetic."""

    def mixed(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    first, second = np.random.SeedSequence((SEED, 9, place)).generate_state(2)
    bits = mixed(mixed(np.arange(tokens * features, dtype=np.uint32) + first) ^ second)
    return ((((bits >> np.uint32(9)) + 0.5) / 2**22) - 1).reshape(tokens, features)


def test_the_numbers_are_those_of_the_hash_and_padding_has_none() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    found = uniform(keys_of([7, 7, 8, -1], SEED), mask, 16)
    assert torch.equal(found[0, :3], found[1, 1:]), "padding on the other side"
    np.testing.assert_allclose(found[0, :3], numpys(7, 3, 16), atol=1e-7)
    np.testing.assert_allclose(found[2], numpys(8, 4, 16), atol=1e-7)
    assert not found[0, 3].any()
    assert not found[1, 0].any()
    assert not found[3].any()


def test_they_are_evenly_spread_and_tell_nothing_of_each_other() -> None:
    numbers = uniform(keys_of(range(64), SEED), torch.ones(64, 128), 64).double()
    assert stats.kstest(numbers.flatten().numpy(), "uniform", args=(-1, 2)).pvalue > 1e-3
    deviation = numbers.numel() ** -0.5 / 3  # standard deviation of a mean of products of two such numbers
    for dimension in range(3):
        shifted = numbers.roll(1, dimension)
        assert abs(float((numbers * shifted).mean())) < 4 * deviation
    bits = ((numbers + 1) / 2 * 2**23).long()
    for bit in range(23):
        assert abs(float((bits >> bit & 1).double().mean()) - 0.5) < 4 * numbers.numel() ** -0.5


def noise_of(model: Any, ids: torch.Tensor, positions: Sequence[int] | None, mask: torch.Tensor | None = None) -> Any:
    """Return what a training forward adds to the embeddings."""
    seen: list[torch.Tensor] = []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    batch = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    if positions is None:
        model(**batch)
    else:
        with rows_of(MicroBatch(batch, list(positions), positions=positions), batch):
            model(**batch)
    hook.remove()
    return seen[0] - embeddings.weight[ids].detach()


def test_without_padding_it_is_of_the_size_of_transformers() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (16, 32))
    theirs, ours = DeepJob(["--no-save"]).make().train(), DeepJob(["--no-save"]).make().train()
    activate_neftune(theirs, ALPHA)
    add_noise(ours, ALPHA, SEED)
    wanted, found = noise_of(theirs, ids, None), noise_of(ours, ids, range(16))
    reach = ALPHA / (32 * 16) ** 0.5
    for noise in (wanted, found):
        assert 0.999 * reach < float(noise.abs().max()) <= reach * 1.001
    assert float(found.var()) == pytest.approx(float(wanted.var()), rel=0.05)
    np.testing.assert_allclose(found[3], reach * numpys(3, 32, 16), atol=1e-6)


def test_evaluations_and_other_forwards_have_none() -> None:
    model = DeepJob(["--no-save"]).make()
    add_noise(model, ALPHA, SEED)
    ids = torch.arange(12).view(2, 6)
    assert noise_of(model.train(), ids, [0, 1]).any()
    assert not noise_of(model, ids, None).any()
    assert not noise_of(model.eval(), ids, [0, 1]).any()


def test_a_sample_has_the_same_noise_in_any_micro_batch() -> None:
    model = DeepJob(["--no-save"]).make().train()
    add_noise(model, ALPHA, SEED)
    ids = torch.arange(4)[None]
    short = noise_of(model, ids, [5], torch.ones(1, 4, dtype=torch.long))
    padded = torch.cat([torch.nn.functional.pad(ids, (0, 6)), torch.arange(10)[None]])
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 4:] = 0
    long = noise_of(model, padded, [5, 6], mask)
    assert torch.allclose(short[0], long[0, :4], atol=1e-6)
    assert not torch.allclose(short[0], noise_of(model, ids, [6])[0])


@pytest.fixture(scope="module")
def alone() -> Trained:
    return run(f"--micro-batch-size 8 {ON}")


@pytest.mark.slow
def test_the_first_loss_is_that_of_noise_by_hand(alone: Trained) -> None:
    """A job that passes noisy embeddings to its model, row by row, with numpy's numbers."""

    class ByHand(DeepJob):
        positions = 0

        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            if not torch.is_grad_enabled():
                return super().compute_loss(model, batch)
            embeddings = self.model.get_input_embeddings()(batch["input_ids"])
            noise = torch.zeros_like(embeddings)
            for row, tokens in enumerate(batch["attention_mask"].sum(1).tolist()):
                reach = ALPHA / (tokens * 16) ** 0.5
                noise[row, :tokens] = torch.from_numpy(reach * numpys(self.positions, tokens, 16)).float()
                self.positions += 1
            mask, labels = batch["attention_mask"], batch["labels"]
            return model(inputs_embeds=embeddings + noise, attention_mask=mask, labels=labels).loss

    wanted = trained(ByHand(f"{STEPS} --micro-batch-size 8".split()))
    assert_follows(alone, wanted, weights=(1e-4, 1e-5))


@pytest.mark.slow
def test_it_changes_the_losses_and_not_the_other_random_numbers(alone: Trained) -> None:
    plain = run("--micro-batch-size 8")
    assert plain["curve"][0][1] > 1.5 * alone["curve"][0][1], "the norm of the gradient"
    zero = run("--micro-batch-size 8 --neftune-alpha 0")
    assert zero["curve"] == plain["curve"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 1 --checkpoint-activations",
        "--micro-batch-size 4 --fused-linear-cross-entropy",
        pytest.param("--micro-batch-size 4 --torch-compile aot_eager", marks=pytest.mark.longer),
    ],
)
def test_micro_batches_and_switches_do_not_change_it(flags: str, alone: Trained) -> None:
    assert_follows(run(f"{flags} {ON}"), alone, weights=(1e-4, 1e-5))


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_whole_one(alone: Trained, tmp_path: Path) -> None:
    job = DeepJob([*f"{STEPS} --micro-batch-size 8 {ON} --save-interval 2 --save {tmp_path}".split()])
    counts = job.on_step_end

    def dies(step: int, result: Any) -> None:
        counts(step, result)
        if step == 3:
            raise InterruptedError

    job.on_step_end = dies  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        job.fit()
    resumed = DeepJob([*f"{STEPS} --micro-batch-size 8 {ON} --save {tmp_path} --resume".split()])
    resumed.fit()
    assert resumed.curve == alone["curve"][2:]


def test_encoder_decoders_are_refused() -> None:
    assert codes("--task seq2seq_lm --neftune-alpha 5") == ["RF113"]
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is not a transformers model that reads one"):
        add_noise(T5ForConditionalGeneration(T5Config(**sizes)), ALPHA, SEED)


def test_a_model_that_is_given_no_ids_is_told() -> None:
    model = DeepJob(["--no-save"]).make().train()
    add_noise(model, ALPHA, SEED)
    embeds = torch.zeros(1, 3, 16)
    batch = {"inputs_embeds": embeds}
    with (
        rows_of(MicroBatch(batch, [0], positions=[0]), batch),
        pytest.raises(ModelError, match="does not call its input"),
    ):
        model(**batch)
