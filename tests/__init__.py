"""The tests. None of them uses the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it on import
