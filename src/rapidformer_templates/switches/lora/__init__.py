"""Low-rank adapters on frozen weights, through peft."""
