"""Receipt of torch.compile: graphs, seconds, where graphs broke, and why blocks were compiled again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch._dynamo.utils import counters, get_compilation_metrics, set_compilation_metrics_limit

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt

RECORDS = 4096  # torch keeps the last 64 by default, fewer than a large model may need


class CompileRecords:
    """Reads torch's own records, starting from its creation.

    Args:
        backend: name of the compiler.
        regions: number of modules that are compiled separately.
        limit: highest number of graphs for one piece of code.
    """

    def __init__(self, backend: str, *, regions: int, limit: int) -> None:
        self._settings = {"backend": backend, "regions": regions, "limit": limit}
        set_compilation_metrics_limit(RECORDS)
        self._earlier = {id(record): record for record in get_compilation_metrics()}
        self._breaks = Counter(counters["graph_break"])
        self._graphs = counters["stats"]["unique_graphs"]

    def measured(self) -> dict[str, object]:
        """Return the entry for ``summary.json``.

        Returns:
            ``graphs``: number of compiled graphs. ``seconds``: time that this took. ``graph_breaks`` and
            ``recompilations``: how often each reason occurred. ``not_compiled``: why some code runs
            uncompiled, such as the ``limit`` of graphs for one piece of code.
        """
        records = [record for record in get_compilation_metrics() if id(record) not in self._earlier]
        return {
            **self._settings,
            "graphs": counters["stats"]["unique_graphs"] - self._graphs,
            "seconds": round(sum(record.duration_us or 0 for record in records) / 1e6, 3),
            "graph_breaks": _counted((Counter(counters["graph_break"]) - self._breaks).items()),
            "recompilations": _counted(Counter(r.recompile_reason for r in records if not r.fail_reason).items()),
            "not_compiled": _counted(Counter(r.fail_reason for r in records).items()),
        }


class Compilation(Receipt):
    """Reports ``compile``: the records of the model's blocks.

    Each number and reason has its maximum over all workers.
    """

    compiles = True

    def after_step(self, engine: Engine) -> dict[str, object]:
        records = engine.assembly.find(CompileRecords)
        return {"compile": records and _most(engine.workers.gather(records.measured()))}


def _most(of_workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the highest value of each entry.

    Stages have different blocks, and copies of a block break in the same way.
    """
    keys = dict.fromkeys(key for measured in of_workers for key in measured)
    values = {key: [measured[key] for measured in of_workers if key in measured] for key in keys}
    return {key: _most(each) if isinstance(each[0], dict) else max(each) for key, each in values.items()}


def _counted(reasons: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    """Count each reason, shortened to its first line without the number of the graph that did not fit."""
    counts: Counter[str] = Counter()
    for reason, count in reasons:
        if reason:
            line = reason.strip().split("\n")[0]
            number, _, rest = line.partition(": ")
            has_number = rest and number.replace("/", "").isdecimal()
            counts[rest.split("  # ")[0].strip() if has_number else line] += count
    return dict(counts)
