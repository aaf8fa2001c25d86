"""Benchmarks: ``rapidformer bench overhead``, ``peers`` and ``faults``. See docs/benchmarks.md."""
