"""The measured values of a table, and how they are shown: as JSON, as printed tables with notes, and as a picture."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import rich.table

from rapidformer_templates.commands.bench.output import in_short, spread
from rapidformer_templates.commands.bench.runs import MeasuredRun
from rapidformer_templates.commands.bench.tables import Table
from rapidformer_templates.commands.bench.worker import StateReceipt
from rapidformer_templates.planning.optimizer_states import ParameterShape
from rapidformer_templates.switches.auto_strategy.state_bytes import StateBytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL = 1.0
"""Goal for the ratio of this library's samples/s to a peer's."""

ALLOWED = 0.01
"""Relative deviation from the formula that needs no explanation."""

WHY_DIFFERENT = {
    "oss": "each parameter is whole on its owner, so the shares are uneven",
    "oss-sdp": "each parameter is whole on its owner, so the shares are uneven",
    "zero-1": "DeepSpeed keeps the whole gradient of a parameter that two workers share",
    "zero-2": "DeepSpeed keeps the whole gradient of a parameter that two workers share",
    "zero-3": "parameters of at most 10 × the width are kept whole in addition to their parts",
    "zero-3-offload": "gradients are held twice: as they are reduced, and for the update on the host",
    "zero-3-nvme": "masters and moments are on the disk; only what passes through memory is held",
}
"""Reasons why the bytes of a solution differ from even shares."""


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
    runs: dict[str, list[MeasuredRun]] = field(default_factory=dict)
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

    def memory_mb(self, name: str, when: Literal["before_mb", "setup_mb"]) -> float:
        """Return the highest ``before_mb`` or ``setup_mb`` of all workers and repeats. See :class:`Figures`."""
        return max(worker[when] for run in self.runs[name] for worker in run.figures)

    def state_bytes(self, name: str) -> list[StateBytes]:
        """Return the bytes that each worker holds, according to the receipts of the first run."""
        return [
            StateBytes(rank["parameter_bytes"], rank["gradient_bytes"], rank["optimizer_state_bytes"])
            for rank in self._receipts(name)
        ]

    def bucket_bytes(self, name: str) -> int:
        """Return the size of the buckets in which gradients wait to be sent, in bytes."""
        return max(rank.get("bucket_bytes", 0) for rank in self._receipts(name))

    def _receipts(self, name: str) -> list[StateReceipt]:
        return self.runs[name][0].figures[0]["states"] or []

    def ratios(self, solution: str, peer: str) -> list[float]:
        """Return the ratio of this library's speed to a peer's, for each repeat.

        It is the median over the turns, in which both alternate.
        """
        return [
            statistics.median(b / a for a, b in zip(own_run.seconds, peer_run.seconds, strict=True))
            for own_run, peer_run in zip(self.runs[solution], self.runs[peer], strict=True)
        ]

    def to_json(self) -> dict[str, object]:
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

    def _row(self, name: str) -> dict[str, object]:
        row: dict[str, object] = {
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


def table(report: Report) -> rich.table.Table:
    """Return the printed tables, one below the other: speed and memory, bytes held, and the peers."""
    whole = rich.table.Table.grid()
    for part in (_solutions(report), _bytes(report), _peers(report)):
        if part.row_count:
            whole.add_row(part)
            whole.add_row("")
    return whole


def _table(title: str, first: str, *headings: str) -> rich.table.Table:
    grid = rich.table.Table(title=title, title_justify="left")
    grid.add_column(first)
    for heading in headings:
        grid.add_column(heading, justify="right")
    return grid


def _solutions(report: Report) -> rich.table.Table:
    scale = report.of.scales[report.scale]
    shape = f"{scale.layers} layers, hidden {scale.hidden}, {report.count:,} parameters, {scale.length} tokens"
    batches = f"micro batch {scale.micro_batch}, global batch {report.global_batch}"
    grid = _table(
        f"{scale.kind.upper()}, {shape}, {batches}, {report.workers} × {report.device}",
        "solution",
        "samples/s",
        "peak MB per worker",
        "until 1st step",
        "without model",
        "utilisation",
        "published",
        "peak MB",
    )
    for name, solution in report.of.solutions.items():
        published = solution.published
        reference = (published, "") if isinstance(published, str) else (f"{published[0]:.2f}", f"{published[1]:,}")
        if name in report.runs:
            grid.add_row(name, *_figures(report, name), *reference)
        elif name in report.absent:
            grid.add_row(name, "N/A", "", "", "", "", *reference)
    for name in report.runs:
        if name not in report.of.solutions:
            grid.add_row(name, *_figures(report, name), "", "")
    return grid


def _figures(report: Report, name: str) -> tuple[str, ...]:
    rates = report.rates(name)
    return (
        f"{report.samples_per_second(name):.2f} ± {spread(rates):.2f}",
        f"{report.peak_mb(name):,.0f}",
        f"{report.memory_mb(name, 'setup_mb'):,.0f}",
        f"{report.memory_mb(name, 'before_mb'):,.0f}",
        "" if (share := report.utilisation(name)) is None else f"{share:.3f}",
    )


def _bytes(report: Report) -> rich.table.Table:
    grid = _table(
        "bytes per parameter that a worker holds: parameters / gradients / optimizer state",
        "solution",
        "rank 0",
        "most",
        "should be (most)",
        "deviation",
        "bucket MB",
    )
    for name in report.expected:
        if name in report.runs:
            state, expected = report.state_bytes(name), report.expected[name]
            grid.add_row(
                name,
                _shares(state[0], report.count),
                _shares(_most(state), report.count),
                _shares(_most(expected), report.count),
                f"{deviation(state, expected):.2%}",
                f"{report.bucket_bytes(name) / 1e6:.0f}",
            )
    return grid


def _most(states: list[StateBytes]) -> StateBytes:
    """Return the highest value of each kind over all workers."""
    return StateBytes(
        max(h.parameters for h in states), max(h.gradients for h in states), max(h.optimizer for h in states)
    )


def _shares(state: StateBytes, count: int) -> str:
    return " / ".join(f"{share:.2f}" for share in state.per_parameter(count))


def deviation(measured: list[StateBytes], expected: list[StateBytes]) -> float:
    """Return the largest relative difference from the expected bytes, over all workers and kinds."""
    kinds = ("parameters", "gradients", "optimizer")
    pairs = [
        (getattr(one, kind), getattr(other, kind))
        for one, other in zip(measured, expected, strict=True)
        for kind in kinds
    ]
    return max(abs(a - b) / max(b, 1) for a, b in pairs)


def _peers(report: Report) -> rich.table.Table:
    grid = _table("samples/s over a peer's, median of paired steps, mean ± sd over repeats", "peer", "ours", "ratio")
    for name, peer in _compared(report):
        ratios = report.ratios(name, peer)
        grid.add_row(peer, name, f"{statistics.mean(ratios):.2f} ± {spread(ratios):.2f}")
    return grid


def _compared(report: Report) -> list[tuple[str, str]]:
    """Return (solution, peer) for all pairs that ran."""
    return [
        (name, peer)
        for name, solution in report.of.solutions.items()
        for peer in solution.peers
        if name in report.runs and peer in report.runs
    ]


def notes(report: Report) -> list[str]:
    """Return lines about the goals, the absent solutions and peers, and the reasons for differences."""
    lines = []
    for name, peer in _compared(report):
        ratio = statistics.mean(report.ratios(name, peer))
        verdict = "reached" if ratio >= GOAL else "missed"
        lines.append(f"{name}: {ratio:.2f} × {peer}; goal {GOAL:.1f} ×: {verdict}")
    for name, goal in ((name, report.of.utilisation.get(report.device)) for name in report.of.solutions):
        share = report.utilisation(name) if name in report.runs else None
        if goal and share is not None:
            verdict = "reached" if share >= goal else "missed"
            what = f"utilisation in {report.precision[name]}"
            lines.append(f"{name}: {what} {share:.3f} of a matrix product in it; goal {goal:.2f}: {verdict}")
    lines += [f"{name} did not run: {in_short(why)}" for name, why in report.absent.items()]
    for name, why in WHY_DIFFERENT.items():
        if name in report.runs and name in report.expected:
            lines.append(f"{name}: {why}")
    for name in report.runs:
        if name in report.expected and (far := deviation(report.state_bytes(name), report.expected[name])) > ALLOWED:
            lines.append(f"{name}: holds {far:.1%} more or less than its formula says")
    if report.device == "cpu":
        lines.append("peak MB is resident memory, the interpreter and its libraries included ('without model')")
    return [*lines, *report.of.notes]


def draw(axes: Axes, report: Report) -> None:
    """Draw two panels: the speed, and the memory before the model with the rest on top of it."""
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    axes.remove()
    own_names = [name for name in report.of.solutions if name in report.runs]
    names = own_names + [name for name in report.runs if name not in own_names]
    figure.set_size_inches(11, 1.2 + 0.32 * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    colours = ["tab:orange" if name in own_names else "tab:blue" for name in names]
    spreads = [spread(report.rates(name)) for name in names]
    speeds = left.barh(names, [report.samples_per_second(name) for name in names], xerr=spreads, color=colours)
    left.bar_label(speeds, fmt="%.2f", label_type="center", color="white", fontsize=8)
    left.set_xlabel("samples per second (orange: this library)")
    before = [report.memory_mb(name, "before_mb") for name in names]
    right.barh(names, before, color="lightgrey", label="without model")
    above = [report.peak_mb(name) - start for name, start in zip(names, before, strict=True)]
    peaks = right.barh(names, above, left=before, color=colours)
    right.bar_label(peaks, [f"{report.peak_mb(name):,.0f}" for name in names], padding=3, fontsize=8)
    right.set_xlabel("peak MB per worker (grey: before the model)")
    right.margins(x=0.12)
    left.invert_yaxis()
