"""The upload of an exported model to the Hugging Face hub: what is checked before the run, and the upload itself.

This module does not import torch.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.hub import NAME, log_in_hint, reason

FLAG = "--push-to-hub"


def check_push(config: RunConfig) -> None:
    """Check that something will be uploaded, that the repository has a valid name, and that there is a token.

    Raises:
        ConfigError: one of them is missing.
    """
    name = config.training.push_to_hub
    if name is None:
        return
    from huggingface_hub import get_token

    if not config.training.export_model:
        raise ConfigError("--no-export-model leaves nothing to upload", where=FLAG, hint="leave out one of them")
    if not NAME.fullmatch(name) or "/" not in name or re.search(r"--|\.\.|[-.]$|\.git$", name):
        hint = "write ORG/NAME: your user name or an organization, and letters, digits, - _ ."
        raise ConfigError(f"'{name}' is not the name of a repository", where=FLAG, hint=hint)
    if get_token() is None:
        raise ConfigError("an upload to the hub needs a token that may write", where=FLAG, hint=log_in_hint())


def create_repository(config: RunConfig) -> None:
    """Create the repository before the first step if it does not exist, which also shows that the token may write.

    Raises:
        ConfigError: the token may not write, or the hub cannot be reached.
    """
    if config.training.push_to_hub is not None:
        create(config.training.push_to_hub)


@cache
def create(name: str) -> None:
    """Create a repository. Several checks of a process come here, and only the first one asks the hub."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        user = HfApi().whoami()
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise ConfigError(f"the token of {user['name']} may only read", where=FLAG, hint=log_in_hint())
        HfApi().create_repo(name, exist_ok=True)
    except ConfigError:
        raise
    except HfHubHTTPError as error:
        reasons = {401: "the hub does not accept the token", 403: f"the token may not write to {name}"}
        message = reasons.get(error.response.status_code, f"{name} cannot be created: {reason(error)}")
        raise ConfigError(message, where=FLAG, hint=log_in_hint()) from None
    except Exception as error:  # of the HTTP client
        message = "HF_HUB_OFFLINE is set, so nothing can be uploaded"
        if not constants.is_offline_mode():
            message = f"{constants.ENDPOINT} cannot be reached: {reason(error)}"
        hint = f"leave the flag out, and upload the export later: hf upload {name} RUN/export ."
        raise ConfigError(message, where=FLAG, hint=hint) from None


def push_export(name: str, export: Path, step: int) -> str:
    """Upload the exported model. A failure does not end the run, because the export is complete.

    Returns:
        The line for the user: where the model is, or what failed and how to upload it again.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=export, commit_message=f"Upload the export of step {step}")
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds, and the run must not be lost
        return (
            f"error: the export was not uploaded to {name}: {reason(error)}\n  where  {export}, which is complete\n"
            f"  help   upload it again with: hf upload {name} {export} ."
        )
    return f"uploaded   {HfApi().endpoint}/{name}"
