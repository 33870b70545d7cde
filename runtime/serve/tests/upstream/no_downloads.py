"""A plugin of pytest for llama.cpp's tests of its server. Nothing is downloaded before they begin. The cache has small models under the names that
tests use, and a hub on the loopback has one more. Tests of images have a model with random weights, so that only the protocol is judged."""

import hashlib
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading

import requests
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

FIXTURES = pathlib.Path(__file__).parents[3] / "vision/tests/fixtures"
os.environ["ENCODER"] = str(FIXTURES / "gemma3.gguf")
os.environ["WITH_IMAGES"] = os.path.join(folder.name, "gemma3.gguf")
subprocess.run([os.environ["SAMITE"], "dev", "synth", os.environ["WITH_IMAGES"], "--arch", "gemma3", "--type", "f32"], check=True, capture_output=True)


class Image:
    """The answer to a request for a test's image."""

    cases = json.loads((FIXTURES / "decoded.json").read_text())["cases"]
    content = bytes(next(case["file"] for case in cases if case["name"] == "rgb"))

    def raise_for_status(self):
        pass


get = requests.get
requests.get = lambda url, *more, **named: Image() if "/tinygemma3-GGUF/resolve/" in url else get(url, *more, **named)
