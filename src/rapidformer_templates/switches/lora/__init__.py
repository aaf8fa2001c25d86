"""Low-rank adapters beside frozen weights, through peft."""
