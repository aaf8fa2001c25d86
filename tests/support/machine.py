"""Tests ask here what the machine can do."""

from __future__ import annotations


def why_no_nvme() -> str | None:
    """Why NVMe offload is not tested here: its compiled part takes minutes to build, which no test should."""
    from rapidformer_templates.switches.zero.build_tools import problems
    from rapidformer_templates.switches.zero.compiled_parts import folder, is_built

    found = problems("async_io")
    if found or not is_built("async_io", folder("cpu")):
        return found or "DeepSpeed's async_io is not built: rapidformer doctor --build async_io"
    return None
