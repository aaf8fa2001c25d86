"""The exact text of refusals, and the rules of kernels, streams, mixtures and trackers."""

from pathlib import Path

import pytest
import torch._dynamo

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flag_values import TrackerNames, chosen_trackers
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.planning.resolve import resolve
from tests.support.messages import Says
from tests.support.requests import CPU, GPUS, codes, config_of, on, refusal

BARE = on(GPUS, packages={})
EPOCHS = "--lr 5e-5 --epochs 3 --micro-batch-size 4 --global-batch-size 16 --no-save"
STREAMED = "--task causal_lm --streaming"
CASES: list[tuple[str, Environment]] = [
    # For a script, the advice is to change its base class
    ("--config run.yaml", on(GPUS, template="Finetuner", template_origin="train.py:8")),
    # The nearest values that work
    ("--micro-batch-size 4 --global-batch-size 20", CPU),
    ("--fsdp-memory-optimization --fsdp-shard-size 6", GPUS),
    # What to install
    ("--optimizer adamw_torch_8bit", BARE),
    ("--torch-compile", on(CPU, cxx=None)),
    ("--torch-compile", BARE),
    ("--torch-compile tvm", CPU),
    ("--torch-compile openxla", CPU),
    ("--torch-compile cudagraphs", CPU),
    ("--torch-compile inductr", CPU),
    ("--use-flash-attn --dropout 0.1", CPU),
    # A switch that needs another one, and two that exclude one another
    ("--nvme-path /d --oss-memory-optimization", GPUS),
    # Epochs: accumulation and streams
    (EPOCHS, CPU),
    (f"{STREAMED} --epochs 3", CPU),
    (f"{STREAMED} --train-iters 3epochs", CPU),
    (f"{STREAMED} --train-iters 100 --eval-interval 1epochs", CPU),
    (f"{STREAMED} --train-iters 100 --save-interval 0.5epochs", CPU),
    (f"{STREAMED} --epochs 3 --micro-batch-size 2 --global-batch-size 8", CPU),
]
BACKENDS = ", ".join(torch._dynamo.list_backends(exclude_tags=()))


def in_words(value: str | Environment) -> str:
    return value if isinstance(value, str) else value.device


@pytest.mark.parametrize(("flags", "place"), CASES, ids=in_words)
def test_what_a_refusal_says(
    flags: str, place: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("# my run\nlr: 3e-5\nzero-3-memory-optimization: true\n")
    assert "aot_eager" in BACKENDS
    says.text(refusal(flags, place, training=flags == EPOCHS), BACKENDS=BACKENDS)


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ("--use-flash-attn --task pretraining", CPU),
        ("--use-flash-attn --task pretraining --keep-documents-apart", CPU),
        ("--use-flash-attn --task masked_lm", CPU), ("--use-flash-attn --task masked_lm --mixed-precision bf16", GPUS),
        ("--use-flash-attn --task pretraining --mixed-precision bf16", BARE),
        ("--use-flash-attn --task pretraining", GPUS),
        ("--use-flash-attn --task pretraining --mixed-precision fp16", on(GPUS, compute_capability=(7, 0))),
        ("--torch-compile", CPU),
        ("--torch-compile eager --data-iterator dynamic-shape --max-shapes 5",
         on(CPU, template="Pretrainer", template_origin="command line")),
    ],
    ids=in_words,
)  # fmt: skip
def test_the_plan_says_which_kernels_and_graphs_there_will_be(flags: str, place: Environment, says: Says) -> None:
    notes = resolve(config_of(flags), place).notes
    says.text("\n".join(note for note in notes if note.startswith(("flash-attention", "torch-compile"))))


