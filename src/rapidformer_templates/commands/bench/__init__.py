"""``rapidformer bench``: measures the user's machine (docs/bench.md). Comparisons are in ``benchmarks/``."""
