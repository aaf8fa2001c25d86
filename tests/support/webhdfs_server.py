"""A server of WebHDFS for tests: fsspec can write to it without another package."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class WebHdfs(ThreadingHTTPServer):
    """Serves a folder.

    Attributes:
        fails_after: number of requests that are still answered. All later ones get status 503. None answers all.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fails_after: int | None = None

    @property
    def url(self) -> str:
        return f"webhdfs://127.0.0.1:{self.server_port}/run"


@contextmanager
def serve_webhdfs(folder: Path) -> Iterator[WebHdfs]:
    """Serve a folder inside the context."""
    with WebHdfs(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebHdfs

    def log_message(self, *unused: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.fails_after is not None:
            self.server.fails_after -= 1
            if self.server.fails_after < 0:
                self._send(503, b"")
                return
        address = urlsplit(self.path)
        query = {name.lower(): values[0] for name, values in parse_qs(address.query).items()}
        path = self.server.folder / unquote(address.path).removeprefix("/webhdfs/v1").strip("/")
        operation = query["op"].upper()
        if operation in ("CREATE", "APPEND") and "data" not in query:
            self._send(307, b"", f"http://{self.headers['Host']}{self.path}&data=true")
        elif operation == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            self._send(200, b'{"boolean": true}')
        elif operation == "CREATE":
            path.write_bytes(body)
            self._send(201, b"")
        elif not path.exists():
            missing = {"exception": "FileNotFoundException", "message": f"File does not exist: {path.name}"}
            self._send(404, json.dumps({"RemoteException": missing}).encode())
        elif operation == "APPEND":
            with path.open("ab") as file:
                file.write(body)
            self._send(200, b"")
        else:
            self._answer_about(path, operation, query)

    def _answer_about(self, path: Path, operation: str, query: dict[str, str]) -> None:
        """Answer a request about a file or folder that exists."""
        if operation == "OPEN":
            offset = int(query.get("offset", 0))
            self._send(200, path.read_bytes()[offset:][: int(query.get("length", 1 << 40))])
        elif operation == "GETFILESTATUS":
            self._send(200, json.dumps({"FileStatus": _status(path, "")}).encode())
        elif operation == "LISTSTATUS":
            entries = [_status(entry, entry.name) for entry in path.iterdir()] if path.is_dir() else [_status(path, "")]
            self._send(200, json.dumps({"FileStatuses": {"FileStatus": entries}}).encode())
        else:
            assert operation == "DELETE", operation
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._send(200, b'{"boolean": true}')

    do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def _send(self, status: int, body: bytes, location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _status(path: Path, name: str) -> dict[str, object]:
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"pathSuffix": name, "type": kind, "length": path.stat().st_size if kind == "FILE" else 0}
