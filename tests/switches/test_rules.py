"""Every rule has a request that breaks it, and the nearest ones that do not. Up to three switches have a way out."""

import dataclasses
import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rapidformer_templates.commands.catalogue import example_request
from rapidformer_templates.commands.plan import PlanFlags
from rapidformer_templates.errors import ModelError, Refused
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY, Registry, switch_options
from rapidformer_templates.planning.resolve import Path as Way
from rapidformer_templates.planning.resolve import nearest, resolve, to_suggestion
from rapidformer_templates.planning.switch import TEMPLATES, Request, Rule
from tests.support.messages import Says
from tests.support.requests import CPU, GPUS, codes, config_of, on, with_switches, without_rule
from tests.support.selection import by_default


@pytest.mark.parametrize("rule", REGISTRY.all_rules, ids=lambda rule: rule.code)
def test_example_breaks_its_rule_and_only_as_long_as_the_rule_is_there(rule: Rule) -> None:
    request = example_request(rule)

    def told(without: bool) -> set[str]:
        registry = without_rule(rule.code) if without else REGISTRY
        try:
            plan = resolve(request.config, request.environment, registry, training=request.training)
        except Refused as refused:
            return {found.rule for found in refused.diagnostics}
        return set(plan.notes)

    if rule.refuses:
        assert rule.code in told(without=False)
        assert rule.code not in told(without=True)
    else:
        assert rule.check(request)  # test_flash_attention_notes_padding checks the note itself


REQUESTS = tomllib.loads(Path(__file__).with_name("requests.toml").read_text(encoding="utf-8"))


def _read(row: list[Any]) -> tuple[Any, ...]:
    """Return (rule, flags, machine), or (flags, machine) of a request that is accepted."""
    *first, place = row if isinstance(row[-1], str) else row[:-1]
    facts = {} if isinstance(row[-1], str) else {name: None if x == "none" else x for name, x in row[-1].items()}
    if "all_packages_and" in facts:
        facts["packages"] = {**GPUS.packages, **facts.pop("all_packages_and")}
    if isinstance(facts.get("compute_capability"), list):
        facts["compute_capability"] = tuple(facts["compute_capability"])
    return *first, on({"cpu": CPU, "gpus": GPUS}[place], **facts)


REFUSED, ACCEPTED = ([_read(row) for row in REQUESTS[name]] for name in ("refused", "accepted"))
SCHEDULES = [  # ways to break RF099 whose way out was empty or incomplete
    "--lr-warmup-iters 50 --lr-decay-iters 5 --train-iters 10",
    "--lr-warmup-samples 100 --lr-decay-iters 5",
    "--lr 1e-4 --min-lr 1e-4 --lr-decay-style polynomial",
    "--epochs 3 --micro-batch-size 1 --global-batch-size 16 --lr-warmup-iters 9 --lr-decay-iters 1",
]


