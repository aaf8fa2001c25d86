"""A small job, for torchrun."""

from tests.support.jobs import CausalJob

if __name__ == "__main__":
    CausalJob.main()
