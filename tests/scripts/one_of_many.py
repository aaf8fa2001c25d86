"""A small job, for torchrun."""

from tests.parity.jobs import CausalJob

if __name__ == "__main__":
    CausalJob.main()
