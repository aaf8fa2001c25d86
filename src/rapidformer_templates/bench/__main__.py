"""``python -m rapidformer_templates.bench``: the same as ``rapidformer bench``."""

from __future__ import annotations

import sys

from rapidformer_templates.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
