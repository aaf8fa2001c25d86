"""The measured values of a table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from rapidformer_templates.commands.bench.output import spread
from rapidformer_templates.commands.bench.runs import Run
from rapidformer_templates.commands.bench.tables import Table
from rapidformer_templates.switches.auto_strategy.state_bytes import ParameterShape, StateBytes


@dataclass
class Report:
    """The measured values of a table.

    Attributes:
        of: the table.
        scale, workers, device: scale, number of workers and device of the runs.
        parameters: facts of the model's parameters.
        precision: for each solution, the precision of its runs and those of its peers.
        flops: model FLOPs per sample.
        runs: for each solution or peer, one run per repeat.
        absent: solutions and peers that could not run here, with the reason.
        failed: solutions of this library among them that should have run.
        expected: for each solution, the bytes that each worker should hold.
    """

    of: Table
    scale: str
    workers: int
    device: str
    parameters: list[ParameterShape] = field(default_factory=list)
    precision: dict[str, str] = field(default_factory=dict)
    flops: float = 0.0
    global_batch: int = 0
    runs: dict[str, list[Run]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    expected: dict[str, list[StateBytes]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(parameter.count for parameter in self.parameters)

    def rates(self, name: str) -> list[float]:
        """Return the samples/s of each turn in all repeats."""
        return [self.global_batch / seconds for run in self.runs[name] for seconds in run.seconds]

    def samples_per_second(self, name: str) -> float:
        seconds = [step for run in self.runs[name] for step in run.seconds]
        return self.global_batch * len(seconds) / sum(seconds)

    def utilisation(self, name: str) -> float | None:
        """Return the model FLOPs utilisation, or None if it was not measured.

        It is the median over all turns of the model FLOP/s divided by the FLOP/s of the matrix products around the
        turn. On a CPU, the workers share the machine on which the matrix product ran. Accelerators are not shared.
        """
        machines = 1 if self.device == "cpu" else self.workers
        step = self.flops * self.global_batch
        turns = [turn for run in self.runs[name] for turn in zip(run.seconds, run.peaks, strict=False)]
        return (
            statistics.median(step / seconds / peak / machines for seconds, peak in turns) if turns and step else None
        )

    def peak_mb(self, name: str) -> float:
        """Return the highest peak memory of all workers and repeats, in MB."""
        return max(run.peak_mb for run in self.runs[name])

    def memory_mb(self, name: str, when: str) -> float:
        """Return the highest ``before_mb`` or ``setup_mb`` of all workers and repeats. See :class:`Run`."""
        return max(float(worker[when]) for run in self.runs[name] for worker in run.figures)

    def state_bytes(self, name: str) -> list[StateBytes]:
        """Return the bytes that each worker holds, according to the receipts of the first run."""
        ranks = self.runs[name][0].figures[0]["held"]
        kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
        return [StateBytes(*(int(rank[kind]) for kind in kinds)) for rank in ranks]

    def bucket_bytes(self, name: str) -> int:
        """Return the size of the buckets in which gradients wait to be sent, in bytes."""
        return max(int(rank.get("bucket_bytes", 0)) for rank in self.runs[name][0].figures[0]["held"])

    def ratios(self, solution: str, peer: str) -> list[float]:
        """Return the ratio of this library's speed to a peer's, for each repeat.

        It is the median over the turns, in which both alternate.
        """
        return [
            statistics.median(b / a for a, b in zip(own_run.seconds, peer_run.seconds, strict=True))
            for own_run, peer_run in zip(self.runs[solution], self.runs[peer], strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        pairs = [(name, peer) for name, solution in self.of.solutions.items() for peer in solution.peers]
        return {
            "scale": self.scale,
            "workers": self.workers,
            "device": self.device,
            "parameters": self.count,
            "global_batch": self.global_batch,
            "flops_a_sample": self.flops,
            "solutions": {name: self._row(name) for name in self.runs},
            "ratios": {
                peer: self.ratios(name, peer) for name, peer in pairs if name in self.runs and peer in self.runs
            },
            "absent": self.absent,
            "failed": self.failed,
            "published": {name: solution.published for name, solution in self.of.solutions.items()},
        }

    def _row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "precision": self.precision[self.of.solution_of(name)],
            "samples_per_second": self.samples_per_second(name),
            "samples_per_second_sd": spread(self.rates(name)),
            "peak_mb": self.peak_mb(name),
            "before_mb": self.memory_mb(name, "before_mb"),
            "setup_mb": self.memory_mb(name, "setup_mb"),
            "utilisation": self.utilisation(name),
            "matrix_product_flops_per_second": [run.peaks for run in self.runs[name]],
            "seconds": [run.seconds for run in self.runs[name]],
            "loss": [run.figures[0]["loss"] for run in self.runs[name]],
        }
        if name in self.expected:
            row["held"] = [vars(state) for state in self.state_bytes(name)]
            row["expected"] = [vars(state) for state in self.expected[name]]
            row["bucket_bytes"] = self.bucket_bytes(name)
        return row
