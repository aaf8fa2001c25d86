"""Benchmarks: ``rapidformer bench NAME``; what each measures stands in docs/benchmarks.md."""
