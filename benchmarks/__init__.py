"""Compare this library with its peers: ``python -m benchmarks NAME``. docs/benchmarks.md explains each benchmark."""
