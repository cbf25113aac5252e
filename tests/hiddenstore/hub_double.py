"""The hub's API as huggingface_hub calls it, over real HTTP: repositories, preupload, LFS, commits, trees, ranges.

LFS objects are kept by sha256 and checked when they come; a commit that names one which never came is refused.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_canary_canary_canary"
LFS_FROM = 2_000
"""Bytes from which a file goes by LFS; the real hub's is larger, and goes by the kind of file too."""

Tree = dict[str, tuple[bytes, bool]]
"""Bytes of each file, and whether they are in LFS."""


@dataclass
class Repo:
    private: bool
    history: list[Tree] = field(default_factory=lambda: [{".gitattributes": (b"*.tar filter=lfs\n", False)}])

    @property
    def files(self) -> dict[str, bytes]:
        return {path: data for path, (data, _) in self.history[-1].items()}

    def at(self, revision: str) -> Tree:
        return self.history[-1 if revision == "main" else int(revision, 16)]

    def sha(self, revision: str) -> str:
        return f"{(len(self.history) - 1 if revision == 'main' else int(revision, 16)):040x}"


@dataclass
class HubDouble:
    """``fault`` is asked before every request: a status to answer, bytes of the body to send before the connection is
    closed (negative), or None; ``drip`` for the seconds between two bytes of a body, or None. ``uploads`` counts what
    came of each LFS object."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent_bytes: int = 0
    fault: Callable[[str, str], int | None] = lambda method, path: None
    drip: Callable[[str, str], float | None] = lambda method, path: None
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def hub_double() -> Iterator[HubDouble]:
    hub = HubDouble()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def in_place_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    """A running double that huggingface_hub takes for the hub."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with hub_double() as double:
        monkeypatch.setattr(constants, "ENDPOINT", double.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{double.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Its Xet storage has no open protocol; without it files go as LFS.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield double
        close_session()


class _Handler(BaseHTTPRequestHandler):
    hub: HubDouble
    protocol_version = "HTTP/1.1"

    def log_message(self, *_words: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        with self.hub.lock:
            self.hub.requests.append((method, path))
            fault = self.hub.fault(method, path)
        if fault is not None and fault > 0:
            # Some servers repeat what they were sent.
            return self._answer(fault, {"error": f"told to fail, whoever asks: {self.headers.get('Authorization')}"})
        if path.startswith("/lfs/"):
            return self._receive(path.removeprefix("/lfs/"), body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        with self.hub.lock:
            routes = (
                (r"/api/repos/create", self._create),
                (r"/api/validate-yaml", self._validate),
                (r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/(\w+))?", self._info),
                (r"/api/(?:datasets|models)/([^/]+/[^/]+)/tree/(\w+)", self._tree),
                (r"/api/(?:datasets|models)/([^/]+/[^/]+)/preupload/(\w+)", self._preupload),
                (r"/api/(?:datasets|models)/([^/]+/[^/]+)/commit/(\w+)", self._commit),
                (r"/(?:datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
                (r"/(?:datasets/)?([^/]+/[^/]+)/resolve/(\w+)/(.+)", self._resolve),
            )
            for pattern, answer in routes:
                if match := re.fullmatch(pattern, path):
                    if match.groups() and match[1] not in self.hub.repos:
                        return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                    return answer(body, *match.groups())
        return self._answer(404, {"error": f"no route {path}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        wait_s = self.hub.drip(self.command, unquote(urlsplit(self.path).path))
        for start in range(0, len(data) if wait_s is not None else 1):
            self.wfile.write(data if wait_s is None else data[start : start + 1])
            time.sleep(wait_s or 0.0)

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = f"{self.hub.url}/{'datasets/' if asked.get('type') == 'dataset' else ''}{name}"
        if name in self.hub.repos:
            return self._answer(409, {"error": "You already created this repo", "url": url})
        private = asked.get("private", asked.get("visibility") == "private")
        self.hub.repos[name] = Repo(bool(private))
        return self._answer(200, {"url": url, "name": name})

    def _validate(self, body: bytes) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def _info(self, body: bytes, name: str, revision: str | None) -> None:
        repo = self.hub.repos[name]
        sha = repo.sha(revision or "main")
        self._answer(200, {"id": name, "sha": sha, "private": repo.private, "tags": [], "siblings": [], "downloads": 0})

    def _tree(self, body: bytes, name: str, revision: str) -> None:
        entries: list[dict[str, Any]] = []
        folders: set[str] = set()
        for path, (data, in_lfs) in sorted(self.hub.repos[name].at(revision).items()):
            folders |= {path.rsplit("/", depth)[0] for depth in range(1, path.count("/") + 1)}
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
            if in_lfs:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        entries += [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders]
        self._answer(200, entries)

    def _preupload(self, body: bytes, name: str, revision: str) -> None:
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LFS_FROM else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def _batch(self, body: bytes, name: str) -> None:
        objects = []
        for item in json.loads(body)["objects"]:
            entry = dict(item)
            if item["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/lfs/{item['oid']}?X-Amz-Signature=canary"
                entry["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(entry)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _receive(self, oid: str, body: bytes) -> None:
        """As storage does: no token, and nothing but the bytes that were signed for."""
        is_right = hashlib.sha256(body).hexdigest() == oid and "Authorization" not in self.headers
        with self.hub.lock:
            if is_right:
                self.hub.objects[oid] = body
                self.hub.uploads[oid] += 1
        self._answer(200 if is_right else 400, b"")

    def _commit(self, body: bytes, name: str, revision: str) -> None:
        repo, tree = self.hub.repos[name], dict(self.hub.repos[name].history[-1])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                tree[value["path"]] = (base64.b64decode(value["content"]), False)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self._answer(400, {"error": f"LFS pointer to {value['path']} points to nothing"})
                tree[value["path"]] = (self.hub.objects[value["oid"]], True)
            elif item["key"] == "deletedFile":
                del tree[value["path"]]
        repo.history.append(tree)
        sha = repo.sha("main")
        return self._answer(
            200, {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "success": True}
        )

    def _resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        repo = self.hub.repos[name]
        if path not in repo.at(revision):
            self._answer(404, {"error": f"no {path}"}, {"X-Error-Code": "EntryNotFound"})
            return
        data = repo.at(revision)[path][0]
        about = {"X-Repo-Commit": repo.sha(revision), "ETag": f'"{_blob(data)}"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = data if match is None else data[int(match[1]) : int(match[2]) + 1]
        self.hub.sent_bytes += len(part)
        self._answer(200 if match is None else 206, part, about)


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
