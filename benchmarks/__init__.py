"""Compare this library with its peers: ``python -m benchmarks NAME``. benchmarks/README.md explains each one."""
