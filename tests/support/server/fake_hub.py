"""A Hub on this machine: the few answers that a download of one model needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`files` of the model `org/model`; `status` other than 200 refuses everything, with `code`."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    status: int = 200
    code: str = ""
    fetched: list[str] = field(default_factory=list)
    held: str = ""  # a file of which two thirds are sent, and the rest after `released`
    holds_sizes: bool = False  # who asks for the sizes of all files gets them after `released`
    released: threading.Event = field(default_factory=threading.Event)

    def send(self, name: str, data: bytes, write: Callable[[bytes], object]) -> None:
        if name != self.held:
            write(data)
            return
        third = len(data) // 3
        write(data[:third])
        time.sleep(0.3)  # the caller counts them
        write(data[third : 2 * third])
        self.released.wait(60)
        write(data[2 * third :])

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.split("?")[0]
        if self.status != 200:
            return self.status, {"x-error-code": self.code}, b"{}"
        match path.strip("/").split("/"):
            case ["api", "models", "org", "model", "revision", "main"]:
                sizes = {name: len(data) for name, data in self.files.items()}
                siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
                info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
                return 200, {}, json.dumps(info).encode()
            case ["api", "models", "org", "model", "tree", _]:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in self.files.items()
                ]
                return 200, {}, json.dumps(entries).encode()
            case ["org", "model", "resolve", _, name] if name in self.files:
                data = self.files[name]
                return 200, {"etag": f'"{_etag(data)}"', "x-repo-commit": COMMIT}, data
        return 404, {"x-error-code": "RevisionNotFound"}, b"{}"


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    """Serves `files` until the block ends."""
    hub = FakeHub(files=files)

    class HubHandler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            if hub.holds_sizes and "blobs=" in self.path:
                hub.released.wait(60)
            status, headers, data = hub.answer(self.path)
            if body and "/resolve/" in self.path and status == 200:
                hub.fetched.append(self.path.rsplit("/", 1)[1])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if body:
                with contextlib.suppress(ConnectionError):  # the caller was stopped
                    hub.send(self.path.rsplit("/", 1)[1], data, self.wfile.write)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
