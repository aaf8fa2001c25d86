"""ZeRO by DeepSpeed, and DeepSpeed files."""
