"""Sentence pairs and their loss, compared with a plain loop over sentences and with transformers' own losses."""

import math
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AlbertConfig, AlbertForPreTraining, BertConfig, BertForPreTraining, BertTokenizer

from rapidformer_templates.data.collate import IGNORED, PadCollate
from rapidformer_templates.data.indexed.corpora import IndexCache
from rapidformer_templates.data.order import Stream
from rapidformer_templates.data.pretraining import samples as sentence_pairs
from rapidformer_templates.data.pretraining.masking import MaskTokens
from rapidformer_templates.data.pretraining.samples import _truncate_at_random, build_chunks
from rapidformer_templates.data.tasks.pretraining import pair_loss
from rapidformer_templates.errors import DataError, RapidformerError
from rapidformer_templates.models.architectures import pair_label_of
from tests.support.messages import Says
from tests.support.sentence_pairs import CLS, FEW, FIRST, SEP, WORDS, Corpus, make, some_corpus, tokenizer_of, write


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    """Build a tokenizer with a small vocabulary, for a small corpus."""
    return tokenizer_of(FEW)


@pytest.fixture(scope="module")
def no_mask() -> MaskTokens:
    return MaskTokens(tokenizer_of(WORDS), 0.0)


CORPORA = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=2, max_size=8).filter(
    lambda corpus: any(len(document) > 1 for document in corpus)
)


def slow_chunks(corpus: Corpus, targets: Callable[[int], int]) -> list[tuple[int, int, int]]:
    """Gather sentence after sentence, as the papers' scripts do. ``targets`` is called for each first sentence."""
    chunks, place = [], 0
    for document in corpus:
        first, tokens = place, 0
        for i, length in enumerate(document):
            tokens += length
            left = len(document) - i - 1
            full = tokens >= targets(first) and place + i - first >= 1 and left != 1
            if len(document) > 1 and (full or left == 0):
                chunks.append((first, place + i + 1, targets(first)))
                first, tokens = place + i + 1, 0
        place += len(document)
    return chunks


@settings(max_examples=60, deadline=None)
@given(corpus=CORPORA, content=st.integers(2, 80), block=st.sampled_from([1, 7, 1 << 20]))
def test_chunks_are_those_of_a_plain_loop(corpus: Corpus, content: int, block: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentence_pairs, "BLOCK", block)
        dataset, everything = write(corpus, Path(folder)), (0, len(corpus))
        chunks = build_chunks(dataset, everything, content, 0.0, seed=1)
        assert list(map(tuple, chunks.tolist())) == slow_chunks(corpus, lambda first: content)


@settings(max_examples=30, deadline=None)
@given(corpus=CORPORA, content=st.integers(2, 80), seed=st.integers(0, 2**40))
def test_chunks_with_short_targets_are_those_of_a_plain_loop(corpus: Corpus, content: int, seed: int) -> None:
    generator, count = np.random.default_rng((seed, Stream.PAIR_CHUNKS)), sum(map(len, corpus))
    targets = np.full(count, content)
    short = generator.random(count) < 0.5
    targets[short] = generator.integers(2, content + 1, size=short.sum())
    with tempfile.TemporaryDirectory() as folder:
        chunks = build_chunks(write(corpus, Path(folder)), (0, len(corpus)), content, 0.5, seed)
    assert list(map(tuple, chunks.tolist())) == slow_chunks(corpus, lambda first: int(targets[first]))


def slow_truncation(a: int, b: int, limit: int) -> tuple[int, int]:
    while a + b > limit:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


def test_each_token_too_many_goes_from_either_end() -> None:
    generator = np.random.default_rng(5)
    fronts = np.asarray([_truncate_at_random(np.arange(20), 12, generator)[0] for _ in range(4000)])
    counts = Counter(fronts.tolist())
    for front in range(9):
        share = math.comb(8, front) / 2**8
        assert abs(counts[front] / 4000 - share) < 4.5 * math.sqrt(share * (1 - share) / 4000)


