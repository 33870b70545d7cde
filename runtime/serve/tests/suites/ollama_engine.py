"""Starts samite as ollama starts `llama-server`, sends ollama's requests, and checks the fields that it reads.

Usage: SAMITE=PROGRAM ollama_engine.py [--ollama PROGRAM]. Needs only the standard library. ollama 0.30 and later
run models in this way. With --ollama, that program creates a model and answers requests by means of samite.
"""

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[4]
MODEL = ROOT / "models/stories/stories.gguf"
# The guard against hangs, in seconds.
GUARD = 120
CONTEXT = 256
LOG = ["--log-verbosity", "4", "--no-log-prefix", "--no-log-timestamps"]
QUIET = ["--host", "127.0.0.1", "--no-webui", "--offline"]
# Flags by the kind of model and the user's options. Values without a flag are of the flag before.
BY_GO_TEMPLATE = ["--no-jinja", "--chat-template", "chatml"]
SHIFTS = ["--context-shift", "--keep", "4"]
UNMAPPED = ["--load-mode", "none", "--flash-attn", "auto", "-b", "64", "-ub", "64"]
ON_CPU = ["--load-mode", "dio", "-ngl", "0", "-t", "1", "--split-mode", "none", "--main-gpu", "0"]
CACHE_TYPES = ["--cache-type-k", "f16", "--cache-type-v", "f16", "--flash-attn", "on"]
WITH_IMAGES = ["--no-mmproj-offload", "--image-min-tokens", "1024"]
DRAFTS = ["--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-backend-sampling"]
EMBEDDING = ["--embedding", "-b", str(CONTEXT), "-ub", str(CONTEXT), "--flash-attn", "off"]
# Lines that ollama parses.
DEVICE = re.compile(r"^\s+(.+?):\s+(.+?)\s+\((\d+)\s+MiB,\s+(\d+)\s+MiB\s+free\)")
BUFFER = re.compile(r"^[^\n:]*?(\w+):\s+(\S+)\s+(model|KV|compute|output|RS)\s+buffer size\s*=\s*([\d.]+)\s*MiB")
LAYERS = re.compile(r"offloaded\s+(\d+)/(\d+)\s+layers to GPU")
# Words that make a line of the log the reason of a failure.
FAILURES = ["error:", "Error:", "panic:", "fatal error:", "out of memory", "failed to allocate"]
OPTIONS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.1,
    "repeat_last_n": 64,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": -1,
    "n_keep": 4,
    "cache_prompt": True,
}
JSON_GRAMMAR = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") space
object ::= "{" space (string ":" space value ("," space string ":" space value)*)? "}" space
array ::= "[" space (value ("," space value)*)? "]" space
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]))* "\"" space # text
number ::= "-"? ([0-9] | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? space
space ::= ([ \t\n] space)?
"""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "pick", "description": "Picks.", "parameters": SCHEMA}}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """A llama-server with these flags, as ollama starts it and waits for it."""

    def __init__(self, program, *flags, model=MODEL):
        self.port, self.lines = free_port(), []
        command = [program, "--model", str(model), "--port", str(self.port), *QUIET, *LOG, *flags]
        environment = {**os.environ, "LLAMA_ARG_FIT_TARGET": "1024", "LLAMA_MEDIA_MARKER": "<__media__>"}
        environment["LD_LIBRARY_PATH"] = str(pathlib.Path(program).parent)
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self.reader.start()

    def __enter__(self):
        guard = time.monotonic() + GUARD
        while self.status() != "ok":
            assert self.process.poll() is None and time.monotonic() < guard, "".join(self.lines)
            time.sleep(0.05)
        for line in self.lines:
            assert not any(word in line for word in FAILURES), line
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join()

    def status(self):
        try:
            answer = self.ask("/health", None)[1]
        except ConnectionRefusedError:
            return "not responding"
        return answer["status"] if "status" in answer else answer["error"]["message"].lower()

    @contextlib.contextmanager
    def opened(self, path, body):
        # ollama keeps no connections.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GUARD)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        text = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text, headers)
        yield connection.getresponse()
        connection.close()

    def ask(self, path, body):
        with self.opened(path, body) as response:
            return response.status, json.loads(response.read())

    def events(self, path, body):
        """Returns the events of a stream."""
        with self.opened(path, body) as response:
            assert response.status == 200, response.read()
            lines = (line.decode().rstrip("\n") for line in response)
            lines = [line for line in lines if line and not line.startswith(":")]
        events = [line.removeprefix("data: ") for line in lines]
        return [json.loads(event) for event in events if event != "[DONE]"]

    def tokens(self, text, special=True):
        tokens = self.ask("/tokenize", {"content": text, "add_special": special})[1]["tokens"]
        assert all(type(token) is int for token in tokens), tokens
        return tokens

    def memory(self):
        """Returns the MiB by memory and purpose, and the layers on GPUs and in total."""
        found = [BUFFER.match(line) for line in self.lines]
        sizes = {(match[2], match[3]): float(match[4]) for match in found if match}
        layers = [match for match in map(LAYERS.search, self.lines) if match]
        assert len(layers) == 1, self.lines
        return sizes, (int(layers[0][1]), int(layers[0][2]))


def check_timings(timings, prompt, predicted):
    assert type(timings["cache_n"]) is int and type(timings["prompt_n"]) is int, timings
    assert timings["cache_n"] + timings["prompt_n"] == prompt, timings
    assert timings["predicted_n"] == predicted, timings
    assert timings["prompt_ms"] >= 0 and timings["predicted_ms"] >= 0, timings


def completion(server, prompt, **more):
    """Returns the text of a completion and its last event."""
    body = {**OPTIONS, "prompt": prompt, "stream": True, "n_predict": 12, **more}
    events = server.events("/completion", body)
    *parts, last = events
    assert last["stop"] is True and last["stop_type"] in ("limit", "eos", "word"), last
    assert not any(part["stop"] for part in parts), parts
    return "".join(event["content"] for event in events), last, parts


def chat(server, text, **more):
    """Returns the deltas of a streamed answer and its last event."""
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    body = {**OPTIONS, "messages": messages, "stream": True, "n_predict": 12, "stop": [], **more}
    events = [event for event in server.events("/v1/chat/completions", body) if event["choices"]]
    choices = [event["choices"][0] for event in events]
    ends = [event for event, choice in zip(events, choices) if choice["finish_reason"] is not None]
    assert len(ends) == 1 and ends[0] is events[-1], events
    assert not any(event.get("error") for event in events), events
    return choices, ends[0]


def content(choices):
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def discovery(program):
    """Reads the log of a server without a model up to the line of the system, and the list of devices."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(pathlib.Path(program).parent)}
    command = [program, "--port", str(free_port()), *QUIET, "--verbose"]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    guard = threading.Timer(GUARD, server.kill)
    guard.start()
    before = []
    for line in server.stderr:
        if "system_info:" in line:
            break
        before.append(line)
    else:
        raise AssertionError("no line of the system in: " + "".join(before))
    server.kill()
    server.wait()
    guard.cancel()
    listing = [program, "--list-devices", "--offline", "--verbose"]
    output = subprocess.run(listing, env=environment, capture_output=True, text=True, timeout=GUARD, check=True)
    devices = [match for match in map(DEVICE.match, output.stdout.splitlines()) if match]
    assert output.stdout.startswith("Available devices:\n"), output
    logged = [line for line in before if re.search(r"Device\s+\d+:", line)]
    assert len(devices) == len(logged), (devices, before)
    return [match[1] for match in devices]


def go_template(program):
    """Prompts that ollama renders itself, with a context that shifts."""
    flags = ["-c", str(2 * CONTEXT), "-np", "2", *BY_GO_TEMPLATE, *UNMAPPED, *SHIFTS]
    with Server(program, *flags) as server:
        sizes, (_, layers) = server.memory()
        assert layers > 1 and {purpose for _, purpose in sizes} == {"model", "KV", "compute"}, sizes
        prompt = "Once upon a time, there was a"
        count = len(server.tokens(prompt))
        for _ in range(2):
            text, last, parts = completion(server, prompt)
            assert text and len(parts) > 3 and last["stop_type"] == "limit", last
            check_timings(last["timings"], count, 12)
        assert last["timings"]["cache_n"] > 0, last
        _, last, parts = completion(server, prompt, stop=["e"], preserved_tokens=["[TOOL_CALLS]"], n_predict=200)
        assert last["stop_type"] == "word" and "e" not in "".join(part["content"] for part in parts), last
        _, _, parts = completion(server, prompt, n_probs=2)
        for found in (found for part in parts for found in part["completion_probabilities"]):
            assert found["token"] and found["logprob"] < 0 and len(found["top_logprobs"]) == 2, found
            assert all(other["token"] is not None and other["logprob"] <= 0 for other in found["top_logprobs"]), found
        text = completion(server, prompt, json_schema=SCHEMA, n_predict=60)[0]
        assert 1 <= json.loads(text)["n"] <= 9, text
        text = completion(server, prompt, grammar=JSON_GRAMMAR, temperature=0.0, n_predict=40)[0]
        assert text.startswith("{"), text
        # ollama removes the middle of a long prompt and sends tokens.
        tokens = server.tokens(prompt * 9, special=False)[: CONTEXT // 2]
        check_timings(completion(server, tokens)[1]["timings"], len(tokens), 12)
        text = server.ask("/detokenize", {"tokens": tokens[:4]})[1]["content"]
        assert text and (prompt * 9).startswith(text.strip()), text
        _, last, _ = completion(server, prompt, n_predict=2 * CONTEXT, logit_bias=[[2, False]])
        assert last["timings"]["predicted_n"] == 2 * CONTEXT and last["stop_type"] == "limit", last
        status, answer = server.ask("/completion", {**OPTIONS, "prompt": prompt * 99, "stream": True})
        assert status == 400 and answer["error"]["message"], answer
        status, answer = server.ask("/v1/embeddings", {"input": "a"})
        assert status == 501 and answer["error"]["message"], answer
        cancelled(server, prompt)
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(completion(server, prompt))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 6 and all(text for text, *_ in answers), answers


def cancelled(server, prompt):
    """Closes the connection of a long answer. All slots must be free again for others."""
    for _ in range(3):
        body = {**OPTIONS, "prompt": prompt, "stream": True, "n_predict": 100 * CONTEXT, "logit_bias": [[2, False]]}
        with server.opened("/completion", body) as response:
            assert response.readline().startswith(b"data: ")
    assert completion(server, prompt)[0] and server.status() == "ok"


def unsupported_encoder():
    """A file of an image encoder whose projector samite does not have: the model is served without it."""
    text = lambda text: struct.pack("<Q", len(text)) + text.encode()
    keys = {"general.architecture": "clip", "clip.projector_type": "other"}
    pairs = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in keys.items())
    path = pathlib.Path(tempfile.mkdtemp()) / "mmproj.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + pairs)
    return str(path)


def own_template(program):
    """Conversations that llama-server renders."""
    flags = ["-c", str(6 * CONTEXT), "-np", "2", *WITH_IMAGES, *ON_CPU, *CACHE_TYPES, *DRAFTS]
    flags += ["--mmproj", unsupported_encoder()]
    with Server(program, *flags, "--chat-template", "chatml") as server:
        assert server.memory()[1][0] == 0, server.lines
        messages = [{"role": "user", "content": "Once upon a time"}]
        rendered = server.ask("/apply-template", {**OPTIONS, "messages": messages, "stream": False})[1]["prompt"]
        assert "Once upon a time" in rendered, rendered
        choices, end = chat(server, messages)
        assert content(choices) and choices[-1]["finish_reason"] == "length", choices
        check_timings(end["timings"], len(server.tokens(rendered)), 12)
        choices, _ = chat(server, messages, logprobs=True, top_logprobs=2)
        found = [token for choice in choices for token in (choice.get("logprobs") or {}).get("content") or []]
        assert len(found) == 12 and all(len(token["top_logprobs"]) == 2 for token in found), found
        choices, _ = chat(server, messages, n_predict=60, response_format={"type": "json_object"}, temperature=0.0)
        assert content(choices).startswith("{"), choices
        schema = {"type": "json_schema", "json_schema": {"name": "schema", "schema": SCHEMA}}
        choices, end = chat(server, messages, n_predict=60, response_format=schema)
        assert 1 <= json.loads(content(choices))["n"] <= 9 and choices[-1]["finish_reason"] == "stop", choices
        # ollama leaves the choice to the model; the small one needs to be told.
        choices, _ = chat(server, messages, n_predict=100, tools=[TOOL], tool_choice="required")
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or []]
        assert calls[0]["index"] == 0 and calls[0]["id"] and calls[0]["function"]["name"] == "pick", calls
        arguments = "".join(call["function"].get("arguments", "") for call in calls if call["index"] == 0)
        assert 1 <= json.loads(arguments)["n"] <= 9, calls
        call = {"id": "1", "index": 0, "type": "function", "function": {"name": "pick", "arguments": '{"n":3}'}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "three", "tool_call_id": "1", "name": "pick"}
        effort = {"enable_thinking": True, "reasoning_effort": "low"}
        choices, _ = chat(server, [*messages, called, result], tools=[TOOL], chat_template_kwargs=effort)
        assert choices[-1]["finish_reason"] in ("length", "stop", "tool_calls"), choices
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        body = {**OPTIONS, "messages": [{"role": "user", "content": [image]}], "stream": True}
        status, answer = server.ask("/v1/chat/completions", body)
        assert 400 <= status < 500 and answer["error"]["message"], answer


