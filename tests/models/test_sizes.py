"""Frequencies by the length of a run's rows, the width of a model, and operations that keep whole rows of logits.

Models with LongRoPE or dynamic scaling compute each row as if it were alone.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer_templates import Trainer, compose
from rapidformer_templates.errors import ConfigError, ModelError
from rapidformer_templates.models.architectures import choose_frequencies, notes_about_frequencies
from rapidformer_templates.models.blocks import find_blocks, width_of
from rapidformer_templates.models.divided_tensor import flattens_rows, rows_of_view, selects_rows
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.parity import trained

LIMIT, LENGTH = 16, 40
"""Tokens above which the tiny models have other frequencies, and those of the longest row."""
SIZES = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHORT, LONG = [1.0] * 4, [2.0, 3.0, 4.0, 5.0]


def longrope(short: list[float], long: list[float]) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 1e4,
        "original_max_position_embeddings": LIMIT,
    }  # fmt: skip


def phi3(short: list[float] = SHORT, long: list[float] = LONG) -> Phi3ForCausalLM:
    torch.manual_seed(0)
    return Phi3ForCausalLM(
        Phi3Config(**SIZES, original_max_position_embeddings=LIMIT, rope_parameters=longrope(short, long))
    )


def phimoe(short: list[float] = SHORT, long: list[float] = LONG, scales: tuple[float, float] = (1.0, 1.3)) -> Any:
    torch.manual_seed(0)
    rope = {**longrope(short, long), "short_mscale": scales[0], "long_mscale": scales[1]}
    return PhimoeForCausalLM(PhimoeConfig(**SIZES, num_local_experts=2, rope_parameters=rope))


def dynamic(positions: int = LIMIT) -> LlamaForCausalLM:
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": positions}, rope_parameters=rope))


class Phi3Job(CausalJob):
    def make(self) -> torch.nn.Module:
        return phi3()


class LongJob(CausalJob):
    """The reference: the same model, in which short rows have the frequencies of long ones."""

    def make(self) -> torch.nn.Module:
        return phi3(LONG, LONG)


FLAGS = ["--train-iters", "2", "--global-batch-size", "8", "--lr", "1e-3", "--no-export-model", "--device", "cpu"]


def curve(job: type[Trainer], *flags: str) -> torch.Tensor:
    return torch.tensor(trained(job([*FLAGS, *flags]))["curve"])


@pytest.mark.parametrize("micro_batch", ["8", "1"])
def test_the_loss_does_not_depend_on_the_micro_batch(micro_batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = curve(Phi3Job, "--micro-batch-size", micro_batch, "--seq-length", str(LENGTH))
    wanted = curve(LongJob, "--micro-batch-size", "8", "--seq-length", str(LENGTH))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert f"with --seq-length {LENGTH}, all rows have the rotary frequencies" in capsys.readouterr().err


def test_a_run_of_an_unknown_length_is_refused(says: Says) -> None:
    with says(ModelError):
        trained(Phi3Job([*FLAGS, "--micro-batch-size", "8"]))


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (phi3, lambda: phi3(LONG, LONG)),
        # phimoe always has the frequencies of short rows, and scales them by the longest row.
        (phimoe, lambda: phimoe(scales=(1.3, 1.3))),
    ],
)
def test_short_rows_have_the_frequencies_of_long_ones(made: Any, wanted: Any) -> None:
    ids = torch.arange(3, 3 + LIMIT - 4)[None]
    model, other = made().eval(), wanted().eval()
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-5)
        choose_frequencies(model, LENGTH)
        choose_frequencies(model, LENGTH)
        torch.testing.assert_close(model(ids).logits, other(ids).logits)
    assert notes_about_frequencies(model)


def test_rows_up_to_the_limit_keep_the_frequencies_of_short_ones() -> None:
    ids = torch.arange(3, 3 + LIMIT - 4)[None]
    model, plain = phi3().eval(), phi3().eval()
    choose_frequencies(model, LIMIT)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert not notes_about_frequencies(model)


def test_dynamic_scaling_does_not_remember_longer_rows() -> None:
    row, longer = torch.arange(3, 3 + LIMIT)[None], torch.arange(3, 3 + LENGTH)[None]
    model = dynamic().eval()
    choose_frequencies(model, LENGTH)
    scaled = dynamic().eval()
    with torch.no_grad():
        first = model(row).logits
        model(longer)
        torch.testing.assert_close(model(row).logits, first)
        scaled(longer)  # transformers keeps these frequencies for a row of exactly the limit
        torch.testing.assert_close(scaled(row).logits, first)


def test_a_dynamic_model_needs_no_length() -> None:
    model = dynamic()
    choose_frequencies(model, None)
    assert not notes_about_frequencies(model)


def test_a_session_takes_the_length_of_its_rows_for_such_a_model_only(says: Says) -> None:
    with says(ModelError):
        compose(phi3, lr=1e-3, device="cpu")
    with compose(phi3, lr=1e-3, device="cpu", seq_length=LENGTH) as session:
        assert notes_about_frequencies(session.model)
    with pytest.raises(ConfigError, match="error: seq_length acts on"):
        compose(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), lr=1e-3, device="cpu", seq_length=LENGTH)


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 2, "vocab_size": 99},
    "llama": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    "bert": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    "t5": {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 2, "vocab_size": 99},
    "mixtral": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 99},
    "vit": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
}  # fmt: skip


def _model(kind: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModel.from_config(AutoConfig.for_model(kind, **SMALL[kind]))
    return model


@pytest.mark.parametrize("kind", SMALL)
def test_the_matrices_tell_the_width_that_the_configuration_states(kind: str) -> None:
    model = _model(kind)
    assert width_of(model) == 48
    bare = nn.ModuleList(model.children())
    assert not hasattr(bare, "config")
    assert width_of(bare) == 48


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (SimpleNamespace(hidden_size=7), 7),
        (SimpleNamespace(hidden_sizes=[5, 9, 6]), 9),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=8)), 8),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=(3, 4))), 4),
        (SimpleNamespace(hidden_size=None), 30),
        ({"hidden_size": 7}, 30),
    ],
)
def test_a_configuration_is_read_as_transformers_reads_it(config: Any, width: int) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40), nn.Linear(20, 50))
    model.config = config
    assert width_of(model) == width  # the matrices with size 30 have 1,800 elements, those with size 20 have 1,600


def test_of_two_sizes_the_smaller_one_and_without_a_matrix_one() -> None:
    assert width_of(nn.Linear(30, 20)) == 20
    assert width_of(nn.Conv2d(3, 8, 5)) == 1
    assert width_of(nn.Sequential(nn.Conv2d(3, 8, 5), nn.Linear(8, 10))) == 8


SHAPE, WIDTH = (4, 6, 5), 7
"""Logits of 5 words, whose rows are computed from 7 hidden features. No size is a multiple of another one."""
WHOLE = torch.arange(4 * 6 * 5).view(SHAPE)
ROWS = torch.arange(4 * 6)
HIDDEN = ROWS.view(4, 6, 1).expand(4, 6, WIDTH).contiguous()


def assert_same_rows(logits: torch.Tensor, hidden: torch.Tensor) -> None:
    assert logits.shape[:-1] == hidden.shape[:-1]
    assert torch.equal(logits[..., 0] // 5, hidden[..., 0])


@pytest.mark.parametrize("sizes", [(24, 5), (-1, 5), (24, -1), (4, 3, 2, 5), (2, 12, -1), (2, -1, 5)])
def test_views_of_whole_rows(sizes: tuple[int, ...]) -> None:
    rows = rows_of_view(sizes, SHAPE)
    assert rows is not None
    assert_same_rows(WHOLE.view(sizes), HIDDEN.view(*rows, WIDTH))


@pytest.mark.parametrize("sizes", [(120,), (-1,), (5, 24), (12, 10), (4, 30), (0, -1), ()])
def test_views_that_cut_rows(sizes: tuple[int, ...]) -> None:
    assert rows_of_view(sizes, SHAPE) is None


def test_flattening() -> None:
    for start, end in itertools.product(range(-3, 3), repeat=2):
        if start % 3 > end % 3:
            continue
        flat = WHOLE.flatten(start, end)
        assert flattens_rows(3, start, end) == (flat.shape[-1] == SHAPE[-1]), (start, end)
        if flattens_rows(3, start, end):
            assert_same_rows(flat, HIDDEN.flatten(start, end))


MASK = torch.tensor([True, False, True, True])
ENTRIES = (0, slice(None), slice(1, None), slice(None, -1), ..., None, MASK[:4], torch.tensor([2, 0]))


def test_every_index_of_a_few_entries() -> None:
    taken = 0
    for length in (1, 2, 3, 4):
        for index in itertools.product(ENTRIES, repeat=length):
            taken += _index(index)
    for index in ENTRIES:
        taken += _index(index)
    assert taken > 100


def _index(index: Any) -> bool:
    try:
        logits = WHOLE[index]
    except (IndexError, RuntimeError):
        return False
    if not selects_rows(index, 3):
        return False
    assert_same_rows(logits, HIDDEN[index])
    assert logits.shape[-1] == SHAPE[-1]
    return True


def test_blocks_are_found_behind_the_class_names_of_fsdp() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=3, num_heads=2))
    found = find_blocks(model)
    assert len(found) == 6
    for block in found.values():
        block.__class__ = type(f"FSDP{type(block).__name__}", (type(block),), {})
    assert list(find_blocks(model)) == list(found)
