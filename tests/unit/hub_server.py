"""In-memory model hub on this machine that serves the calls of an upload."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """HTTP server; `repos`: name -> branch -> path -> bytes, `requests`: method and path of every call."""

    def __init__(self, token="hf_valid"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.token, self.requests, self.repos, self.private = token, [], {}, {}

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): ...

    def answer(self, status, body=None, **headers):
        content = json.dumps({} if body is None else body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_call(self):
        path, body = self.path.partition("?")[0], self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {path}")
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.answer(401, {"error": "Invalid credentials"}, **{"X-Error-Message": "Invalid credentials"})
        if path == "/api/repos/create":
            created = json.loads(body)
            name = f"{created['organization']}/{created['name']}"
            known = name in self.server.repos
            self.server.repos.setdefault(name, {"main": {}})
            self.server.private.setdefault(name, created.get("visibility") == "private")
            return self.answer(409 if known else 200, {"url": f"{self.server.address}/{name}"})
        if path.startswith("/api/models/"):
            _, _, _, user, repo, call, *rest = path.split("/")
            return self.of_repo(f"{user}/{repo}", call, rest, body)
        if path.startswith("/api/"):  # other calls of the client, such as the validation of a model card's header
            return self.answer(200, {"errors": [], "warnings": []})
        _, user, repo, _, branch, *file = path.split("/")  # /user/repo/resolve/branch/file
        found = self.server.repos[f"{user}/{repo}"].get(branch, {}).get("/".join(file))
        headers = {"ETag": '"1"', "X-Repo-Commit": "0" * 40}
        return self.answer(
            404 if found is None else 200, **({"X-Error-Code": "EntryNotFound"} if found is None else headers)
        )

    def of_repo(self, name, call, rest, body):
        repo = self.server.repos[name]
        if call == "branch":
            repo[rest[0]] = dict(repo["main"])
            return self.answer(200)
        if call == "preupload":
            files = json.loads(body)["files"]
            return self.answer(
                200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        if call == "commit":
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    repo[rest[0]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{self.server.address}/{name}/commit/{'0' * 40}",
            }
            return self.answer(200, commit)
        return self.answer(404, {"error": f"no call {call}"})

    do_GET = do_POST = do_HEAD = do_PUT = handle_call


@contextmanager
def serving(**settings):
    """Yield a hub that listens until the block ends."""
    hub = Hub(**settings)
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
