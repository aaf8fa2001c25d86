"""Copies a run to object storage while it trains, and fetches it from there for ``--resume``.

The storage is any of fsspec, such as ``s3://bucket/run``. A thread of the main worker copies each finished checkpoint.
``manifest.json`` is the last file of a checkpoint that is written, and the first that is deleted. A checkpoint without
it does not count. The checksums in it are verified after a download. An error never ends the training: it is reported,
and the copy is tried again. ``mirror.json`` names the run that copies. If another run has written it since, this one
stops to copy, because storage has no locks.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import socket
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
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.system import files as storage
from rapidformer_templates.system.files import sync
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

POLL_SECONDS = 2.0
"""Seconds between two looks for a new checkpoint."""

CLAIM_SECONDS = 2.0
"""Pause after which a run checks that it is the only one that has begun to copy to the URL."""

MAX_PAUSE_SECONDS = 300.0
"""Longest pause before a copy that has failed is tried again. The first one is a second, and each is twice the last."""

MANIFEST = "manifest.json"
WITH_CHECKPOINTS = ("plan.json", "reference.safetensors", "metrics.jsonl")
"""Files that a resumed run needs in addition to a checkpoint."""

OWNER = "mirror.json"
"""File under the URL with the token of the run that copies there."""

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
        self._token = json.dumps({"host": socket.gethostname(), "run": secrets.token_hex(16)}).encode()
        self._is_owner: bool | None = None  # None: nothing is copied yet. False: another run copies there
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
        for pause in (*storage.RETRY_SECONDS, None):
            try:
                self._copy()
                self._copy_files((*WITH_CHECKPOINTS, *AT_END))
            except Exception as error:
                problem = reason(error)
                if isinstance(error, ConfigError):
                    say(self._workers, f"{error.message}: this one is only in {self._folder.path}", loud=True)
                    return
            else:
                say(self._workers, f"the run is copied to {self.url}")
                return
            if pause is not None:
                say(self._workers, f"copying to {self.url} failed: {problem}; trying again in {pause} s", loud=True)
                time.sleep(pause)
        say(self._workers, f"{self.url} is incomplete: {problem}; {self._folder.path} has everything", loud=True)

    def _follow(self) -> None:
        pause = 1.0
        while not self._is_ending.wait(POLL_SECONDS):
            if self._local() == self._copied:
                continue
            try:
                self._copy()
                pause = 1.0
            except ConfigError as error:
                say(self._workers, f"{error.message}: this run is not copied any more", loud=True)
                return
            except Exception as error:  # each kind of storage has its own
                problem = f"copying to {self.url} failed: {reason(error)}"
                say(self._workers, f"{problem}; trying again in {pause:g} s", loud=True)
                self._is_ending.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

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
        if not local:
            return
        self._open()
        self._check_owner()
        remote_files = self._checkpoints()
        self._copy_files(WITH_CHECKPOINTS)
        for name in local:
            self._copy_checkpoint(name, remote_files.get(name, {}))
        newest = max(map(step_of, map(Path, local)))
        for name in remote_files.keys() - local.keys():
            if step_of(Path(name)) < newest:
                folder = f"{self._root}/checkpoints/{name}"
                if MANIFEST in remote_files[name]:
                    self._target.rm_file(f"{folder}/{MANIFEST}")
                self._target.rm(folder, recursive=True)
        self._copied = local

    def _copy_checkpoint(self, name: str, remote_files: dict[str, int]) -> None:
        """Copy a checkpoint unless it is already there. Its manifest comes last, after the sizes are verified."""
        source, remote, target = self._folder.checkpoints / name, f"{self._root}/checkpoints/{name}", self._target
        try:
            manifest = (source / MANIFEST).read_bytes()
            sizes = {file: seal["bytes"] for file, seal in json.loads(manifest)["files"].items()}
            if MANIFEST in remote_files:
                is_same = target.cat_file(f"{remote}/{MANIFEST}") == manifest
                if is_same and name not in self._damaged and sizes.items() <= remote_files.items():
                    return
                target.rm_file(f"{remote}/{MANIFEST}")
            target.makedirs(remote, exist_ok=True)
            for file in sizes:
                target.put_file(str(source / file), f"{remote}/{file}")
            target.invalidate_cache()
            sizes_there = {file: target.info(f"{remote}/{file}")["size"] for file in sizes}
            if sizes_there != sizes:
                raise OSError(f"{name} has other sizes there than here")
            target.put_file(str(source / MANIFEST), f"{remote}/{MANIFEST}")
        except FileNotFoundError:
            if source.exists():  # otherwise the run has deleted it in the meantime
                raise

    def _check_owner(self) -> None:
        """Make this run the one that copies to the URL, before its first copy. Later, check that it still is.

        If several runs begin at once, the last one that writes its token copies. The pause lets the others see it
        before they write anything else.

        Raises:
            ConfigError: another run copies there.
        """
        begins, target, root = self._is_owner is None, self._target, self._root
        if begins:
            if self._checkpoints() and not (self._resumes or self._overwrites):
                raise self._other_run()
            target.makedirs(root, exist_ok=True)
            target.pipe_file(f"{root}/{OWNER}", self._token)
            time.sleep(CLAIM_SECONDS)
        self._is_owner = self._is_owner is not False and target.cat_file(f"{root}/{OWNER}") == self._token
        if not self._is_owner:
            raise self._other_run()
        if begins and self._overwrites:
            for name in self._entries().keys() & OF_A_RUN:
                target.rm(f"{root}/{name}", recursive=True)
            target.invalidate_cache()

    def _copy_files(self, names: tuple[str, ...]) -> None:
        """Copy files and folders. Other files in the copies of the folders are deleted: an earlier export had them."""
        self._open()
        for name in names:
            path = self._folder.path / name
            inner = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            remotes = {f"{self._root}/{file.relative_to(self._folder.path).as_posix()}": file for file in inner}
            for remote, file in remotes.items():
                if file.exists():
                    self._target.makedirs(remote.rpartition("/")[0], exist_ok=True)
                    self._target.put_file(str(file), remote)
            if path.is_dir():
                self._target.invalidate_cache()
                for other in set(self._target.find(f"{self._root}/{name}")) - remotes.keys():
                    self._target.rm_file(other)

    # Fetch.

    def refuse_other_run(self) -> None:
        """Refuse a new run if another one is under the URL. If it cannot be read, that is only reported.

        Raises:
            ConfigError: there are checkpoints.
        """
        try:
            self._open()
            remote_files = self._checkpoints()
        except Exception as error:
            say(self._workers, f"{self.url} cannot be read: {reason(error)}", loud=True)
            return
        if remote_files:
            raise self._other_run()

    def fetch(self) -> None:
        """Fetch the newest complete checkpoint, the best one, and the files that a resumed run needs.

        Raises:
            CheckpointError: the storage cannot be read, or no checkpoint in it is intact.
        """
        try:
            self._open()
            self._fetch_newest({name: sizes for name, sizes in self._checkpoints().items() if MANIFEST in sizes})
        except CheckpointError:
            raise
        except Exception as error:
            message = f"{self.url} cannot be read: {reason(error)}"
            hint = "check the address and the network, or leave --mirror out to start from the beginning"
            raise CheckpointError(message, where="--mirror", hint=hint) from error

    def _fetch_newest(self, remote_files: dict[str, dict[str, int]]) -> None:
        problems = []
        for name in sorted(remote_files, key=lambda name: step_of(Path(name)), reverse=True):
            problem = self._fetch_checkpoint(name, remote_files[name])
            if problem is None:
                break
            problems.append(f"{name}: {problem}")
            self._damaged.add(name)
            say(self._workers, f"skipped {self.url}/checkpoints/{name}: {problem}", loud=True)
        else:
            if problems:
                raise CheckpointError(f"no checkpoint in {self.url} is intact: {'; '.join(problems)}", where="--mirror")
            return
        names = [name]
        state = json.loads((self._folder.checkpoints / f"{name}.tmp" / "state.json").read_text(encoding="utf-8"))
        best = f"step-{state['best']['step']}" if state.get("best") else name
        if best != name and best in remote_files:
            names += [best] if self._fetch_checkpoint(best, remote_files[best]) is None else []
        for file in WITH_CHECKPOINTS:
            path = self._folder.path / file
            with suppress(FileNotFoundError):
                if not path.exists():
                    self._target.get_file(f"{self._root}/{file}", f"{path}.tmp")
                    Path(f"{path}.tmp").rename(path)
        for step_name in names:
            shutil.rmtree(self._folder.checkpoints / step_name, ignore_errors=True)  # a damaged one
            (self._folder.checkpoints / f"{step_name}.tmp").rename(self._folder.checkpoints / step_name)
        sync(self._folder.checkpoints)
        say(self._workers, f"fetched {' and '.join(names)} from {self.url}")

    def _fetch_checkpoint(self, name: str, sizes: dict[str, int]) -> str | None:
        """Download a checkpoint to a temporary folder. Returns what is wrong with it, or None."""
        folder = self._folder.checkpoints / f"{name}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in sizes:
            self._target.get_file(f"{self._root}/checkpoints/{name}/{file}", str(folder / file))
            sync(folder / file)
        problem = problem_of(folder)
        if problem:
            shutil.rmtree(folder)
        else:
            sync(folder)
        return problem

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
        """Return the sizes of the entries of a folder by name, or of the URL itself.

        ``find`` and ``exists`` of fsspec would hide that storage is not reachable.
        """
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
        ConfigError, CheckpointError: see :meth:`Mirror.refuse_other_run` and :meth:`Mirror.fetch`. Raised on all ranks.
    """
    if training.mirror is None:
        yield
        return
    mirror, problem = None, None
    newest = newest_complete(folder.checkpoints, workers)[0] if training.resume else None
    if workers.is_main:
        mirror = Mirror(training.mirror, folder, workers, resumes=training.resume, overwrites=training.overwrite)
        try:
            if training.resume and newest is None:
                mirror.fetch()
            elif not training.resume and not training.overwrite:
                mirror.refuse_other_run()
        except RapidformerError as error:
            problem = error
    problem = workers.broadcast(problem)
    if problem is not None:
        raise problem
    if mirror is None:
        yield
        return
    mirror.thread.start()
    try:
        yield
    finally:
        mirror.finish()
