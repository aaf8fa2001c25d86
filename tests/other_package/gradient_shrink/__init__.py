"""A switch for rapidformer_templates in a separate package: smaller gradients of the word embeddings.

They keep the training of large models from diverging. See Zeng et al., GLM-130B, 2022.
"""
