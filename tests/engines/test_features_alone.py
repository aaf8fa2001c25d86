"""Each feature that changes a step, alone in one process: smoothed labels, noise, rates of layers, and weight decay.

``test_features_of_a_step.py`` has the engines. The layers follow the forward: OPT declares its final norm before its
blocks, DeBERTa its relative embeddings after.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers import Trainer as TransformersTrainer
from transformers.integrations.neftune import activate_neftune
from transformers.models.auto import modeling_auto
from transformers.trainer_pt_utils import get_parameter_names

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.current_batch import add_noise, keys_of, rows_of, uniform
from rapidformer_templates.engines.recipe import FirstUses, OptimizerSpec, depth_of, depths_of, layerwise, undecayed
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.mixture_of_experts.layer import Experts
from tests.support.architectures import SIZES
from tests.support.jobs import VOCABULARY, DeepJob
from tests.support.lines import Died
from tests.support.parity import Trained, assert_follows, trained
from tests.support.requests import codes
from tests.support.selection import by_default

STEPS = "--train-iters 4 --global-batch-size 8 --log-interval 1 --no-export-model"


def run(flags: str, job: type[DeepJob] = DeepJob) -> Trained:
    return trained(job(f"{STEPS} {flags}".split()))


SMOOTHING = "--task causal_lm --clip-grad 0.5 --lr 1e-3"
SHARE = 0.2
ALONE = {
    "plain": "--micro-batch-size 8",
    "accumulated": "--micro-batch-size 2 --checkpoint-activations",
    "fused": "--micro-batch-size 8 --fused-linear-cross-entropy",
}


class Smoothed(DeepJob):
    """Uses the smoothed loss of the logits, without smoothing in evaluations."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        share = SHARE if torch.is_grad_enabled() else 0.0
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=share)


@pytest.fixture(scope="module")
def smoothed() -> Trained:
    return run(f"{SMOOTHING} --micro-batch-size 8", Smoothed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_one_process_computes_torchs_smoothed_loss(name: str, smoothed: Trained) -> None:
    assert_follows(run(f"{SMOOTHING} --label-smoothing {SHARE} {ALONE[name]}"), smoothed, weights=(1e-4, 1e-5))


SEED, ALPHA = 1234, 20.0
NOISE = f"--clip-grad 0.5 --lr 1e-3 --seed {SEED}"
ON = f"{NOISE} --neftune-alpha {ALPHA}"


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
def noisy() -> Trained:
    return run(f"{ON} --micro-batch-size 8")


@pytest.mark.slow
def test_the_first_loss_is_that_of_noise_by_hand(noisy: Trained) -> None:
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

    wanted = run(f"{NOISE} --micro-batch-size 8", ByHand)
    assert_follows(noisy, wanted, weights=(1e-4, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 1 --checkpoint-activations",
        "--micro-batch-size 4 --fused-linear-cross-entropy",
        pytest.param("--micro-batch-size 4 --torch-compile aot_eager", marks=pytest.mark.longer),
    ],
)
def test_micro_batches_and_switches_do_not_change_it(flags: str, noisy: Trained) -> None:
    assert_follows(run(f"{flags} {ON}"), noisy, weights=(1e-4, 1e-5))


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_whole_one(noisy: Trained, tmp_path: Path) -> None:
    job = DeepJob([*f"{STEPS} --micro-batch-size 8 {ON} --save-interval 2 --save {tmp_path}".split()])
    job.dies_after = 3
    with pytest.raises(Died):
        job.fit()
    resumed = DeepJob([*f"{STEPS} --micro-batch-size 8 {ON} --save {tmp_path} --resume".split()])
    resumed.fit()
    assert resumed.curve == noisy["curve"][2:]


def test_encoder_decoders_are_refused() -> None:
    assert codes("--task seq2seq_lm --neftune-alpha 5") == ["RF113"]
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is not a transformers model that reads one"):
        add_noise(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)), ALPHA, SEED)


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