@pytest.mark.parametrize(("code", "flags", "place"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(code: str, flags: str, place: object) -> None:
    assert code in codes(flags, place)  # type: ignore[arg-type]
    assert code not in codes(flags, place, without_rule(code))  # type: ignore[arg-type]


@pytest.mark.parametrize(("flags", "place"), ACCEPTED, ids=lambda x: x if isinstance(x, str) else "")
def test_accepted(flags: str, place: object) -> None:
    assert codes(flags, place) == []  # type: ignore[arg-type]


def follow(change: str, words: list[str], place: Environment) -> tuple[list[str], Environment]:
    """Return a command after a printed suggestion, followed as a reader would."""
    template = re.search(r"class MyTask\((\w+)\)", change)
    if template:
        return follow(change.replace(template[0], ""), words, on(place, template=template[1]))
    if change.startswith("rapidformer "):
        return [word for word in shlex.split(change)[1:] if word != "plan"], place
    more, _, off = change.partition("without ")
    added = shlex.split(more)
    names = {word for word in (*added, *off.split()) if word.startswith("--")}
    switches = [switch for switch in REGISTRY.switches if any(spelling(name) in added for name in switch.on)]
    families = {switch.family for switch in switches if switch.family}
    names |= {spelling(name) for s in REGISTRY.switches if s.family in families and s not in switches for name in s.on}
    kept, is_named = list[str](), False
    for word in words:
        is_named = word in names if word.startswith("--") else is_named
        kept += [] if is_named else [word]
    if "--template" in added:
        place = on(place, template=added[added.index("--template") + 1])
    if "--device" in added:
        place = on(place, device="cpu", compute_capability=None)
    return kept + added, place


EXAMPLES = [(rule.example, example_request(rule).environment, False) for rule in REGISTRY.all_rules if rule.refuses]
WORKS = {
    "the rules' examples": EXAMPLES,
    "schedules": [(flags, CPU, training) for flags in SCHEDULES for training in (False, True)],
    "examples that train": [(flags, place, True) for flags, place, _ in EXAMPLES],
    "other ways to break a rule": [(flags, place, True) for _, flags, place in REFUSED],
}


@pytest.mark.parametrize("name", by_default(["the rules' examples", "schedules"], WORKS))
def test_every_printed_way_out_works(name: str) -> None:
    followed = 0
    for flags, place, training in WORKS[name]:
        given = parse(shlex.split(flags), switch_options(), user=PlanFlags)
        try:
            resolve(dataclasses.replace(given, user=None), place, training=training)
        except Refused as refused:
            for suggestion in {s for found in refused.diagnostics for s in found.works}:
                words, new_place = follow(suggestion.change, shlex.split(flags), place)
                words = ["3" if word == "N" else word for word in words]
                config = dataclasses.replace(parse(words, switch_options(), user=PlanFlags), user=None)
                if "{" in (config.get("deepspeed_config") or ""):  # JSON, whose values a command adopts; not a file
                    config = REGISTRY.merge_files(config)
                assert suggestion.change, flags
                assert codes(config, new_place, training=training) == [], f"{flags}: {suggestion.change}"
                followed += 1
    assert followed > len(WORKS[name])


def test_training_asks_for_what_a_plan_may_leave_open() -> None:
    assert codes("", CPU, training=False) == []
    assert codes("", CPU, training=True) == ["RF015", "RF031", "RF100"]
    place = on(GPUS, compute_capability=None)
    assert codes("--device cuda", place, training=True) == ["RF015", "RF024", "RF031", "RF100"]
    assert codes("--lr 1e-4 --train-iters 3 --save run", CPU, training=True) == []


def test_flash_attention_notes_padding() -> None:
    note = "flash-attention: batches with padding use the memory-efficient kernel"
    config = config_of("--use-flash-attn --task sequence_classification")
    assert note in resolve(config, GPUS, REGISTRY).notes
    assert note not in resolve(config, GPUS, without_rule("RF013")).notes
    assert note not in resolve(config_of("--use-flash-attn --task pretraining"), GPUS, REGISTRY).notes


def test_sizes_are_read_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"n_layer": 6, "n_head": 12, "n_embd": 768, "n_positions": 256}))
    folder = f"--pretrained-model-name-or-path {tmp_path}"
    assert "RF010" in codes(f"{folder} --pipeline-model-parallel-size 4", GPUS)
    assert "RF010" in codes(f"{folder} --tensor-model-parallel-size 8", GPUS)
    assert codes(f"{folder} --seq-length 300", CPU) == ["RF033"]
    assert codes(f"{folder} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 4", GPUS) == []