def embeddings(program):
    """A model of embeddings, whose longest input fills the context."""
    with Server(program, "-c", str(CONTEXT), "-np", "1", *EMBEDDING) as server:
        added = len(server.tokens("a")) - len(server.tokens("a", special=False))
        for more, unit in (({}, True), ({"embd_normalize": -1}, False)):
            status, answer = server.ask("/v1/embeddings", {"input": "Once upon a time", **more})
            assert status == 200 and answer["usage"]["prompt_tokens"] == len(server.tokens("Once upon a time")), answer
            values = answer["data"][0]["embedding"]
            assert (abs(sum(value * value for value in values) - 1) < 1e-3) == unit, values
        tokens = server.tokens("Once upon a time. " * CONTEXT, special=False)
        # Tokens at the start of a text have a space, which is added again.
        fits = server.ask("/detokenize", {"tokens": tokens[: CONTEXT - added]})[1]["content"].lstrip()
        assert len(server.tokens(fits)) == CONTEXT, fits
        assert server.ask("/v1/embeddings", {"input": fits})[0] == 200
        status, answer = server.ask("/v1/embeddings", {"input": fits + " and then"})
        assert status == 400 and "context size" in answer["error"]["message"], answer


def failures(program, folder):
    """A model that is not one ends the program with its reason."""
    broken = folder / "broken.gguf"
    broken.write_bytes(b"nothing")
    server = Server(program, model=broken)
    assert server.process.wait(timeout=GUARD) != 0
    server.reader.join()
    assert any("error: " in line and "broken.gguf" in line for line in server.lines), server.lines


