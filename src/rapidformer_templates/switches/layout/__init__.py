"""The layout of a model over workers: tensor, sequence, context and pipeline parallelism, and divided experts."""
