"""This library beside its peers: ``python -m benchmarks NAME``; what each measures stands in docs/benchmarks.md."""