DECAY, PEAK = 0.5, 1e-2
RATES = f"--lr {PEAK} --micro-batch-size"
LAYERWISE = f"--layerwise-lr-decay {DECAY}"

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
T5 = {
    "decoder_start_token_id": 0, "vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 3,
    "num_decoder_layers": 2,
}  # fmt: skip
BART = {
    "vocab_size": 32, "d_model": 8, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
DEBERTA = {
    "relative_attention": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True, "position_biased_input": False,
}  # fmt: skip
CLASSES, TEXTS, CAUSAL = "SequenceClassification", "Seq2SeqLM", "CausalLM"
MODELS = {
    "bert": (CLASSES, transformers.BertConfig(**SMALL)),
    "llama": (CAUSAL, transformers.LlamaConfig(**SMALL)),
    "opt": (
        CAUSAL, transformers.OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=8, max_position_embeddings=32),
    ),
    "bart": (TEXTS, transformers.BartConfig(**BART)),
    "deberta": (CLASSES, transformers.DebertaV2Config(**SMALL, **DEBERTA)),
    "t5": (TEXTS, transformers.T5Config(**T5)),
}  # fmt: skip
LAYERS = {
    "gpt2": {
        "transformer.wte": 5, "transformer.wpe": 5, "transformer.h.0": 4, "transformer.h.3": 1, "transformer.ln_f": 0,
    },
    "bert": {
        "bert.embeddings.": 4, "bert.encoder.layer.0.": 3, "bert.encoder.layer.2.": 1, "bert.pooler.": 0,
        "classifier.": 0,
    },
    "llama": {"model.embed_tokens.": 4, "model.layers.1.": 2, "model.norm.": 0, "lm_head.": 0},
    "opt": {
        "model.decoder.embed": 4, "model.decoder.project_in.": 4, "model.decoder.layers.0.": 3,
        "model.decoder.layers.2.": 1, "model.decoder.final_layer_norm.": 0, "model.decoder.project_out.": 0,
    },
    "bart": {
        "model.shared.": 4, "model.encoder.embed_positions.": 4, "model.encoder.layernorm_embedding.": 4,
        "model.encoder.layers.0.": 3, "model.decoder.embed_positions.": 3, "model.decoder.layernorm_embedding.": 3,
        "model.decoder.layers.0.": 2, "model.decoder.layers.1.": 1,
    },
    "deberta": {
        "deberta.embeddings.": 4, "deberta.encoder.rel_embeddings.": 4, "deberta.encoder.LayerNorm.": 4,
        "deberta.encoder.layer.0.": 3, "deberta.encoder.layer.2.": 1, "classifier.": 0, "pooler.": 0,
    },
    "t5": {
        "shared.": 4, "encoder.block.0.": 3, "encoder.block.2.": 1, "encoder.final": 0, "decoder.block.0.": 2,
        "decoder.block.1.": 1, "decoder.final": 0,
    },
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    if name == "gpt2":
        return DeepJob().make()
    head, config = MODELS[name]
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_the_power_of_each_parameter(name: str) -> None:
    model = model_of(name)
    ids = torch.arange(3, 7)[None]
    with FirstUses(model) as uses:
        model(input_ids=ids, **({"labels": ids} if name in ("bart", "t5") else {}))
    options = layerwise(depths_of(model, uses.names), DECAY, PEAK, undecayed)
    seen = set()
    for parameter_name, parameter in model.named_parameters():
        for part, power in LAYERS[name].items():
            if parameter_name.startswith(part):
                seen.add(part)
                found = options(parameter_name, parameter)
                assert found.get("lr", PEAK) == pytest.approx(PEAK * DECAY**power), parameter_name
                assert ("weight_decay" in found) == (parameter.ndim < 2 or "bias" in parameter_name)
    assert seen == set(LAYERS[name])


def test_an_adapter_has_the_depth_of_its_layer() -> None:
    """A parameter of the model itself is in the same module as all layers, so only its name decides."""
    model = DeepJob().make()
    model.transformer.scale = nn.Parameter(torch.ones(1))
    depths = depths_of(model, ["transformer.scale", "transformer.wte.weight", "transformer.h.0.ln_1.weight"])
    names = (
        "transformer.scale",
        "transformer.wte.lora_A.weight",
        "transformer.h.1.attn.lora_B.weight",
        "transformer.ln_f.bias",
    )
    assert [depth_of(name, depths) for name in names] == [5, 5, 3, 0]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="the model has no blocks that follow each other"):
        layerwise(depths_of(nn.Linear(2, 2)), DECAY, PEAK, undecayed)


