"""A local server that speaks the protocol of the Hugging Face hub: enough of it to download, and to upload a model."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

import datasets.config
import pytest
from huggingface_hub import constants
from transformers import BertConfig, BertModel

TOKEN = "hf_local_token"
"""The token that may write. ``hf_reader`` may only read."""

API = re.compile(
    r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)/(revision|tree|paths-info|preupload|commit)/([^/]+)(?:/(.*))?"
)
INFO = re.compile(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)")
FILE = re.compile(r"/(datasets/)?([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A repository: its files at each commit, and names of commits.

    Attributes:
        refs: commit by branch, tag or commit.
        commits: content by path, by commit.
        gated: whether access must be asked for.
    """

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """Add a commit with these files. ``names`` are branches and tags that point to it. The default is main."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = files
        self.refs |= dict.fromkeys((*(names or ("main",)), sha), sha)
        return sha


@dataclass
class Hub:
    """The content and the log of the server.

    Attributes:
        url: for ``HF_ENDPOINT``.
        repositories: by ``models/NAME`` or ``datasets/NAME``.
        requests: method and path of each request.
        uploads: large files of uploads, by their hash.
        read_only: whether commits are refused.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    read_only: bool = False

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def downloads(self) -> list[str]:
        """Return the files that were downloaded, in order. A file that was downloaded twice is there twice."""
        paths = [path for method, _, path in (request.partition(" ") for request in self.requests) if method == "GET"]
        return [match[4] for match in map(FILE.fullmatch, paths) if match]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run the server in a thread while the context is open."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def using_hub(url: str, home: Path) -> Iterator[None]:
    """Make this process use a hub and a cache. The libraries read the environment only on import."""
    settings = {"ENDPOINT": url, "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    cache = {"HF_DATASETS_CACHE": str(home / "datasets"), "DOWNLOADED_DATASETS_PATH": str(home / "datasets/downloads")}
    with (
        mock.patch.multiple(constants, **settings),
        mock.patch.multiple(datasets.config, HF_ENDPOINT=url, HF_HUB_OFFLINE=False, **cache),
        mock.patch.dict("os.environ", {"HF_HOME": str(home), "HF_TOKEN": TOKEN}),
    ):
        yield


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with the data set :data:`DATA`. This process uses it, with an empty cache in ``tmp_path / "home"``."""
    with running_hub() as server, using_hub(server.url, tmp_path / "home"):
        server.repository(f"datasets/{DATA}").commit(data_files())
        yield server


MODEL, DATA = "someone/tiny-bert", "someone/tweets"


def model_files(tokenizer: Path, folder: Path) -> dict[str, bytes]:
    """Return the files of a small BERT with a tokenizer, and the formats that a repository often has as well."""
    model = BertModel(BertConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                       intermediate_size=32, max_position_embeddings=32))  # fmt: skip
    model.save_pretrained(folder)
    others = (
        "onnx/model.onnx", "onnx/config.json", "tf_model.h5", "flax_model.msgpack", "pytorch_model.bin", "README.md",
    )  # fmt: skip
    files = {path.name: path.read_bytes() for path in (*folder.iterdir(), *tokenizer.iterdir())}
    return files | dict.fromkeys(others, b"x")


def data_files() -> dict[str, bytes]:
    """Return a data set with two configurations. The splits of the second one have other names."""
    texts = {"good": 1, "bad": 0, "fine": 1, "awful": 0}
    rows = "text,label\n" + "".join(f"it is {word},{label}\n" for word, label in texts.items()) * 4
    parts = [("default", "train", "validation"), ("chosen", "train_sft", "test_sft")]
    files = "[{{split: {}, path: train.csv}}, {{split: {}, path: validation.csv}}]"
    configs = "".join(f"- config_name: {name}\n  data_files: {files.format(*splits)}\n" for name, *splits in parts)
    validation = "text,label\nit is good,1\nit is bad,0\n"
    card = f"---\nconfigs:\n{configs}---\n"
    return {"train.csv": rows.encode(), "validation.csv": validation.encode(), "README.md": card.encode()}


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        user = {f"Bearer {TOKEN}": "write", "Bearer hf_reader": "read"}.get(self.headers.get("Authorization", ""))
        if path == "/api/whoami-v2":
            answer = {"name": "someone", "type": "user", "auth": {"accessToken": {"role": user}}}
            self._json(answer) if user else self._error(401, "", "Invalid user token.")
        elif path == "/api/repos/create":
            self._create(json.loads(body), user)
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            self._lfs_batch(json.loads(body))
        elif path.startswith("/uploads/"):
            self.hub.uploads[path.rpartition("/")[2]] = body
            self._send(200, b"")
        elif match := API.fullmatch(path):
            self._api(method, match, body, user)
        elif match := INFO.fullmatch(path):
            self._info(f"{match[1]}/{match[2]}", "main")
        elif match := FILE.fullmatch(path):
            self._file(f"{'datasets' if match[1] else 'models'}/{match[2]}", match[3], match[4], user)
        else:
            self._error(404, "", f"no route {path}")

    def _api(self, method: str, match: re.Match[str], body: bytes, user: str | None) -> None:
        name, action, revision, rest = f"{match[1]}/{match[2]}", match[3], match[4], match[5]
        if action == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "lfs" if p.endswith("safetensors") else "regular"} for p in files]
            self._json({"files": [mode | {"shouldIgnore": False} for mode in modes]})
        elif action == "commit":
            self._commit(name, body, user)
        elif action == "revision":
            self._info(name, revision)
        else:
            files = self._files(name, revision)
            if files is not None:
                wanted = json.loads(body)["paths"] if action == "paths-info" and body[:1] == b"{" else None
                self._json(self._tree(files, rest or "", wanted))

    def _files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """Return the files of a revision. Answers with an error and returns None if it does not exist."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._error(401, "RepoNotFound", "Repository not found")
            return None
        if revision not in repository.refs:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository.commits[repository.refs[revision]]

    def _info(self, name: str, revision: str) -> None:
        files = self._files(name, revision)
        if files is not None:
            repository = self.hub.repositories[name]
            siblings = [{"rfilename": path} for path in files]
            info = {"id": name.partition("/")[2], "sha": repository.refs[revision], "siblings": siblings, "tags": []}
            self._json(info | {"private": False, "gated": "manual" if repository.gated else False, "disabled": False})

    def _tree(self, files: dict[str, bytes], folder: str, wanted: list[str] | None) -> list[dict[str, Any]]:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
            if (path in wanted if wanted is not None else path.startswith(folder))
        ]
        folders = {path.rpartition("/")[0] for path in files if "/" in path}
        listed = folders if wanted is None else folders.intersection(wanted)
        return entries + [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(listed)]

    def _file(self, name: str, revision: str, path: str, user: str | None) -> None:
        files = self._files(name, revision)
        if files is None:
            return
        repository = self.hub.repositories[name]
        if repository.gated and user is None:
            self._error(401, "GatedRepo", "Access to this repository is restricted")
        elif path not in files:
            self._error(404, "EntryNotFound", "Entry not found")
        else:
            headers = {"X-Repo-Commit": repository.refs[revision], "ETag": f'"{_sha(files[path])}"'}
            self._send(200, files[path], headers)

    def _create(self, request: dict[str, Any], user: str | None) -> None:
        name = f"{request['organization']}/{request['name']}"
        if user != "write" or request["organization"] != "someone":
            self._error(403, "", f"You do not have the rights to create {name}")
        elif f"models/{name}" in self.hub.repositories:
            self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
        else:
            self.hub.repository(f"models/{name}").commit({})
            self._json({"url": f"{self.hub.url}/{name}"})

    def _lfs_batch(self, request: dict[str, Any]) -> None:
        upload = {"href": f"{self.hub.url}/uploads/"}
        objects = [o | {"actions": {"upload": {"href": upload["href"] + o["oid"]}}} for o in request["objects"]]
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes, user: str | None) -> None:
        if user != "write" or self.hub.read_only:
            self._error(503, "", "The hub is read-only at the moment")
            return
        repository = self.hub.repository(name)
        files = dict(repository.commits[repository.refs["main"]])
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        sha = repository.commit(files)
        url = f"{self.hub.url}/{name.partition('/')[2]}/commit/{sha}"
        self._json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"Content-Type": "application/json", "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers | ({"X-Error-Code": code} if code else {}))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
