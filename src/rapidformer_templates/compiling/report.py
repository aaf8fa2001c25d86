"""What torch.compile did in a run: graphs, seconds, where graphs broke and why blocks were compiled again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch._dynamo.utils import counters, get_compilation_metrics, set_compilation_metrics_limit

RECORDS = 4096  # torch keeps the last 64 by default, fewer than a large model may need


class CompileReport:
    """Reads torch's own records, from the moment that it is made.

    Args:
        backend: name of the compiler.
        regions: modules that are compiled each by itself.
        limit: most graphs of one piece of code.
    """

    def __init__(self, backend: str, *, regions: int, limit: int) -> None:
        self._asked = {"backend": backend, "regions": regions, "limit": limit}
        set_compilation_metrics_limit(RECORDS)
        self._earlier = {id(record): record for record in get_compilation_metrics()}
        self._breaks = Counter(counters["graph_break"])
        self._graphs = counters["stats"]["unique_graphs"]

    def measured(self) -> dict[str, Any]:
        """For ``summary.json``.

        Returns:
            ``graphs``: how many were compiled; ``seconds`` that took; ``graph_breaks`` and
            ``recompilations``: how often each reason was met; ``limit``: most graphs of one piece of
            code, and ``limit_reached``: how often it was asked for more, which then ran as it was.
        """
        records = [record for record in get_compilation_metrics() if id(record) not in self._earlier]
        compiled_again = Counter(_short(r.recompile_reason) for r in records if r.recompile_reason)
        breaks = Counter(counters["graph_break"]) - self._breaks
        reached = {reason for reason in breaks if "recompile limit" in reason}
        return {
            **self._asked,
            "graphs": counters["stats"]["unique_graphs"] - self._graphs,
            "seconds": round(sum(record.duration_us or 0 for record in records) / 1e6, 3),
            "graph_breaks": {_short(reason): count for reason, count in breaks.items() if reason not in reached},
            "recompilations": dict(compiled_again),
            "limit_reached": sum(breaks[reason] for reason in reached),
        }


def _short(reason: str) -> str:
    """The first line of a reason, without the number of the graph that did not fit."""
    line = reason.strip().split("\n")[0]
    number, _, rest = line.partition(": ")
    return rest.split("  # ")[0].strip() if rest and number.replace("/", "").isdigit() else line
