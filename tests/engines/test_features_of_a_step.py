"""A run with every feature that changes its steps has the numbers of one process under every engine.

Each feature alone equals plain torch in one process: ``test_features_alone.py``, ``test_weight_average.py`` and
``test_means.py``.
"""

import math

import pytest

from rapidformer_templates.planning.environment import installed_packages
from tests.support.parity import Trained, assert_close, assert_follows, observed, reference, weights_apart
from tests.support.selection import by_default

LENGTH = "--task causal_lm --train-iters 4 --global-batch-size 8 --eval-interval 2 --lr 1e-2 --weight-decay 0.1"
FEATURES = {
    "label smoothing": "--label-smoothing 0.2",
    "noise in the embeddings": "--neftune-alpha 20",
    "a rate per layer": "--layerwise-lr-decay 0.5",
    "averaged weights": "--ema-decay 0.7",
    "clipping": "--clip-grad 0.5",
    "norms of the layers": "--log-layer-grad-norms",
}
LAYOUTS = {
    "ddp, accumulated": "--micro-batch-size 2",
    "fsdp, fused loss": "--micro-batch-size 2 --fsdp-memory-optimization --fused-linear-cross-entropy",
    "fsdp, kept": "--micro-batch-size 4 --fsdp-memory-optimization --no-fsdp-reshard-after-forward",
    "distributed": "--micro-batch-size 4 --use-distributed-optimizer",
    "tensor": "--micro-batch-size 4 --tensor-model-parallel-size 2",
    "sequence": "--micro-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--micro-batch-size 2 --pipeline-model-parallel-size 2 --virtual-pipeline-size 2",
}
if "fairscale" in installed_packages():
    LAYOUTS |= {
        "oss": "--micro-batch-size 4 --oss-memory-optimization",
        "sdp": "--micro-batch-size 4 --oss-sdp-memory-optimization",
    }
if "deepspeed" in installed_packages():
    LAYOUTS |= {f"zero-{n}": f"--micro-batch-size 4 --zero-{n}-memory-optimization" for n in (1, 2, 3)}
    LAYOUTS |= {f"zero-{n}, offload": f"{LAYOUTS[f'zero-{n}']} --cpu-offload" for n in (2, 3)}
SHORT = ("fsdp, kept", "zero-2", "pipeline")
"""One engine of each family: this library's, DeepSpeed's, and the one of divided models."""


def _alone(without: str = "") -> Trained:
    words = [LENGTH, "--micro-batch-size 8", *(flags for name, flags in FEATURES.items() if name != without)]
    return reference("deep", False, " ".join(words), lr=None)


def _norms(run: Trained) -> list[dict[str, float]]:
    lines = [line for line in run["lines"] if "loss" in line]
    return [{key: value for key, value in line.items() if key.startswith("grad_norm")} for line in lines]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(SHORT, LAYOUTS))
def test_a_layout_follows_one_process(layout: str) -> None:
    wanted = _alone()
    runs = observed(2, "deep", False, " ".join((LENGTH, *FEATURES.values(), LAYOUTS[layout])), lr=None)
    for found in runs:
        assert_follows(found, wanted, weights=(1e-4, 1e-5))
        assert found["averages"].keys() == wanted["averages"].keys()
        for name, weight in wanted["averages"].items():
            assert_close(found["averages"][name], weight, 1e-4, 1e-5)
    for line, norms in zip(_norms(runs[0]), _norms(wanted), strict=True):
        assert line == pytest.approx(norms, rel=1e-4)
        parts = [value for name, value in line.items() if name != "grad_norm"]
        assert len(parts) == 7  # two embeddings, one of which is the head, too, four blocks, and the final norm
        assert math.hypot(*parts) == pytest.approx(line["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_the_run_would_be_another_without_the_feature(name: str) -> None:
    whole, found = _alone(), _alone(without=name)
    if name == "norms of the layers":
        assert all(list(line) == ["grad_norm"] for line in _norms(found))
    elif name == "averaged weights":
        assert found["evaluations"] != pytest.approx(whole["evaluations"], rel=1e-4)
    else:
        assert weights_apart(found["weights"], whole["weights"]) > 1e-3
