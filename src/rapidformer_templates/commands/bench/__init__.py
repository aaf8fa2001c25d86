"""``rapidformer bench NAME``: what a user asks about his own machine; docs/bench.md. Peers: ``benchmarks/``."""
