"""Models by their name on the Hugging Face hub: from the local cache, else downloaded. Does not import torch.

``huggingface_hub`` does the work, so its environment variables apply: ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``,
``HF_HUB_OFFLINE``. A model in the cache is used without asking the hub for a newer commit. So a run that resumes starts
with the same weights, and a cluster without a network needs only the cache. A lock lets one process of a node download,
and the others wait for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rapidformer_templates.errors import DataError, HubUnreachable, ModelError, RapidformerError, alike
from rapidformer_templates.planning.flags import ModelFlags

NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
"""The form of a name on the hub: ``NAME`` or ``OWNER/NAME``."""

PRETRAINED = "--pretrained-model-name-or-path"

Part = Literal["config", "tokenizer", "weights"]
"""How much of a model is needed. The tokenizer includes the configuration, and the weights include both."""

BESIDE_ADAPTERS = "adapter_model_config.json"
"""The configuration of a model in a folder with its adapters only. See :func:`planning.request.config_file`."""

CONFIGS = ("config.json", "adapter_config.json", BESIDE_ADAPTERS)
TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Patterns of a model's files without its weights: configuration, tokenizer, chat template."""

VOCABULARIES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model", "*.tiktoken")
"""Patterns of files that every tokenizer has at least one of."""

SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "adapter_model.bin")
"""Patterns of weights in torch's format, which are downloaded only if there are no safetensors."""

LONGEST_NAME = 96
"""Number of characters that the hub allows in a name."""

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that list the shards of sharded weights."""


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form of a repository on the hub and is not a local path.

    ``models/bert`` is a path if there is a folder ``models``.
    """
    path = Path(name)
    if len(name) > LONGEST_NAME or NAME.fullmatch(name) is None:
        return False
    return not path.exists() and not (path.parent != Path() and path.parent.is_dir())


def cached_folder(name: str, revision: str | None, part: Part, *, code: bool = False) -> Path | None:
    """Return the folder in the cache that has this part of a model, or None. Nothing is downloaded.

    Args:
        code: whether the model's own code is needed, too, if it has any.
    """
    if not is_hub_name(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    for file in CONFIGS:
        cached = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str) and _has(Path(cached).parent, part):
            needs_code = code and '"auto_map"' in Path(cached).read_text(encoding="utf-8", errors="replace")
            return None if needs_code and not any(Path(cached).parent.glob("*.py")) else Path(cached).parent
    return None


def prepare_config(flags: ModelFlags) -> None:
    """Download the configuration of a model on the hub, which plans read. Does nothing for a folder.

    Raises:
        ModelError: it cannot be downloaded. A plan can go without it if the error is :class:`HubUnreachable`.
    """
    name = flags.pretrained_model_name_or_path
    if name is not None and not Path(name).exists() and is_hub_name(name):
        model_folder(name, flags.revision, "config", flag=PRETRAINED)


def config_is_unknown(flags: ModelFlags) -> bool:
    """Return whether the model is on the hub and its configuration is not in the cache."""
    name = flags.pretrained_model_name_or_path
    return name is not None and is_hub_name(name) and cached_folder(name, flags.revision, "config") is None


def _has(folder: Path, part: Part) -> bool:
    """Return whether a folder of the cache has a part. Weights are downloaded last, so they show that all is there."""
    has_tokenizer = any(next(folder.glob(pattern), None) for pattern in VOCABULARIES)
    return part == "config" or (has_tokenizer and (part == "tokenizer" or has_weights(folder)))


def has_weights(folder: Path) -> bool:
    """Return whether a folder has the weights of a model, with all shards if they are sharded."""
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if index is None:
        return any(next(folder.glob(pattern), None) for pattern in (*SAFETENSORS, *PICKLES))
    shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return all((folder / shard).is_file() for shard in set(shards.values()))


