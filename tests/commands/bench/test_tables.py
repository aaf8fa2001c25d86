"""Tables as data, and the command that measures them. The tests never check how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rapidformer_templates.commands.bench import measure
from rapidformer_templates.commands.bench.cli import EVIDENCE, command_first, main
from rapidformer_templates.commands.bench.job_peers import PEERS
from rapidformer_templates.commands.bench.measure import (
    MeasureRequest,
    _absence_reason,
    _chosen,
    cpu_is_fast_at_bf16,
    facts_of,
    precision_of,
)
from rapidformer_templates.commands.bench.report import Report
from rapidformer_templates.commands.bench.run import without_launch
from rapidformer_templates.commands.bench.runs import MeasuredRun
from rapidformer_templates.commands.bench.tables import (
    MIXED_PRECISION,
    PARALLEL,
    PARTITIONING,
    TABLES,
    UTILISATION,
    Table,
)
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import switch_options

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", TABLES)
def test_flags_and_peers_exist(name: str) -> None:
    for solution in TABLES[name].solutions.values():
        words = [*solution.flags, *(["/tmp"] if solution.flags[-1:] == ("--nvme-path",) else [])]
        parse(words, switch_options())
        assert set(solution.peers) <= set(PEERS)


def test_the_published_bert_has_its_parameters() -> None:
    assert sum(parameter.count for parameter in facts_of(MIXED_PRECISION.scales["paper"])) == 110_106_428


def test_layouts_keep_the_global_batch_whatever_divides_the_model(tmp_path: Path) -> None:
    request = MeasureRequest(PARALLEL, "small", 4, "cpu", list(PARALLEL.solutions), 1, 1)
    for name, solution in PARALLEL.solutions.items():
        job = request.job(name, None, tmp_path, 0)
        assert (job.global_batch, job.data) == (4, 4 // solution.divides)
        assert _absence_reason(request, name) is None
    fewer = MeasureRequest(PARALLEL, "small", 2, "cpu", [], 1, 1)
    assert _absence_reason(fewer, "tp 2, pp 2") == "one copy of the model needs 4 workers, but there are 2"


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_every_solution_can_be_asked_for(table: Table) -> None:
    names = list(table.solutions)
    assert [_chosen(name, table) for name in names] == [[name] for name in names]
    assert _chosen(f"{names[-1]}, {names[0]}", table) == list(dict.fromkeys([names[0], names[-1]]))
    with pytest.raises(ConfigError, match="there is no solution nothing of the kind"):
        _chosen(f"{names[0]}, nothing of the kind", table)


def test_a_cpu_leaves_out_what_it_is_slow_at() -> None:
    request = MeasureRequest(UTILISATION, "tiny", 1, "cpu", [], 1, 1)
    assert "--all" in str(_absence_reason(request, "rapidformer, compiled"))
    assert _absence_reason(request, "rapidformer") is None


@pytest.mark.parametrize(
    ("instructions", "kinds"),
    [
        ({"avx512_bf16": True}, ["bf16", "fp32", "bf16"]),
        ({"avx512_bf16": False, "avx2": True}, ["fp32", "fp32", "bf16"]),
    ],
)
def test_a_cpu_computes_in_bf16_where_it_has_instructions_for_it(
    instructions: dict[str, bool], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    monkeypatch.setattr(measure, "cpu_is_fast_at_bf16", cpu_is_fast_at_bf16.__wrapped__)
    solutions = UTILISATION.solutions["rapidformer"], PARTITIONING.solutions["fsdp"], PARTITIONING.solutions["mixed"]
    assert [precision_of(solution, "cpu") for solution in solutions] == kinds
    refused = _absence_reason(MeasureRequest(PARTITIONING, "tiny", 2, "cpu", [], 1, 1), "mixed")
    assert (refused is None) == instructions["avx512_bf16"]


def test_utilisation_is_of_the_turns_and_what_was_measured_around_them() -> None:
    report = Report(UTILISATION, "tiny", 2, "cpu", flops=10.0, global_batch=4)
    report.runs["rapidformer"] = [MeasuredRun([1.0, 2.0], peaks=[80.0, 40.0])]  # 40 FLOP per step
    assert report.utilisation("rapidformer") == pytest.approx(0.5)
    report.device = "cuda"  # two devices
    assert report.utilisation("rapidformer") == pytest.approx(0.25)
    report.runs["rapidformer"] = [MeasuredRun([1.0])]
    assert report.utilisation("rapidformer") is None


def test_a_table_is_a_command() -> None:
    for words in (
        ["--table", "mfu", "--scale", "tiny"],
        ["--scale", "tiny", "--table=mfu"],
        ["mfu", "--scale", "tiny"],
    ):
        assert command_first(words) == ["mfu", "--scale", "tiny"]


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_is_asked_for_in_a_checkout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "benchmarks" / f"{name.replace('-', '_')}.py").exists()
    assert main([name, "--output", "results"]) == 2
    assert capsys.readouterr().err == (
        f"error: {name} is evidence for docs/benchmarks.md, which comes with the repository and not with the package\n"
        f"  where  rapidformer bench {name}\n"
        f"  help   in the root of a checkout: python -m benchmarks {name} --output results\n"
    )


def test_unknown_scales_tables_and_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mfu", "--scale", "huge"]) == 2
    assert "mfu has no scale huge" in capsys.readouterr().err
    for words, message in ((["--table", "nothing"], "invalid choice: 'nothing'"), (["mfu", "--nothing"], "--nothing")):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main(["run", "--task", "causal_lm", "--epochs", "3"]) == 2
    assert "--epochs is not a flag of a measured run" in capsys.readouterr().err


def test_the_benchmark_starts_the_workers_itself() -> None:
    words = ["--lr", "1", "--nproc-per-node", "2", "--tf32", "--nproc_per_node=2"]
    assert without_launch(words) == ["--lr", "1", "--tf32"]


@pytest.mark.longer
def test_utilisation_is_measured_beside_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--table", "mfu", "--scale", "tiny", "--device", "cpu", "--repeats", "1", "--steps", "2"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "mfu.json").read_text())
    rows = result["solutions"]
    assert set(rows) == {"rapidformer", *UTILISATION.solutions["rapidformer"].peers}
    assert all(0 < row["utilisation"] < 2 for row in rows.values())
    assert {row["precision"] for row in rows.values()} == {"bf16" if cpu_is_fast_at_bf16() else "fp32"}
    losses = [row["loss"][0] for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-3 if cpu_is_fast_at_bf16() else 1e-4)
    assert (tmp_path / "mfu.png").stat().st_size > 0
    assert "utilisation" in capsys.readouterr().out


@pytest.mark.slow
def test_one_configuration_is_measured(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": f"line {i} says that {i} is a number among others", "label": i % 2}) for i in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "line", "says", "a"]))
    flags = [
        *("--task", "sequence_classification", "--model-type", "bert", "--num-layers", "1", "--hidden-size", "16"),
        *("--num-attention-heads", "2", "--seq-length", "16", "--data-dir", str(tmp_path), "--data-name", "train"),
        *("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(tmp_path / "vocab.txt")),
        *("--lr", "1e-3", "--micro-batch-size", "4", "--device", "cpu"),
    ]
    assert main(["run", "--turns", "2", "--json", str(tmp_path / "run.json"), *flags]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["samples_per_second"] > 0
    assert len(result["seconds"]) == 2
    assert 0 < result["utilisation"] < 2
    assert result["plan"]["sizes"]["global_batch"] == 4
