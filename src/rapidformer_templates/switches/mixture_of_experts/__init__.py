"""Mixture of experts: sparse gated feed-forwards instead of dense ones, and their losses.

``layer`` has the gate, which chooses the experts, and the experts, and handles the mixtures of transformers itself.
``transform`` puts sparse layers into a model, and marks and reads saved ones. ``losses`` adds the balance and z losses
to the gradient.
"""