def texts_of(sample: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Check the special tokens of a sample, and return A and B as positions in the stream."""
    ids, types = sample["input_ids"], sample["token_type_ids"]
    assert ids[0] == CLS
    first, last = np.flatnonzero(ids == SEP)
    assert last == len(ids) - 1
    assert types.tolist() == [0] * (first + 1) + [1] * (last - first)
    return ids[1:first] - FIRST, ids[first + 1 : last] - FIRST


def check_sample(sample: dict[str, Any], corpus: Corpus, chunks: list[tuple[int, int, int]], swapped: bool) -> int:
    """Check every token of a sample against its expected origin. Returns the chunk of the sample."""
    sentences = np.concatenate([[0], np.cumsum([length for document in corpus for length in document])])
    document_of = np.repeat(np.arange(len(corpus)), list(map(len, corpus)))
    other = sample["sentence_order_label" if swapped else "next_sentence_label"]
    a, b = texts_of(sample)
    assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()  # noqa: PT018
    if swapped and other:
        a, b = b, a

    def sentence(place: int) -> int:
        return int(np.searchsorted(sentences, place, side="right")) - 1

    # A starts in its chunk and ends before the chunk's last sentence. So the chunk belongs to A's first token.
    index = next(i for i, (first, end, _) in enumerate(chunks) if first <= sentence(a[0]) < end)
    first, end, target = chunks[index]
    assert first <= sentence(a[-1]) < end - 1
    assert len(a) + len(b) <= target
    if other and not swapped:
        document = document_of[sentence(b[0])]
        assert document_of[sentence(b[-1])] == document != document_of[first]
        if len(a) + len(b) < target:  # nothing was truncated, and there was nothing more to take
            assert b[0] in sentences
            assert b[-1] + 1 == sentences[np.flatnonzero(document_of == document)[-1] + 1]
        return index
    # B follows A: for some cut between sentences, truncating the two sides gives A and B.
    begin, stop = sentences[first], sentences[end]
    cuts = [c for c in sentences[first + 1 : end] if begin <= a[0] and a[-1] < c <= b[0] and b[-1] < stop]
    limits = [((c - begin, stop - c) if not (swapped and other) else (stop - c, c - begin)) for c in cuts]
    kept = (len(b), len(a)) if swapped and other else (len(a), len(b))
    assert any(slow_truncation(int(x), int(y), target) == kept for x, y in limits)
    return index


@settings(max_examples=40, deadline=None)
@given(corpus=CORPORA, content=st.integers(2, 60), swapped=st.booleans())
def test_every_token_is_from_where_it_should_be(
    no_mask: MaskTokens, corpus: Corpus, content: int, swapped: bool
) -> None:
    label = "sentence_order_label" if swapped else "next_sentence_label"
    with tempfile.TemporaryDirectory() as folder:
        pairs = make(write(corpus, Path(folder)), no_mask, content + 3, short_probability=0.4, label=label)
        chunks = list(map(tuple, pairs.chunks.tolist()))
        assert len(pairs) == len(chunks)
        for epoch in (0, 1, 5):
            positions = range(epoch * len(pairs), (epoch + 1) * len(pairs))
            seen = [check_sample(pairs[p], corpus, chunks, swapped) for p in positions]
            assert sorted(seen) == list(range(len(chunks)))  # nothing is lost or doubled


def test_a_part_has_its_own_documents_only(no_mask: MaskTokens, tmp_path: Path) -> None:
    corpus = some_corpus(12)
    dataset = write(corpus, tmp_path)
    begins = np.concatenate([[0], np.cumsum(list(map(sum, corpus)))])
    pairs = make(dataset, no_mask, documents=(4, 9))
    tokens = np.concatenate([np.concatenate(texts_of(pairs[p])) for p in range(3 * len(pairs))])
    assert begins[4] <= tokens.min()
    assert tokens.max() < begins[9]


@pytest.mark.longer
def test_rates_of_labels_cuts_and_other_documents(no_mask: MaskTokens, tmp_path: Path) -> None:
    sizes = [4, 2, 3, 1, 2]
    dataset = write([[1] * size for size in sizes], tmp_path)
    pairs = make(dataset, no_mask, 7)
    count = 12_000
    own = np.repeat(np.arange(5), sizes)
    follows: Counter[int] = Counter()
    others: Counter[tuple[int, int]] = Counter()
    cuts: Counter[int] = Counter()
    for position in range(count):
        sample = pairs[position]
        a, b = texts_of(sample)
        follows[sample["next_sentence_label"]] += 1
        if own[a[0]] == 0:
            if sample["next_sentence_label"]:
                others[int(own[b[0]]), int(b[0])] += 1
            else:
                cuts[len(a)] += 1
    assert abs(follows[1] / count - 0.5) < 4 * math.sqrt(0.25 / count)
    total = sum(cuts.values())
    for cut in (1, 2, 3):  # one sentence is one token, so all cuts of the four are equally likely
        assert abs(cuts[cut] / total - 1 / 3) < 4 * math.sqrt(2 / 9 / total)
    total = sum(others.values())
    for document in range(1, 5):
        share = 0.25 / sizes[document]  # draw the document uniformly, then one of its sentences
        for sentence in np.flatnonzero(own == document).tolist():
            assert abs(others[document, sentence] / total - share) < 4.5 * math.sqrt(share * (1 - share) / total)


def test_a_sample_depends_on_seed_and_position_only(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    dataset, mask = write(some_corpus(20), tmp_path), MaskTokens(tokenizer, 0.3)
    pairs, again = make(dataset, mask), pickle.loads(pickle.dumps(make(dataset, mask)))
    positions = [0, 3 * len(pairs) + 1, 5, len(pairs) - 1, len(pairs), 10**9]
    backwards = {p: again[p] for p in reversed(positions)}
    for position in positions:
        sample = pairs[position]
        assert sample.keys() == backwards[position].keys()
        assert all(np.array_equal(sample[name], backwards[position][name]) for name in sample)
    other = make(dataset, mask, seed=8)
    assert any(not np.array_equal(pairs[p]["input_ids"], other[p]["input_ids"]) for p in range(5))
    assert np.array_equal(pairs[-1]["input_ids"], pairs[len(pairs) - 1]["input_ids"])


def test_masks_hide_tokens_of_the_pair(tokenizer: BertTokenizer, no_mask: MaskTokens, tmp_path: Path) -> None:
    dataset = write(some_corpus(20), tmp_path)
    plain, masked = make(dataset, no_mask), make(dataset, MaskTokens(tokenizer, 0.3, at_least_one=True))
    for position in range(len(plain)):
        expected, sample = plain[position], masked[position]
        hidden = sample["labels"] != IGNORED
        assert hidden.any()
        assert np.array_equal(np.where(hidden, sample["labels"], sample["input_ids"]), expected["input_ids"])
        assert np.array_equal(sample["token_type_ids"], expected["token_type_ids"])
        assert sample["next_sentence_label"] == expected["next_sentence_label"]


def test_epochs_are_shuffled_anew(no_mask: MaskTokens, tmp_path: Path) -> None:
    pairs = make(write(some_corpus(60), tmp_path), no_mask)
    orders = [pairs._order(epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(len(pairs))) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert list(range(len(pairs))) not in orders


def test_no_tables_travel_to_loader_processes(no_mask: MaskTokens, tmp_path: Path) -> None:
    pairs = make(write([[2, 2, 2]] * 1500, tmp_path), no_mask)
    pairs[0]
    assert len(pickle.dumps(pairs)) - len(pickle.dumps(no_mask)) < 2000


def test_tables_come_from_the_cache(no_mask: MaskTokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, cache = write(some_corpus(20), tmp_path), IndexCache(tmp_path / "tables")
    pairs = make(dataset, no_mask, cache=cache)
    positions = range(2 * len(pairs))
    expected = [pairs[p]["input_ids"].tolist() for p in positions]
    folders = sorted(path for path in (tmp_path / "tables").iterdir() if path.is_dir())
    assert len(folders) == 3  # the chunks, and the order of two epochs
    monkeypatch.setattr(sentence_pairs, "build_chunks", None)
    again = pickle.loads(pickle.dumps(make(dataset, no_mask, cache=cache)))
    assert [again[p]["input_ids"].tolist() for p in positions] == expected
    monkeypatch.undo()
    changes = [{"seed": 8}, {"short_probability": 0.1}, {"seq_length": 44}, {"documents": (1, 20)}]
    for i, change in enumerate(changes):
        make(dataset, no_mask, cache=cache, **change)[0]
        folders = [path for path in (tmp_path / "tables").iterdir() if path.is_dir()]
        assert len(folders) == 3 + 2 * (i + 1), change  # no cache is used for a different setting


def test_what_a_resumed_run_is_compared_by(no_mask: MaskTokens, tmp_path: Path) -> None:
    pairs = make(write([[1, 2], [3, 4]], tmp_path), no_mask)
    assert pairs.identity.startswith("2 sentence pairs of up to 43 tokens (")
    other = make(write([[1, 2], [3, 5]], tmp_path / "other"), no_mask)
    assert other.identity != pairs.identity


@pytest.mark.parametrize(
    ("corpus", "changes"),
    [
        ([[1], [2], [3]], {}),
        ([[1, 2, 3]], {}),
        ([[1, 2], [3, 4]], {"seq_length": 4}),
    ],
)
def test_what_gives_no_pairs_is_refused(
    no_mask: MaskTokens, tmp_path: Path, corpus: Corpus, changes: dict[str, Any], says: Says
) -> None:
    with says(DataError):
        make(write(corpus, tmp_path), no_mask, **changes)


def test_one_document_is_enough_for_sentence_order(no_mask: MaskTokens, tmp_path: Path) -> None:
    pairs = make(write([[1, 2, 3]], tmp_path), no_mask, label="sentence_order_label")
    assert {pairs[p]["sentence_order_label"] for p in range(30)} == {0, 1}


def test_mean_tokens_is_that_of_pairs_that_follow(no_mask: MaskTokens, tmp_path: Path) -> None:
    pairs = make(write(some_corpus(40), tmp_path), no_mask, 30, label="sentence_order_label", short_probability=0.2)
    lengths = [len(pairs[p]["input_ids"]) - 3 for p in range(len(pairs))]
    assert pairs.mean_tokens == pytest.approx(np.mean(lengths))


PAD = 0
COLLATE = PadCollate({"input_ids": PAD, "token_type_ids": 0, "labels": IGNORED})
SIZES = {
    "vocab_size": FIRST + FEW, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def models() -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    yield "next_sentence_label", BertForPreTraining(BertConfig(**SIZES)).eval()
    yield "sentence_order_label", AlbertForPreTraining(AlbertConfig(**SIZES, embedding_size=8)).eval()


def test_models_take_the_batches_and_their_losses_are_ours(tmp_path: Path) -> None:
    dataset, mask = write(some_corpus(30), tmp_path), MaskTokens(tokenizer_of(FEW), 0.15, at_least_one=True)
    for label, model in models():
        assert pair_label_of(model.config.model_type) == label
        pairs = make(dataset, mask, label=label)
        samples = [pairs[p] for p in range(12)]
        assert {sample[label] for sample in samples} == {0, 1}
        batch = COLLATE(samples)
        masked = int((batch["labels"] != IGNORED).sum())
        with torch.no_grad():
            reference = model(**batch).loss
            total, count = pair_loss(model, batch, label, masked / 12)
        assert count == masked
        assert torch.isfinite(reference)
        # The two agree when the batch's own mean number of masked tokens is used.
        torch.testing.assert_close(total / count, reference)


def test_the_loss_does_not_depend_on_padding_or_on_how_a_batch_is_cut(tmp_path: Path) -> None:
    dataset, mask = write(some_corpus(30), tmp_path), MaskTokens(tokenizer_of(FEW), 0.15, at_least_one=True)
    for label, model in models():
        model.double()
        pairs = make(dataset, mask, label=label, short_probability=0.5)
        samples = [pairs[p] for p in range(8)]
        assert len({len(sample["input_ids"]) for sample in samples}) > 1
        weight = mask.probability * pairs.mean_tokens
        with torch.no_grad():
            whole = pair_loss(model, COLLATE(samples), label, weight)
            cuts = [pair_loss(model, COLLATE(samples[i:j]), label, weight) for i, j in ((0, 1), (1, 4), (4, 8))]
        torch.testing.assert_close(sum(total for total, _ in cuts), whole[0])
        assert sum(count for _, count in cuts) == whole[1]


def test_architectures_with_and_without_a_head_for_pairs(says: Says) -> None:
    for model_type in ("bert", "big_bird", "ernie", "megatron-bert", "mobilebert"):
        assert pair_label_of(model_type) == "next_sentence_label"
    for model_type in ("roberta", "electra", "gpt2", "fnet"):
        with says(RapidformerError):
            pair_label_of(model_type)
