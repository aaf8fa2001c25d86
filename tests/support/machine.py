"""Checks of what the machine can test."""


def why_no_nvme() -> str | None:
    """Return why NVMe offload is not tested, or None if it is.

    No test should build its compiled part, which takes minutes.
    """
    from rapidformer_templates.switches.zero.compiled_parts import folder, is_built, problems

    found = problems("async_io")
    if found or not is_built("async_io", folder("cpu")):
        return found or "DeepSpeed's async_io is not built: rapidformer doctor --build async_io"
    return None
