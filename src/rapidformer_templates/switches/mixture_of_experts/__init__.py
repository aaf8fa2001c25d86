"""Mixture of experts: sparse gated feed-forwards instead of dense ones, and their losses.

``gate`` chooses the experts, ``experts`` computes them, and ``layer`` combines both. ``convert`` puts sparse layers
into a model, and ``transformers_mixtures`` handles the mixtures of transformers itself. ``losses`` adds the balance and
z losses to the gradient.
"""
