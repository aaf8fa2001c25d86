"""A switch of rapidformer_templates in a package of its own: smaller gradients of the word embeddings.

They keep the training of large models from diverging; Zeng et al., GLM-130B, 2022.
"""
