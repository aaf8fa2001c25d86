"""Mixture of experts: sparse gated feed-forwards in place of dense ones, and their losses.

``gate`` chooses the experts, ``experts`` computes them, ``layer`` puts both together, ``convert`` puts layers
into a model, ``transformers_mixtures`` takes in the mixtures that transformers has itself, ``losses`` brings
the balance and z losses into the gradient, ``expert_parallel`` divides the experts over the workers.
"""
