"""Mistakes that people make who know other programs: the message names what they meant."""

from __future__ import annotations

import pytest

from rapidformer_templates.commands import doctor
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES

RUN = "--task causal_lm --model-type gpt2 --lr 1e-3 --epochs 1 --no-save"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{RUN} --device gpu", "did you mean cuda?"),
        (f"{RUN} --device metal", "did you mean mps?"),
        ("job.yaml", "did you mean rapidformer --config job.yaml?"),
        ("train.py", "did you mean rapidformer --user-script train.py?"),
        (f"{RUN} --cutoff_len 8", "did you mean --seq-length?"),
        (f"{RUN} --sequence_len 8", "did you mean --seq-length?"),
        (f"{RUN} --finetuning_type lora", "did you mean --lora-rank 8? for adapters"),
        (f"{RUN} --sample_packing true", "did you mean --pack-sequences?"),
        (f"{RUN} --beta 0.1", "did you mean --preference-beta?"),
        (f"{RUN} --hub_model_id me/model", "did you mean --push-to-hub ORG/NAME?"),
        (f"plan {RUN} --validation-fraction 5", "--validation-fraction"),
        (f"plan {RUN} --lora-rank 2 --lora-alpha -1", "--lora-alpha"),
    ],
)
def test_the_message_names_what_was_meant(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_doctor_lists_only_packages_that_something_uses() -> None:
    assert [name for name in OPTIONAL_PACKAGES if not doctor.serves(name)] == []
