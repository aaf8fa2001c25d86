"""ZeRO through DeepSpeed, and DeepSpeed files."""
