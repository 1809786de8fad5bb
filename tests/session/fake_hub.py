"""A hub on loopback: the requests of huggingface_hub's own client that create, fill, list and read a repository.

Large files go where the real one sends them: to a Xet store, which is here the one that hf_xet itself keeps in a
folder, or, of a client without that, to the older large-file store by PUT.
"""

from __future__ import annotations

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
from urllib.parse import unquote, urlsplit

import yaml
from hf_xet import XetFileInfo, XetSession

TOKEN, READER, USER = "hf_writes", "hf_reads", "someone"


@dataclass
class FakeHub:
    """Repositories by id, each the files of its one branch; `store`: the folder of its Xet store; `large`: whether
    weights go to a store at all."""

    store: Path
    url: str = ""
    large: bool = True
    down: bool = False
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of every request."""

    def create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        owner = asked.get("organization") or USER
        repo = f"{owner}/{asked['name']}"
        if owner != USER:
            return 403, {"error": f"You don't have the rights to create a model under the namespace {owner!r}"}
        if repo in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{repo}"}
        self.repos[repo], self.private[repo] = {}, asked.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{repo}"}

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        files = dict(self.repos[repo])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects.get(value["oid"]) or self.from_xet(value["oid"], value["size"])
            else:
                del files[value["path"]]
        self.repos[repo] = files
        oid = self.revision(repo)
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}

    def preupload(self, asked: dict[str, Any]) -> tuple[int, Any]:
        def mode(name: str) -> str:
            return "lfs" if self.large and name.endswith(".safetensors") else "regular"

        files = [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in asked["files"]]
        return 200, {"files": files}

    def batch(self, asked: dict[str, Any]) -> tuple[int, Any]:
        def upload(oid: str) -> dict[str, Any]:
            return {"actions": {"upload": {"href": f"{self.url}/large/{oid}"}}}

        return 200, {"transfer": "basic", "objects": [one | upload(one["oid"]) for one in asked["objects"]]}

    def xet_access(self) -> dict[str, Any]:
        return {"casUrl": f"local://{self.store}", "accessToken": "any", "exp": 2**40}

    def from_xet(self, oid: str, size: int) -> bytes:
        """The content that the store has under a sha256; found in its shards, which are records of 48 bytes."""
        wanted = swapped(bytes.fromhex(oid))
        for shard in self.store.rglob("shards/*.mdb"):
            held, at = shard.read_bytes(), 48
            while held[at : at + 32] != b"\xff" * 32:  # a file: its hash, how it is made up, proofs of that, its sha256
                ends = at + 48 * (1 + 2 * int.from_bytes(held[at + 36 : at + 40], "little"))
                if held[ends : ends + 32] == wanted:
                    content = self.store / oid
                    with XetSession().new_file_download_group(endpoint=f"local://{self.store}") as group:
                        group.start_download_file(XetFileInfo(swapped(held[at : at + 32]).hex(), size), str(content))
                    return content.read_bytes()
                at = ends + 48
        raise KeyError(oid)

    def revision(self, repo: str) -> str:
        return hashlib.sha1(repr((repo, sorted(self.repos[repo].items()))).encode()).hexdigest()

    def described(self, repo: str) -> dict[str, Any]:
        names = [{"rfilename": name} for name in self.repos[repo]]
        return {"id": repo, "sha": self.revision(repo), "private": self.private[repo], "siblings": names, "tags": []}

    def tree(self, repo: str) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(held), "oid": hashlib.sha1(held).hexdigest()}
            for name, held in self.repos[repo].items()
        ]


def swapped(digest: bytes) -> bytes:
    """A digest as Xet writes it, or reads it: of each eight bytes the last first."""
    return b"".join(digest[i : i + 8][::-1] for i in range(0, len(digest), 8))


class Handler(BaseHTTPRequestHandler):
    """One request; `hub` is set by `serving`."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing: the terminal is pytest's."""

    def do_GET(self) -> None:
        self.answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.answer(self.body())

    do_PUT = do_POST

    def body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, body: bytes) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        if hub.down:
            return self.send(503, {"error": "under repair"})
        if path.startswith("/large/"):  # the store takes who has the link, as S3 does
            hub.objects[path.rpartition("/")[2]] = body
            return self.send(200, {})
        if path == "/api/validate-yaml":  # the front matter of a card; asked without a token
            matter = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            wrong = [] if isinstance(matter, dict) else [{"message": "no mapping"}]
            return self.send(400 if wrong else 200, {"errors": wrong, "warnings": []})
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, READER):
            return self.send(401, {"error": "Invalid username or password."})
        if path == "/api/whoami-v2":
            return self.send(200, {"name": USER, "type": "user", "orgs": []})
        if self.command in ("POST", "PUT") and token != TOKEN:
            return self.send(403, {"error": "This token may only read"})
        if path == "/api/repos/create":
            return self.send(*hub.create(json.loads(body)))
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self.give(*found.groups())
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            return self.send(*hub.preupload(json.loads(body)))
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/xet-write-token/main", path):
            return self.send(200, hub.xet_access())
        if re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            return self.send(*hub.batch(json.loads(body)))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self.send(*hub.commit(found[1], [json.loads(line) for line in body.splitlines()]))
        if (found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)/tree/[^/]+", path)) and found[1] in hub.repos:
            return self.send(200, hub.tree(found[1]))
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/tree/[^/]+/.+", path):  # no repository here has folders
            return self.send(404, {"error": "EntryNotFound"}, {"X-Error-Code": "EntryNotFound"})
        if (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path)) and found[1] in hub.repos:
            return self.send(200, hub.described(found[1]))
        return self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def give(self, repo: str, name: str) -> None:
        held = self.hub.repos.get(repo)
        if held is None or name not in held:
            code = "RepoNotFound" if held is None else "EntryNotFound"
            headers = {} if held is None else {"X-Repo-Commit": self.hub.revision(repo)}
            return self.send(404, {"error": code}, {"X-Error-Code": code, **headers})
        etag = f'"{hashlib.sha1(held[name]).hexdigest()}"'
        return self.send(200, held[name], {"ETag": etag, "X-Repo-Commit": self.hub.revision(repo)})

    def send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving(store: Path) -> Iterator[FakeHub]:
    """A hub without repositories, until the block is left."""
    hub = FakeHub(store)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
