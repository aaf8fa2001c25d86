"""``python -m rapidformer_templates`` is the ``rapidformer`` command."""

import sys

from rapidformer_templates.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
