"""Copies a run to object storage while it trains, and fetches it from there for ``--resume``.

The storage is any of fsspec, such as ``s3://bucket/run``. A thread of the main worker copies each finished checkpoint.
``manifest.json`` is the last file of a checkpoint that is written, and the first that is deleted. A checkpoint without
it does not count. The checksums in it are verified after a download. An error never ends the training: it is reported,
and the copy is tried again.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.errors import CheckpointError, ConfigError, RapidformerError
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.hub import reason
from rapidformer_templates.run.checkpoint.format import candidates, newest_complete, problem_of, step_of
from rapidformer_templates.run.folder import RunFolder, all_or_none
from rapidformer_templates.system import files as storage
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

POLL_SECONDS = 2.0
"""Seconds between two looks for a new checkpoint."""

PAUSE_SECONDS = 30.0
"""Pause before a copy that has failed is tried again."""

MANIFEST = "manifest.json"
WITH_CHECKPOINTS = ("plan.json", "reference.safetensors", "metrics.jsonl")
"""Files that a resumed run needs in addition to a checkpoint."""

AT_END = ("deepspeed.json", "summary.json", "curves.png", "model", "export")
OF_A_RUN = {"checkpoints", *WITH_CHECKPOINTS, *AT_END}
"""The files and folders of a run under the URL."""


class Mirror:
    """The copy of a run folder under a URL.

    Args:
        resumes: whether the run continues the one in its folder or under the URL. Otherwise the checkpoints that are
            in the folder now belong to a run that will be overwritten, and are not copied.
        overwrites: whether to delete another run's files under the URL before the first copy.
    """

    def __init__(self, url: str, folder: RunFolder, workers: Workers, *, resumes: bool, overwrites: bool) -> None:
        self.url = url
        self._folder, self._workers = folder, workers
        self._resumes, self._overwrites = resumes, overwrites
        self._others: dict[str, int] = {}
        """When each checkpoint of another run in the folder was written."""
        self._others = {} if resumes else self._local()
        self._copied: dict[str, int] = {}
        self._has_begun = False
        self._damaged: set[str] = set()
        """The checkpoints under the URL that are complete but not intact."""
        self._target: AbstractFileSystem
        self._root: str
        """The file system of the URL, and the path in it. Set by :meth:`_open`."""
        self._is_ending = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    # Copy.

    def finish(self) -> None:
        """Copy what is missing, with the results of the run. Errors are reported."""
        self._is_ending.set()
        self.thread.join()
        if not self._local():
            return
        problem = ""
        for pause in (0, *storage.RETRY_SECONDS):
            time.sleep(pause)
            try:
                self._copy()
                self._copy_files(AT_END)
                say(self._workers, f"the run is copied to {self.url}")
                return
            except Exception as error:  # each kind of storage has its own
                problem = reason(error)
                if isinstance(error, ConfigError):
                    break
        say(self._workers, f"{self.url} is incomplete: {problem}; {self._folder.path} has everything", loud=True)

    def _follow(self) -> None:
        while not self._is_ending.wait(POLL_SECONDS):
            try:
                if self._local() != self._copied:
                    self._copy()
            except ConfigError as error:
                say(self._workers, f"{error.message}: this run is not copied", loud=True)
                return
            except Exception as error:
                say(self._workers, f"copying to {self.url} failed: {reason(error)}; it is tried again", loud=True)
                self._is_ending.wait(PAUSE_SECONDS)

    def _local(self) -> dict[str, int]:
        """Return when each finished checkpoint of this run was written, newest first."""
        written_at = {}
        with suppress(CheckpointError):
            for path in candidates(self._folder.checkpoints):
                with suppress(OSError):  # deleted in the meantime
                    written_at[path.name] = (path / MANIFEST).stat().st_mtime_ns
        return {name: at for name, at in written_at.items() if self._others.get(name) != at}

    def _copy(self) -> None:
        """Copy the checkpoints that are missing, and delete those that the run has deleted."""
        local = self._local()
        self._open()
        self._begin()
        there = self._checkpoints()
        self._copy_files(WITH_CHECKPOINTS)
        for name in local:
            self._copy_checkpoint(name, there.get(name, {}))
        newest = max(map(step_of, map(Path, local)), default=0)
        for name in there.keys() - local.keys():
            if step_of(Path(name)) < newest:
                folder = f"{self._root}/checkpoints/{name}"
                if MANIFEST in there[name]:
                    self._target.rm_file(f"{folder}/{MANIFEST}")
                self._target.rm(folder, recursive=True)
        self._copied = local

    def _begin(self) -> None:
        """Before the first copy of a new run, delete another run's files, or refuse to copy over them."""
        if self._has_begun:
            return
        if self._overwrites:
            for name in self._entries().keys() & OF_A_RUN:
                self._target.rm(f"{self._root}/{name}", recursive=True)
            self._target.invalidate_cache()
        elif not self._resumes and self._checkpoints():
            raise self._other_run()
        self._has_begun = True

    def _copy_checkpoint(self, name: str, there: dict[str, int]) -> None:
        """Copy a checkpoint unless it is already there. Its manifest comes last, after the sizes are verified."""
        source, remote, target = self._folder.checkpoints / name, f"{self._root}/checkpoints/{name}", self._target
        try:
            manifest = (source / MANIFEST).read_bytes()
            sizes = {file: seal["bytes"] for file, seal in json.loads(manifest)["files"].items()}
            if MANIFEST in there:
                is_same = target.cat_file(f"{remote}/{MANIFEST}") == manifest
                if is_same and name not in self._damaged and sizes.items() <= there.items():
                    return
                target.rm_file(f"{remote}/{MANIFEST}")
            target.makedirs(remote, exist_ok=True)
            target.put([str(source / file) for file in sizes], [f"{remote}/{file}" for file in sizes])
            target.invalidate_cache()
            if not sizes.items() <= self._entries(f"/checkpoints/{name}").items():
                raise OSError(f"{name} has other sizes there than here")
            target.put_file(str(source / MANIFEST), f"{remote}/{MANIFEST}")
        except FileNotFoundError:
            if source.exists():  # otherwise the run has deleted it in the meantime
                raise

    def _copy_files(self, names: tuple[str, ...]) -> None:
        """Copy files, and folders in place of those that an earlier export has left there."""
        there = self._entries()
        self._target.makedirs(self._root, exist_ok=True)
        for name in names:
            path, remote = self._folder.path / name, f"{self._root}/{name}"
            if path.is_file():
                self._target.put_file(str(path), remote)
            elif path.is_dir():
                if name in there:
                    self._target.rm(remote, recursive=True)
                self._target.put(f"{path}/", f"{remote}/", recursive=True)

    # Fetch.

    def begin(self) -> None:
        """Refuse a URL with another run. For a run that is resumed, fetch what it needs.

        Raises:
            ConfigError: the storage cannot be read, or has checkpoints of another run.
            CheckpointError: no checkpoint in it is intact.
        """
        try:
            self._open()
            there = self._checkpoints()
            if self._resumes:
                self._fetch_run({name: sizes for name, sizes in there.items() if MANIFEST in sizes})
            elif there and not self._overwrites:
                raise self._other_run()
        except RapidformerError:
            raise
        except Exception as error:
            hint = "check the address and the network, or leave --mirror out"
            raise ConfigError(f"{self.url} cannot be read: {reason(error)}", where="--mirror", hint=hint) from error

    def _fetch_run(self, there: dict[str, dict[str, int]]) -> None:
        """Fetch the newest intact checkpoint, the best one, and the files that a resumed run needs."""
        for name in sorted(there, key=lambda name: step_of(Path(name)), reverse=True):
            if self._is_fetched(name, there[name]):
                break
        else:
            if there:
                raise CheckpointError(f"no checkpoint in {self.url} is intact", where="--mirror")
            return
        names = [name]
        state = json.loads((self._folder.checkpoints / f"{name}.tmp" / "state.json").read_text(encoding="utf-8"))
        best = f"step-{state['best']['step']}" if state.get("best") else name
        if best != name and best in there and self._is_fetched(best, there[best]):
            names.append(best)
        for file in WITH_CHECKPOINTS:
            path = self._folder.path / file
            with suppress(FileNotFoundError):
                if not path.exists():
                    self._target.get_file(f"{self._root}/{file}", f"{path}.tmp")
                    Path(f"{path}.tmp").rename(path)
        for step_name in names:
            shutil.rmtree(self._folder.checkpoints / step_name, ignore_errors=True)  # a damaged one
            (self._folder.checkpoints / f"{step_name}.tmp").rename(self._folder.checkpoints / step_name)
        say(self._workers, f"fetched {' and '.join(names)} from {self.url}")

    def _is_fetched(self, name: str, sizes: dict[str, int]) -> bool:
        """Download a checkpoint to a temporary folder. Returns whether it is intact."""
        folder = self._folder.checkpoints / f"{name}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in sizes:
            self._target.get_file(f"{self._root}/checkpoints/{name}/{file}", str(folder / file))
        problem = problem_of(folder)
        if problem:
            self._damaged.add(name)
            shutil.rmtree(folder)
            say(self._workers, f"skipped {self.url}/checkpoints/{name}: {problem}", loud=True)
        return problem is None

    def _open(self) -> None:
        """Forget what is known about the files under the URL."""
        from fsspec.core import url_to_fs

        self._target, path = url_to_fs(self.url)
        self._target.invalidate_cache()
        self._root = path.rstrip("/")

    def _checkpoints(self) -> dict[str, dict[str, int]]:
        """Return the size of each file of each checkpoint under the URL, by checkpoint."""
        names = [name for name in self._entries("/checkpoints") if re.fullmatch(r"step-\d+", name)]
        return {name: self._entries(f"/checkpoints/{name}") for name in names}

    def _entries(self, folder: str = "") -> dict[str, int]:
        """Return the sizes of the entries of a folder by name. ``find`` would hide that storage is not reachable."""
        with suppress(FileNotFoundError):
            entries = self._target.ls(self._root + folder, detail=True)
            return {entry["name"].rstrip("/").rpartition("/")[2]: entry.get("size", 0) for entry in entries}
        return {}

    def _other_run(self) -> ConfigError:
        hint = "--resume continues it, --overwrite deletes them, another --mirror leaves them alone"
        return ConfigError(f"{self.url} holds the checkpoints of another run", where="--mirror", hint=hint)


@contextmanager
def mirrored(training: TrainingFlags, folder: RunFolder, workers: Workers) -> Iterator[None]:
    """Copy the run to ``--mirror`` inside the context. First fetch it from there if nothing here can be resumed.

    Raises:
        ConfigError, CheckpointError: see :meth:`Mirror.begin`. Raised on all ranks.
    """
    if training.mirror is None:
        yield
        return
    mirror = Mirror(training.mirror, folder, workers, resumes=training.resume, overwrites=training.overwrite)
    is_here = training.resume and newest_complete(folder.checkpoints, workers)[0] is not None
    all_or_none(workers, lambda: mirror.begin() if workers.is_main and not is_here else None)
    if workers.is_main:
        mirror.thread.start()
    try:
        yield
    finally:
        if workers.is_main:
            mirror.finish()