def test_experts_are_read_from_the_model_folder(tmp_path: Path) -> None:
    folder = f"--pretrained-model-name-or-path {tmp_path}"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert codes(f"{folder} --num-experts 8", CPU) == ["RF070"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    assert "mixture-of-experts" in resolve(config_of(folder), CPU, REGISTRY).switches
    assert codes(f"{folder} --num-experts 8", CPU) == []
    assert codes(f"{folder} --num-experts 4", CPU) == ["RF070"]
    assert codes(f"{folder} --num-experts 8 --moe-top-k 1", CPU) == ["RF071"]


def test_broken_model_config_is_named(tmp_path: Path, says: Says) -> None:
    (tmp_path / "config.json").write_text("{")
    with says(ModelError):
        resolve(config_of(f"--pretrained-model-name-or-path {tmp_path}"), CPU)


def test_every_broken_rule_is_told_at_once() -> None:
    flags = "--tf32 --zero-2-memory-optimization --fsdp-memory-optimization --global-batch-size 3"
    assert codes(flags, on(CPU, template="Finetuner"), REGISTRY) == ["RF002", "RF008", "RF018", "RF023", "RF030"]


# Flags that act only with another flag, and switches that exclude each other.

COMPANIONS = [
    (declared, *declared.metadata["only_with"])
    for declared in REGISTRY.complete(RunConfig()).fields()
    if declared.metadata.get("only_with")
]


def _value(declared: dataclasses.Field[Any]) -> Any:
    """Return a value of the field that is not its default."""
    if declared.default is False:
        return True
    words = {"pipeline_stages": "1,1", "lora_target_modules": "q_proj", "lora_modules_to_save": "head"}
    words |= {"lora_variant": "dora", "quantize_base": "half", "fp8_filter": "gate"}
    words |= {"data_parallel_sharding_strategy": "optim_grads"}
    return words.get(declared.name) or {None: 1, 1: 2, 3: 4, 0.0: 0.5, "fp32": "bf16"}[declared.default]


@pytest.mark.parametrize(("declared", "other", "value"), COMPANIONS, ids=lambda x: getattr(x, "name", ""))
def test_flag_that_acts_only_with_another_is_refused_alone(
    declared: dataclasses.Field[Any], other: str, value: Any
) -> None:
    alone = REGISTRY.complete(RunConfig()).replace("test", **{declared.name: _value(declared)})
    with pytest.raises(Refused) as refused:
        resolve(alone, CPU)
    [found] = [each for each in refused.value.diagnostics if each.rule == "RF034"]
    assert found.message == f"{spelling(declared.name)} has no effect without {spelling(other)}"
    assert "RF034" not in codes(alone.replace("test", **{other: value}), CPU)


def test_one_expert_is_a_mixture() -> None:
    assert codes("--num-experts 1 --moe-top-k 1", CPU) == []


# Up to three switches × three templates: accepted, or refused with reasons and an accepted alternative.

NAMES = [switch.name for switch in REGISTRY.switches]
UP_TO_PAIRS = [names for size in range(3) for names in itertools.combinations(NAMES, size)]
TRIPLES = list(itertools.combinations(NAMES, 3))


PLACES = {"CPU": CPU, "GPUs": GPUS}


def _all_have_a_way(place: str, template: str, combinations: list[tuple[str, ...]]) -> None:
    there = on(PLACES[place], template=template, template_origin="train.py:8")
    accepted = [_is_accepted_or_mended(names, there) for names in combinations]
    assert sum(accepted) >= 22, "the rules refuse nearly everything"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", by_default(["GPUs"], PLACES))
def test_every_pair_is_accepted_or_mended(place: str, template: str) -> None:
    """Templates differ in the switches that they accept. Pairs show these differences."""
    _all_have_a_way(place, template, UP_TO_PAIRS)


@pytest.mark.parametrize("template", by_default([], TEMPLATES, {*TEMPLATES} - {"Trainer"}))
def test_every_triple_is_accepted_or_mended(template: str) -> None:
    _all_have_a_way("GPUs", template, TRIPLES)


def _is_accepted_or_mended(names: tuple[str, ...], place: Environment) -> bool:
    config = with_switches(names)
    searched: list[tuple[Request, list[Way]]] = []

    def search(request: Request, registry: Registry) -> list[Way]:
        searched.append((request, nearest(request, registry)))
        return searched[-1][1]

    try:
        with mock.patch("rapidformer_templates.planning.resolve.nearest", search):
            plan = resolve(config, place)
    except Refused as refused:
        ((request, paths),) = searched
        for found in refused.diagnostics:
            assert found.rule
            assert found.message
            assert found.why
            assert found.source
            assert found.works == tuple(to_suggestion(path, request) for path in paths)
        assert paths
        for path in paths:
            mended, there = config, place
            for change in path:
                mended = mended.replace("suggestion", **change.values)
                there = dataclasses.replace(there, template=change.template or there.template)
            resolve(mended, there)  # raises when the suggestion is refused in turn
        return False
    assert set(names) <= set(plan.switches), "an accepted switch is active in the plan"
    return True


def test_all_switches_at_once_still_have_a_way_out() -> None:
    for registry, place in ((REGISTRY, CPU), (REGISTRY, GPUS)):
        with pytest.raises(Refused) as refused:
            resolve(with_switches(NAMES).replace("test", epochs=3, train_iters=4), place, registry)
        assert all(found.works for found in refused.value.diagnostics)
