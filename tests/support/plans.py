"""The output of ``rapidformer plan --json``."""

import contextlib
import io
import json
import os
import shlex
from typing import Any
from unittest import mock

from rapidformer_templates.commands.main import main


def planned(flags: str, gigabytes: float | None = None, status: int = 0) -> dict[str, Any]:
    """Return the plan of these flags as the command prints it.

    Args:
        gigabytes: memory of a device. None asks this machine.
        status: how the command must end.
    """
    memory, printed = {} if gigabytes is None else {"DEVICE_MEMORY_GB": str(gigabytes)}, io.StringIO()
    with mock.patch.dict(os.environ, memory), contextlib.redirect_stdout(printed):
        assert main(["plan", "--json", *shlex.split(flags)]) == status
    answer: dict[str, Any] = json.loads(printed.getvalue())
    return answer
