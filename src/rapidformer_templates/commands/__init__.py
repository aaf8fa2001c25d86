"""The commands of `rapidformer`."""