STREAM = "--task causal_lm --streaming --train-iters 10"
CORPUS = "--task pretraining --streaming --train-iters 10"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (STREAM, []),
        (CORPUS, []),
        (f"{STREAM} --shuffle-buffer 0 --pack-sequences --global-batch-size 8", []),
        (f"{STREAM} --eval-interval 5 --early-stopping-patience 3", []),
        (f"{CORPUS} --keep-documents-apart --text-unit line --no-keep-best", []),
        ("--task causal_lm --shuffle-buffer 10", ["RF034"]),
        ("--task causal_lm --streaming --epochs 2", ["RF151"]),
        ("--task question_answering --streaming --train-iters 10", ["RF152"]),
        (f"{STREAM} --no-group-by-length", []),
        (f"{STREAM} --group-by-length", ["RF153"]),
        (f"{STREAM} --max-train-samples 5 --validation-fraction 0.2", ["RF153", "RF153"]),
        (f"{STREAM} --validation-fraction 0", []),
        (f"{CORPUS} --split 1", ["RF153"]),
        (f"{CORPUS} --eval-interval 5", ["RF153"]),
        (f"{CORPUS} --metric-for-best eval_loss --metric-for-best-mode min", ["RF153"]),
        (f"{CORPUS} --template Pretrainer --data-iterator dynamic-shape", ["RF007", "RF039"]),
        ("--task causal_lm --data-name '0.7 a 0.3 b' --pack-sequences", []),
        (f"{STREAM} --data-name '0.7 a 0.3 b'", ["RF154"]),
        ("--task question_answering --data-name '1 a 2 b'", ["RF154"]),
    ],
)
def test_combinations(flags: str, expected: list[str]) -> None:
    assert codes(flags) == expected


@pytest.mark.parametrize(("size", "tensor", "workers"), [(2, 1, 2), (4, 2, 8), (1, 1, 1)])
def test_a_data_parallel_size_is_that_of_the_workers(size: int, tensor: int, workers: int) -> None:
    flags = f"--tensor-model-parallel-size {tensor} --template Trainer --data-parallel-size"
    place = on(CPU, world_size=workers, local_world_size=workers)
    assert "RF150" not in codes(f"{flags} {size}", place)
    for other in {size + 1, size * 2, max(1, size // 2)} - {size}:
        assert "RF150" in codes(f"{flags} {other}", place)


RUN = "--task causal_lm --train-iters 10 --lr 1e-3 --save DIR"
WITH_TWO = on(CPU, packages={"tensorboard": "2.21.0", "mlflow": "unknown"})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--report-to tensorboard", []), ("--report-to mlflow,tensorboard --run-name a --project-name b", []),
        ("--report-to all", []), ("--report-to none", []), ("--report-to wandb", ["RF160"]),
        ("--report-to tensorboard,wandb,trackio", ["RF160", "RF160"]), ("--run-name a", ["RF034"]),
        ("--project-name a", ["RF034"]),
    ],
)  # fmt: skip
def test_trackers(flags: str, expected: list[str]) -> None:
    assert codes(f"{RUN} {flags}", WITH_TWO) == expected


def test_what_is_missing_is_named_with_its_install(says: Says) -> None:
    says.text(refusal(f"{RUN} --report-to tensorboard,wandb", WITH_TWO))
    says.text(refusal(f"{RUN} --report-to all", CPU))
    says.text(refusal(f"{RUN.replace('--save DIR', '--no-save')} --report-to mlflow", WITH_TWO))


def test_what_names_no_tracker(says: Says) -> None:
    for text in ("tensorbord", "wandb,wandb", "all,wandb", "", "none,all"):
        with says(ConfigError):
            parse(["--report-to", text], switch_options())


def test_a_list_of_a_file_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("report_to: [wandb, TensorBoard]\n")
    asked = config_of(f"--config {tmp_path / 'run.yaml'}").training.report_to
    assert asked == TrackerNames("wandb,tensorboard")
    assert asked is not None
    assert asked.names == chosen_trackers(str(asked), ()) == ("wandb", "tensorboard")
    assert chosen_trackers("all", {"mlflow", "trackio", "torch"}) == ("mlflow", "trackio")