class Grouped(DeepJob):
    """One parameter group per layer, as torch's own optimizer accepts them."""

    def build_optimizer(self) -> OptimizerSpec:
        def options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
            powers = [power for part, power in LAYERS["gpt2"].items() if name.startswith(part)]
            if name.startswith("transformer.h."):
                powers = [4 - int(name.split(".")[2])]
            return {**undecayed(name, parameter), "lr": PEAK * DECAY ** powers[0]}

        return OptimizerSpec(torch.optim.AdamW, {"lr": PEAK, "weight_decay": 0.01}, options)


@pytest.mark.slow
def test_it_is_a_group_for_each_layer() -> None:
    found = run(f"{RATES} 8 {LAYERWISE} --optimizer adamw_torch")
    assert_follows(found, run(f"{RATES} 8", Grouped), weights=(1e-4, 1e-5))
    plain = run(f"{RATES} 8 --optimizer adamw_torch")
    assert abs(plain["curve"][-1][0] - found["curve"][-1][0]) > 1e-3


FACTORIES: tuple[Any, ...] = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSeq2SeqLM,
)
LANGUAGE_MODELS = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    & set(CONFIG_MAPPING)
)
BY_DEFAULT = ("gpt2", "llama", "xlnet", "roberta-prelayernorm", "cohere")
SOME = {"cohere": {"use_qk_norm": True}}
"""Settings that add parameters: norms with a row for each head."""


def _on_meta(name: str) -> PreTrainedModel:
    """Return a model without memory, small if its sizes have the usual names."""
    sizes = {}
    with contextlib.suppress(Exception):  # sizes of layers that differ cannot be read
        default: Any = CONFIG_MAPPING[name]()
        named = {default.attribute_map.get(size, size): value for size, value in SIZES.items()}
        sizes = {size: value for size, value in named.items() if isinstance(getattr(default, size, None), int)}
    for factory in FACTORIES:
        for values in (sizes, {}):
            with contextlib.suppress(Exception), torch.device("meta"):
                model: PreTrainedModel = factory.from_config(CONFIG_MAPPING[name](**values, **SOME.get(name, {})))
                return model
    pytest.skip("it cannot be built from its configuration alone")


@pytest.mark.parametrize("name", by_default(BY_DEFAULT, sorted({*BY_DEFAULT, *LANGUAGE_MODELS[::3]})))
def test_decayed_parameters_are_those_of_transformers(name: str) -> None:
    """transformers also leaves out matrices inside of a module that is named like a norm. We decay those."""
    model = _on_meta(name)
    named = dict(model.named_parameters())
    decayed = {key for key, parameter in named.items() if not undecayed(key, parameter)}
    theirs = set(TransformersTrainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    inside_norms = {key for key in get_parameter_names(model, [nn.LayerNorm], ["bias"]) if not _is_of_norm(key)}
    assert decayed == {key for key in theirs | inside_norms if key in named and named[key].ndim > 1}


def _is_of_norm(key: str) -> bool:
    """Return whether the module that has a parameter itself is called a norm."""
    return "norm" in key.rpartition(".")[0].rpartition(".")[-1]


def test_biases_of_our_experts_do_not_decay() -> None:
    experts = Experts(4, 8, 16, torch.tanh, gated=True, bias=True)
    decayed = {name for name, parameter in experts.named_parameters() if not undecayed(f"mlp.{name}", parameter)}
    assert decayed == {"up", "gate", "down"}
