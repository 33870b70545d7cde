"""A plugin of pytest for llama.cpp's tests of its server. Nothing is downloaded before they begin. The cache has small models under the names that
tests use, and a hub on the loopback has one more."""

import hashlib
import http.server
import json
import os
import pathlib
import shutil
import tempfile
import threading

import utils

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = pathlib.Path(os.environ["STORIES"])
CACHED = {
    "ggml-org/tinygemma3-GGUF": "tinygemma3-Q8_0.gguf",
    "ggml-org/test-model-stories260K": "stories260K-F32.gguf",
    "ggml-org/test-model-stories260K-infill": "stories260K-infill-F32.gguf",
}
REMOTE = ("ggml-org/test-model-router-download", "download-F16.gguf")


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        repository, name = REMOTE
        content = FILE.read_bytes()
        if repository not in self.path:
            self.send_error(404)
            return
        if "/revision/" in self.path:
            answer = json.dumps({"sha": COMMIT}).encode()
        elif "/tree/" in self.path:
            oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            answer = json.dumps([{"type": "file", "path": name, "size": len(content), "oid": oid}]).encode()
        else:
            answer = content
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def load_all():
    """The models that are there are enough."""


utils.ServerPreset.load_all = staticmethod(load_all)
folder = tempfile.TemporaryDirectory()
for repository, name in CACHED.items():
    place = pathlib.Path(folder.name, "models--" + repository.replace("/", "--"))
    file = place / "snapshots" / COMMIT / name
    file.parent.mkdir(parents=True)
    shutil.copy(FILE, file)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=hub.serve_forever, daemon=True).start()
os.environ |= {"HF_HUB_CACHE": folder.name, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
