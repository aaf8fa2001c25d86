"""Pipeline parallelism: the blocks of a model are cut into stages."""