def quantize(program, folder):
    """`ollama create` copies each model with llama-quantize, and quantizes some."""
    for name in ("COPY", "Q8_0"):
        target = folder / f"{name}.gguf"
        with open(target, "w+b") as held:
            command = [program, "--allow-requantize", str(MODEL), str(target), name]
            subprocess.run(command, check=True, capture_output=True)
            # ollama reads the file that it made before.
            assert held.read() == target.read_bytes() != b"", name
        with Server(folder / "lib/ollama/llama-server", "-c", "64", model=target):
            pass


class Ollama:
    """ollama itself, with samite in the place where it looks for llama.cpp's programs."""

    def __init__(self, folder):
        self.address = f"127.0.0.1:{free_port()}"
        environment = {"HOME": str(folder), "OLLAMA_HOST": self.address, "OLLAMA_MODELS": str(folder / "models")}
        environment |= {"OLLAMA_NO_CLOUD": "1", "OLLAMA_NUM_PARALLEL": "2", "PATH": os.environ["PATH"]}
        log = open(folder / "ollama.txt", "w")
        self.process = subprocess.Popen([folder / "bin/ollama", "serve"], env=environment, stderr=log, stdout=log)

    def ask(self, path, body, data=None, method="POST"):
        connection = http.client.HTTPConnection(self.address, timeout=GUARD)
        connection.request(method, path, data or json.dumps(body))
        response = connection.getresponse()
        lines = response.read().splitlines()
        return response.status, [json.loads(line) for line in lines if line]

    def answer(self, path, **body):
        status, lines = self.ask(path, {"model": "story", "stream": False, **body})
        assert status == 200 and "error" not in lines[-1], (path, body, lines)
        return lines[-1]


