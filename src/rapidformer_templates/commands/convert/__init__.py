"""``rapidformer convert``: configurations of other trainers become YAML files of this library."""