def model_folder(name: str, revision: str | None, part: Part, *, flag: str, code: bool = False) -> Path:
    """Return the folder of a model: the local folder, or the one in the cache. Download the model if there is none.

    Args:
        name: a folder, or a name on the hub.
        revision: branch, tag or commit. The default is the main branch.
        part: how much of it is needed.
        flag: the flag with the name, for messages.
        code: also download the model's own code, for ``--trust-remote-code``.

    Raises:
        ModelError: it is neither a folder nor in the cache, and it cannot be downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    if not is_hub_name(name):
        raise no_folder_error(name, flag)
    cached = cached_folder(name, revision, part, code=code)
    if cached is not None:
        return cached
    try:
        with only_one_process(name):
            return cached_folder(name, revision, part, code=code) or _download(name, revision, part, code=code)
    except Exception as error:  # the errors of huggingface_hub and of its HTTP client have no common class
        usable = cached_folder(name, revision, "config")
        if usable is not None and (part == "tokenizer" or has_weights(usable)):
            return usable  # the hub may have no tokenizer for it
        raise download_error(error, name, revision, flag=flag) from error


def no_folder_error(name: str, flag: str) -> ModelError:
    """Return the error for a path of a model that does not exist."""
    hint = _near(name) or "name a folder, or a model on the hub"
    return ModelError(f"there is no folder {name}", where=flag, hint=hint)


@contextmanager
def only_one_process(name: str) -> Iterator[None]:
    """Wait inside the context manager until no other process of this node downloads the same repository."""
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder = Path(constants.HF_HUB_CACHE, ".locks")
    folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder / f"rapidformer--{name.replace('/', '--')}.lock"):
        yield


def _download(name: str, revision: str | None, part: Part, *, code: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(name, revision=revision)  # raises the hub's own error, and lists the files
    files = [file.rfilename for file in info.siblings or () if "/" not in file.rfilename]
    texts = list(CONFIGS if part == "config" else TEXTS) + (["*.py"] if code else [])
    other_formats = ["*/*", "*.h5*", "*.msgpack*", *INDEXES[1:]]
    folder = cached_folder(name, revision, "tokenizer", code=code)
    if folder is None:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=texts, ignore_patterns=other_formats))
    if part == "weights":
        is_safe = any(Path(file).match(pattern) for file in files for pattern in SAFETENSORS)
        patterns = list(SAFETENSORS if is_safe else (*PICKLES, INDEXES[1]))
        snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns="*/*")
    return folder


def download_error(
    error: Exception,
    name: str,
    revision: str | None = None,
    *,
    flag: str,
    kind: Literal["model", "data set"] = "model",
    cache: str | None = None,
    download_command: str | None = None,
) -> RapidformerError:
    """Return the error for the user after a failed download.

    Args:
        error: the error of ``huggingface_hub``, of its HTTP client, or of ``datasets``.
        name: the name on the hub.
        flag: the flag with the name.
        kind: whether the name is of a model or of a data set.
        cache: the cache that was searched. By default, the cache of models.
        download_command: fills this cache where there is a network. By default, ``hf download``.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    error_class = ModelError if kind == "model" else DataError
    page = f"{constants.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{name}"
    log_in = log_in_hint()
    if isinstance(error, GatedRepoError):
        message = f"the {kind} '{name}' is gated, and you have no access"
        return error_class(message, where=flag, hint=f"ask for access at {page}, then {log_in}")
    if isinstance(error, RepositoryNotFoundError):
        local = _near(name) or "a local folder of that name does not exist either"
        hint = f"check the name; for a private one, {log_in}; {local}"
        return error_class(f"the hub has no {kind} '{name}' that you can read", where=flag, hint=hint)
    if isinstance(error, RevisionNotFoundError):
        hint = f"{page}/tree/main lists its branches and tags"
        return error_class(f"'{name}' has no branch, tag or commit '{revision}'", where="--revision", hint=hint)
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return error_class(f"the hub refuses the token to '{name}'", where="HF_TOKEN", hint=log_in)
    if is_unreachable(error):
        command = download_command or f"hf download {name}" + (f" --revision {revision}" if revision else "")
        hint = f"run this where there is a network: {command}"
        message = f"the {kind} '{name}' is neither a folder nor in the cache {cache or constants.HF_HUB_CACHE}, and "
        message += "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
        error_class = HubUnreachable if kind == "model" else DataError
        return error_class(message, where=flag, hint="; ".join(filter(None, (hint, _near(name)))))
    message = f"the {kind} '{name}' cannot be downloaded: {reason(error)}"
    return error_class(message, where=flag, hint="start again: the files that are complete are not downloaded twice")


def is_unreachable(error: BaseException) -> bool:
    """Return whether an error, or an error that caused it, shows that the hub cannot be reached."""
    names = {cause.__name__ for cause in type(error).__mro__}
    if names & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "TransportError", "ConnectionError"}:
        return True
    return error.__cause__ is not None and is_unreachable(error.__cause__)


def log_in_hint() -> str:
    """Return how to give a token."""
    return "log in with: hf auth login, or set HF_TOKEN"


def reason(error: Exception) -> str:
    """Return the first line of an error, or its class."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _near(name: str) -> str:
    """Return a suggestion if a local folder has a similar name."""
    folder = Path(name)
    names = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = alike(folder.name, names)
    return f"did you mean {folder.parent / near[0]}?" if near else ""
