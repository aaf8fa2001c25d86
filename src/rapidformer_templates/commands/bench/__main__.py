"""``python -m rapidformer_templates.commands.bench``: the same as ``rapidformer bench``."""

from __future__ import annotations

import sys

from rapidformer_templates.commands.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
