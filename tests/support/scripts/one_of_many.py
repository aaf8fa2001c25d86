"""A small job that torchrun starts."""

from tests.support.jobs import CausalJob

if __name__ == "__main__":
    CausalJob.main()
