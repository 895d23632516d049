"""A small Hugging Face hub in memory: the routes that huggingface_hub and datasets call."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_secretOfTheTest"
"""The one that opens what is private or gated."""

_API = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+?)"
    r"(?:/(revision|tree|paths-info|preupload|commit)/([^/]+)(?:/(.+))?)?"
)
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_LFS = (".safetensors", ".parquet")


@dataclass
class Repo:
    """A repository: files of each commit, and the commits of its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    is_gated: bool = False


@dataclass
class Hub:
    """What the server has, what was asked of it, and what it does wrong."""

    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    """By kind ("models", "datasets") and ORG/NAME."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path, and what the caller says who it is."""
    breaks_off: set[str] = field(default_factory=set)
    """Files that end in the middle when they are asked for the next time, and paths of uploads
    that are refused."""
    altered: dict[str, bytes] = field(default_factory=dict)
    """Files that come with other bytes than are listed."""
    status: int = 0
    """Answers all with it; 0: as a hub does."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Large files that came before their commit, by their SHA-256."""
    url: str = ""

    def put(
        self, repo: str, files: Mapping[str, bytes], *, kind: str = "models", branch: str = "main"
    ) -> str:
        """Makes a commit; returns its hash."""
        found = self.repos.setdefault((kind, repo), Repo())
        text = json.dumps([repo, len(found.commits), *sorted(files)]).encode()
        commit = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        found.commits[commit] = dict(files)
        found.branches[branch] = commit
        return commit

    def put_folder(self, repo: str, folder: Path) -> str:
        """Makes a commit of the files of a folder."""
        return self.put(repo, {one.name: one.read_bytes() for one in folder.iterdir()})

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        found = [_FILE.fullmatch(path) for method, path, _ in self.asked if method == "GET"]
        return sorted(one[4] for one in found if one)


def listed(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git}
    if path.endswith(_LFS):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def tree_of(files: Mapping[str, bytes], folder: str) -> list[dict[str, Any]]:
    """The files below a folder, and the folders of them."""
    below = {name: files[name] for name in sorted(files) if PurePath(name).is_relative_to(folder)}
    parents = {str(one) for name in below for one in PurePath(name).parents} - {".", folder}
    folders = [
        {"type": "directory", "path": one, "oid": ""}
        for one in sorted(parents)
        if PurePath(one).is_relative_to(folder)
    ]
    return [*folders, *(listed(name, content) for name, content in below.items())]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        # The slashes of a revision are quoted, those between the parts are not.
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, unquote(path), self.headers.get("authorization", "")))
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.hub.status:
            self._send(self.hub.status, b"{}")
        elif self.command in ("POST", "PUT"):
            self._written(path, body)
        elif file := _FILE.fullmatch(path):
            kind = "datasets" if file[1] else "models"
            found = self._opened(kind, file[2], unquote(file[3]))
            if found is not None:
                self._file(*found, unquote(file[4]))
        elif call := _API.fullmatch(path):
            found = self._opened(call[1], call[2], unquote(call[4] or "main"))
            if found is not None:
                commit, files = found
                info = {"id": call[2], "sha": commit, "siblings": []}
                tree = tree_of(files, unquote(call[5] or ""))
                self._json(tree if call[3] == "tree" else info)
        else:
            self._send(404, b"{}")

    def _opened(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files; None where the refusal is sent already."""
        repo = self.hub.repos.get((kind, name))
        said = self.headers.get("authorization")
        if said not in (None, f"Bearer {TOKEN}"):
            message = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._send(401, b"{}", message)
        elif repo is not None and repo.is_gated and said is None:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif repo is None or (repo.is_private and said is None):
            # As the hub: without a token nobody learns what exists.
            self._send(404 if said else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        else:
            commit = repo.branches.get(revision, revision)
            if commit in repo.commits:
                return commit, repo.commits[commit]
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return None

    def _file(self, commit: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        entry = listed(name, files[name])
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        content = self.hub.altered.get(name, files[name])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        rest = content[int(start[1]) :] if start else content
        if start:
            headers["Content-Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
        if name in self.hub.breaks_off and self.command == "GET":
            self.hub.breaks_off.discard(name)
            self._send(200, rest[: len(rest) // 2], headers, length=len(rest))
            self.close_connection = True
        else:
            self._send(206 if start else 200, rest, headers)

    def _written(self, path: str, body: bytes) -> None:
        """What sends files: the repository is made, large files come first, then the commit."""
        if path.startswith("/lfs/"):
            # A place that is told to those who may write: nobody is asked again.
            self.hub.uploads[path.removeprefix("/lfs/")] = body
            self._send(400 if path in self.hub.breaks_off else 200, b"{}")
        elif self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._send(401, b"{}")
        elif path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said.get('organization') or 'me'}/{said['name']}"
            if said.get("organization") == "others":
                self._send(403, b'{"error": "not a member"}')
                return
            is_private = said.get("visibility") == "private" or bool(said.get("private"))
            self.hub.repos.setdefault(("models", name), Repo(is_private=is_private))
            self._json({"url": f"{self.hub.url}/{name}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
            self._json({"transfer": "basic", "objects": objects})
        elif (call := _API.fullmatch(path)) and call[3] == "preupload":
            files = json.loads(body)["files"]
            modes = ["lfs" if one["path"].endswith(_LFS) else "regular" for one in files]
            told = [
                {"path": one["path"], "uploadMode": mode, "shouldIgnore": False}
                for one, mode in zip(files, modes, strict=True)
            ]
            self._json({"files": told})
        elif call and call[3] == "commit":
            files = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.hub.uploads[value["oid"]]
            commit = self.hub.put(call[2], files)
            self._json(
                {"commitUrl": f"{self.hub.url}/{call[2]}/commit/{commit}", "commitOid": commit}
            )
        else:
            self._send(404, b"{}")

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub of its own on a free port."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client_environment(hub: Hub, home: Path) -> dict[str, str]:
    """Variables that let the client of a child process find the hub and nothing else."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        # Both would ask other servers.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def use_hub(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the client of this process, which has read its variables long ago."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
