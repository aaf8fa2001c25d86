"""``rapidformer bench NAME``: measures the user's machine (docs/bench.md). More peers are in ``benchmarks/``."""
