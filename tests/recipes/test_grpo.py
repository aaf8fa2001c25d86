"""The GRPO recipe: its loss is TRL's, it samples from the model, and each layout trains on the same completions."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.recipes import grpo
from tests.support.worker_pool import run_in_workers

FLAGS = "--device cpu --rounds 3 --every 2 --updates 2 --lr 2e-3 --global-batch-size 32 --micro-batch-size 8"
LAYOUTS = {
    "ddp": "",
    "fsdp": "--fsdp-memory-optimization",
    "tensor": "--tensor-model-parallel-size 2",
    "lora": "--lora-rank 4",
    "lora-fsdp": "--lora-rank 4 --fsdp-memory-optimization",
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    for part in grpo.load(""):
        part.save_pretrained(folder)
    return folder


def _train(workers: object, policy: Path, folder: Path, *flags: str) -> list[list[float]]:
    return grpo.GRPO(
        [*FLAGS.split(), *" ".join(flags).split(), "--policy", str(policy), "--folder", str(folder)]
    ).train()


def _rows(tokenizer: Any) -> list[grpo.Row]:
    """Return completions of 1 to 3 tokens for prompts of 4, with advantages of both signs."""
    rows = []
    for i, text in enumerate(
        ["3+4=7<end>", "3+4=12<end>", "3+4=5", "3+4=7", "1+1=<end>", "1+1=2<end>", "1+1=26", "1+1=+="]
    ):
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
        row = {"input_ids": ids, "is_completion": torch.arange(len(ids)) >= 4}
        rows.append({**row, "advantage": torch.full(ids.shape, (1.3, -0.7, -0.4, 0.9)[i % 4])})
    return rows


def test_the_loss_and_its_gradient_are_those_of_trl(policy: Path, tmp_path: Path) -> None:
    """After a step, so that the ratios are not 1 and some are clipped. TRL gets all completions at once."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    initial, model = (AutoModelForCausalLM.from_pretrained(policy).eval() for _ in range(2))
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in initial.parameters():
            weights.add_(0.02 * torch.randn_like(weights))
    flags = (
        f"--device cpu --policy {policy} --kl-weight 0.3 --temperature 0.7 --global-batch-size 8 --micro-batch-size 2"
    )
    task = grpo.GRPO([*flags.split(), "--lr", "5e-4", "--clip-grad", "0"])
    task.initial = initial
    with task.compose() as session:
        rows = _rows(tokenizer)
        batches = task.batches_of(rows, session)
        before = copy.deepcopy(session.model.state_dict())
        session.step(batches)
        after = copy.deepcopy(session.model.state_dict())
        ours = session.step(batches)

    settings = {
        "loss_type": "dapo",
        "beta": 0.3,
        "epsilon": 0.2,
        "temperature": 0.7,
        "num_generations": 4,
        "use_bias_correction_kl": False,
    }
    config = trl.GRPOConfig(
        str(tmp_path), **settings, per_device_train_batch_size=8, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "3+4="}, {"prompt": "1+1="}])
    peer = trl.GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args=config, train_dataset=data,
        processing_class=tokenizer,
    )  # fmt: skip
    peer.current_gradient_accumulation_steps = 1
    completions = torch.nn.utils.rnn.pad_sequence([row["input_ids"][4:] for row in rows], True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row["input_ids"]) - 4) for row in rows], True).long()
    prompts = torch.stack([row["input_ids"][:4] for row in rows])
    inputs = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
        "completion_mask": mask, "num_items_in_batch": mask.sum(),
        "advantages": torch.stack([row["advantage"][0] for row in rows]),
    }  # fmt: skip
    whole = torch.cat([prompts, completions], 1), torch.cat([torch.ones_like(prompts), mask], 1), 3
    states = {"old": before, "ref": initial.state_dict()}
    for name, state in states.items():
        peer.model.load_state_dict(state)
        with torch.no_grad():
            inputs[f"{name}_per_token_logps"] = peer._get_per_token_logps_and_entropies(peer.model, *whole)[0]
    peer.model.load_state_dict(after)
    theirs = peer._compute_loss(peer.model.train(), inputs)
    theirs.backward()
    norm = torch.nn.utils.get_total_norm([weights.grad for weights in peer.model.parameters()])
    assert float(peer._metrics["train"]["clip_ratio/region_mean"][-1]) > 0.1
    assert float(ours.loss) == pytest.approx(float(theirs), abs=1e-6)
    assert float(ours.grad_norm) == pytest.approx(float(norm), rel=1e-5)


def test_a_folder_with_bf16_is_trained_in_fp32(policy: Path, tmp_path: Path) -> None:
    """The rounds are those of a folder with the same weights in fp32."""
    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        shutil.copytree(policy, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).to(dtype)
        model.save_pretrained(tmp_path / name)
    bf16, fp32 = (_train(None, tmp_path / name, tmp_path / f"{name}-run") for name in ("bf16", "fp32"))
    assert bf16 == fp32


def test_advantages_are_relative_to_the_group() -> None:
    """The expected values are (reward - mean) / standard deviation, by hand: 1/4 ± … with the deviation 1/2."""
    found = grpo.advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    assert found.tolist() == [pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3), [0.0] * 4]


def test_the_sampler_draws_from_the_probabilities() -> None:
    logits, count = torch.tensor([2.0, 0.0, -1.0, 1.0]), 20000
    sampler = grpo.Sampler(range(count), 0.8, torch.device("cpu"))
    drawn = sampler(torch.zeros(count, 1), logits.expand(count, 4)).argmax(1)
    expected = (logits / 0.8).softmax(0)
    error = torch.sqrt(expected * (1 - expected) / count)
    assert bool(((drawn.bincount(minlength=4) / count - expected).abs() < 4 * error).all())
    alone = grpo.Sampler([7], 0.8, torch.device("cpu"))(torch.zeros(1, 1), logits[None])
    assert int(alone.argmax()) == int(drawn[7])  # its seed decides, and not its place in the batch


def test_micro_batches_change_nothing_and_a_stopped_run_resumes(policy: Path, tmp_path: Path) -> None:
    whole = _train(None, policy, tmp_path / "whole")
    assert 0 < sum(reward for reward, _ in whole) < 3
    assert len({loss for _, loss in whole}) == 3
    assert _train(None, policy, tmp_path / "one", "--micro-batch-size 32") == [
        pytest.approx(r, abs=1e-6) for r in whole
    ]
    assert _train(None, policy, tmp_path / "half", "--rounds 2") == whole[:2]
    assert _train(None, policy, tmp_path / "half") == whole


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("fsdp", "lora-fsdp") else pytest.mark.longer) for n in LAYOUTS]
)
def test_two_workers_train_like_one(name: str, policy: Path, tmp_path: Path) -> None:
    adapters = "--lora-rank 4" if "lora" in name else ""
    expected = _train(None, policy, tmp_path / "one", adapters)
    found = run_in_workers(2, _train, policy, tmp_path / "two", LAYOUTS[name])
    assert found[0] == found[1]
    assert [reward for reward, _ in found[0]] == [reward for reward, _ in expected]
    assert found[0] == [pytest.approx(row, abs=1e-5) for row in expected]


@pytest.mark.longer
def test_the_reward_rises(tmp_path: Path) -> None:
    history = grpo.GRPO(
        ["--device", "cpu", "--folder", str(tmp_path)], lr=5e-4, micro_batch_size=64, global_batch_size=256
    ).train()
    rewards = [reward for reward, _ in history]
    assert sum(rewards[:4]) / 4 < 0.2
    assert sum(rewards[-10:]) / 10 > 0.8