def real(program, folder):
    """Creates a model and asks for each kind of answer."""
    (folder / "bin").mkdir()
    shutil.copy(program, folder / "bin/ollama")
    ollama = Ollama(folder)
    try:
        guard = time.monotonic() + GUARD
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                ollama.ask("/api/version", None, method="GET")
                break
            assert time.monotonic() < guard
            time.sleep(0.1)
        data = MODEL.read_bytes()
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        assert ollama.ask("/api/blobs/" + digest, None, data)[0] == 201
        template = "{{ range .Messages }}{{ .Content }}{{ end }}"
        made = ollama.answer("/api/create", files={"story.gguf": digest}, template=template)
        assert made["status"] == "success", made
        options = {"num_predict": 12, "num_ctx": CONTEXT, "temperature": 0}
        said = ollama.answer("/api/generate", prompt="Once upon a time", options=options)
        assert said["response"] and said["eval_count"] == 12 and said["prompt_eval_count"] > 0, said
        _, lines = ollama.ask("/api/generate", {"model": "story", "prompt": "Once", "options": options})
        assert "".join(line["response"] for line in lines) and len(lines) > 6, lines
        messages = [{"role": "user", "content": "Once upon a time"}]
        said = ollama.answer("/api/chat", messages=messages, options={**options, "num_predict": 60}, format=SCHEMA)
        assert 1 <= json.loads(said["message"]["content"])["n"] <= 9, said
        said = ollama.answer("/api/chat", messages=messages, options=options, logprobs=True, top_logprobs=2)
        assert said["message"]["content"] and len(said["logprobs"]) == 12, said
        said = ollama.answer("/api/generate", prompt="Once upon a time. " * CONTEXT, options=options, raw=True)
        assert 0 < said["prompt_eval_count"] < CONTEXT, said
        (shown,) = ollama.ask("/api/ps", None, method="GET")[1][0]["models"]
        assert shown["size"] > 0 and shown["context_length"] == CONTEXT, shown
        assert ollama.answer("/api/generate", keep_alive=0)["done_reason"] == "unload"
    finally:
        ollama.process.terminate()
        ollama.process.wait()
    log = (folder / "ollama.txt").read_text()
    assert "system_info line not found" not in log and "starting llama-server" in log, log


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ollama", metavar="PROGRAM", type=pathlib.Path)
    ollama = parser.parse_args().ollama
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "lib/ollama").mkdir(parents=True)
        for name in ("llama-server", "llama-quantize"):
            os.symlink(pathlib.Path(os.environ["SAMITE"]).resolve(), folder / "lib/ollama" / name)
        program = folder / "lib/ollama/llama-server"
        print("devices:", ", ".join(discovery(program)) or "none")
        go_template(program)
        own_template(program)
        embeddings(program)
        failures(program, folder)
        quantize(folder / "lib/ollama/llama-quantize", folder)
        if ollama:
            real(ollama, folder)
            print("ollama itself used samite")
    print("samite stands in for ollama's llama-server")


if __name__ == "__main__":
    main()
