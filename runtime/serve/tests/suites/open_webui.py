"""Open WebUI in front of samite, without a browser.

Usage: open_webui.py SAMITE OPEN_WEBUI_VENV MODEL

SAMITE is the program, OPEN_WEBUI_VENV a virtual environment with `pip install open-webui`, MODEL a
small chat model (GGUF). Both servers get free ports and a temporary data folder. Over OpenAI's and
ollama's API, through Open WebUI: models are listed, a conversation with a follow-up is streamed,
an answer is stopped, and a document is asked about (samite computes the embeddings). Fails if an
answer is empty, a follow-up is not cached, a stopped answer goes on, or samite answers any request
with 4xx or 5xx.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

KEY = "secret"
SECONDS = 300
DOCUMENT = "The lighthouse of Varnholm was built in 1871. Its keeper was Ida Brandt. It has 212 steps."


class Client:
    def __init__(self, key: str = ""):
        self.key = key
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.base = f"http://127.0.0.1:{probe.getsockname()[1]}"

    def open(self, path: str, body=None, kind="application/json"):
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"Content-Type": kind, "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.base + path, body, headers)
        try:
            return urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:
            sys.exit(f"{path}: {error.code} {error.read().decode(errors='replace')[:500]}")

    def json(self, path: str, body=None, kind="application/json"):
        with self.open(path, body, kind) as response:
            return json.load(response)

    def upload(self, path: str, name: str, text: str):
        mark = uuid.uuid4().hex
        head = f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        body = f"{head}Content-Type: text/plain\r\n\r\n{text}\r\n--{mark}--\r\n"
        return self.json(path, body.encode(), f"multipart/form-data; boundary={mark}")


def wait_for(client: Client, path: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(client.base + path, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"{path} does not answer:\n{log.read_text(errors='replace')[-3000:]}")


def events(response):
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def chat(web: Client, model: str, messages: list, **more) -> tuple[str, dict]:
    """Returns a streamed answer and its usage."""
    params = {"temperature": 0, "seed": 1, "max_tokens": 24, "top_k": 20, "min_p": 0.05}
    body = {"model": model, "messages": messages, "stream": True, "params": params}
    body["stream_options"] = {"include_usage": True}
    text, usage = "", {}
    with web.open("/api/chat/completions", body | more) as response:
        for event in events(response):
            if event.get("error"):
                sys.exit(f"{model}: {event['error']}")
            for choice in event.get("choices", []):
                text += choice["delta"].get("content") or ""
            usage = event.get("usage") or usage
    assert text.strip(), f"{model}: the answer is empty"
    assert usage.get("prompt_tokens") and usage.get("completion_tokens"), f"{model}: {usage}"
    return text, usage


def converse(web: Client, model: str, log: Path) -> None:
    messages = [
        {"role": "system", "content": "You are a guide to cities. Be brief."},
        {"role": "user", "content": "Which city is the capital of Italy?"},
    ]
    first, earlier = chat(web, model, messages)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And which one is the capital of France?"},
    ]
    _, usage = chat(web, model, messages)
    logged = re.findall(r": (\d+) prompt tokens \((\d+) cached", log.read_text())
    prompt, known = map(int, logged[-1])
    assert prompt == usage["prompt_tokens"], f"{model}: {prompt} tokens, and {usage}"
    assert known >= earlier["prompt_tokens"], f"{model}: {known} of {prompt} tokens were cached"
    print(f"{model}: {first!r}; follow-up: {known} of {prompt} prompt tokens cached")


def stop(web: Client, samite: Client, model: str) -> None:
    messages = [{"role": "user", "content": "Write a story of thirty chapters."}]
    params = {"max_tokens": 1000, "temperature": 1.5}
    body = {"model": model, "messages": messages, "stream": True, "params": params}
    with web.open("/api/chat/completions", body) as response:
        for _, _event in zip(range(3), events(response)):
            pass
    end = time.monotonic() + 10
    while any(slot["is_processing"] for slot in samite.json("/slots")):
        assert time.monotonic() < end, f"{model}: the server goes on with a stopped answer"
        time.sleep(0.2)
    print(f"{model}: a stopped answer ends")


def ask_about_document(web: Client, model: str, engine: str, samite: Client, name: str) -> None:
    url = samite.base + ("/v1" if engine == "openai" else "")
    settings = {"RAG_EMBEDDING_ENGINE": engine, "RAG_EMBEDDING_MODEL": name}
    settings[f"{engine}_config"] = {"url": url, "key": samite.key}
    web.json("/api/v1/retrieval/embedding/update", settings)
    text = f"{DOCUMENT} {uuid.uuid4()}"
    file = web.upload("/api/v1/files/?process=true&process_in_background=false", "facts.txt", text)
    query = {"collection_names": [f"file-{file['id']}"], "query": "keeper", "k": 1}
    found = web.json("/api/v1/retrieval/query/collection", query)
    assert "Ida Brandt" in found["documents"][0][0], found
    question = [{"role": "user", "content": "Who was the keeper of the lighthouse?"}]
    answer, usage = chat(web, model, question, files=[{"type": "file", "id": file["id"]}])
    assert usage["prompt_tokens"] > 100, f"{model}: the document is not in the prompt: {usage}"
    print(f"{model}: with a document ({engine}): {answer!r}")


def web_environment(folder: str, model: str) -> dict:
    off = "WEBUI_AUTH ENABLE_VERSION_UPDATE_CHECK ANONYMIZED_TELEMETRY ENABLE_RETRIEVAL_QUERY_GENERATION"
    on = "OFFLINE_MODE DO_NOT_TRACK SCARF_NO_ANALYTICS"
    engines = {"RAG_EMBEDDING_ENGINE": "openai", "RAG_EMBEDDING_MODEL": model, "AUDIO_STT_ENGINE": "openai"}
    env = os.environ | {key: "False" for key in off.split()} | {key: "True" for key in on.split()}
    return env | engines | {"HF_HUB_OFFLINE": "1", "DATA_DIR": folder, "WEBUI_SECRET_KEY": "test"}


def connect(web: Client, samite: Client) -> None:
    """Adds samite twice. A prefix tells the models of the connections apart."""
    url, key = samite.base, samite.key
    ollama = {"OLLAMA_BASE_URLS": [url], "OLLAMA_API_CONFIGS": {"0": {"key": key, "prefix_id": "ollama"}}}
    web.json("/ollama/config/update", ollama | {"ENABLE_OLLAMA_API": True})
    openai = {"OPENAI_API_BASE_URLS": [f"{url}/v1"], "OPENAI_API_KEYS": [key]}
    openai["OPENAI_API_CONFIGS"] = {"0": {"prefix_id": "openai"}}
    web.json("/openai/config/update", openai | {"ENABLE_OPENAI_API": True})
    web.json("/ollama/verify", {"url": url, "key": key})
    web.json("/openai/verify", {"url": f"{url}/v1", "key": key})


def main(program: str, venv: str, model: str) -> None:
    processes = []
    with tempfile.TemporaryDirectory(prefix="open-webui-") as folder:

        def start(client: Client, log: Path, command: list, **more) -> None:
            command += ["--port", client.base.rsplit(":", 1)[1]]
            with log.open("wb") as out:
                processes.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, **more))
            wait_for(client, "/health", processes[-1], log)

        log, web_log = Path(folder, "samite.log"), Path(folder, "open-webui.log")
        samite, web = Client(KEY), Client()
        try:
            flags = ["-c", "8192", "--api-key", KEY, "--embeddings", "--log", "info"]
            start(samite, log, [Path(program).resolve(), "serve", "-m", Path(model).resolve(), *flags])
            name = samite.json("/v1/models")["data"][0]["id"]
            command = [Path(venv, "bin", "open-webui").absolute(), "serve", "--host", "127.0.0.1"]
            start(web, web_log, command, env=web_environment(folder, name))
            web.key = web.json("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
            connect(web, samite)
            listed = {entry["id"] for entry in web.json("/api/models?refresh=true")["data"]}
            assert {f"openai.{name}", f"ollama.{name}"} <= listed, listed
            for kind in ["openai", "ollama"]:
                converse(web, f"{kind}.{name}", log)
                stop(web, samite, f"{kind}.{name}")
                ask_about_document(web, f"{kind}.{name}", kind, samite, name)
            refused = re.findall(r".*: [45]\d\d after .*", log.read_text())
            assert not refused, "\n".join(refused)
            print("samite refused no request")
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(60)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
