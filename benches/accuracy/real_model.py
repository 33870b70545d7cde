#!/usr/bin/env python3
"""What random weights cannot judge, on a model with real ones:

    benches/accuracy/real_model.py SAMITE MODEL

A saved session goes on as if it had not stopped; the server reuses prefixes; a context shift keeps writing words; JSON keeps to
its schema, and calls to their tools; drafts change no text; an adapter that was trained for some steps lowers the perplexity of
its text. Times and acceptance are printed, not judged. The model must follow chats (SmolLM2 135M Instruct does), and be one in F32:
beside quantized weights activations are rounded, so that nearly equal tokens change places with how a text is cut into batches.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPT = "The harbour was built when coal was still carried by sail. For forty years"
# Names and places, so that a text repeats what came before: drafts have something to find.
REPEAT = "Copy this list twice, word for word: Ellen Abara, Tomas Lind, Ruth Okafor, Chapel Street, Western Mole, Customs House."


def check(what, is_right, detail=""):
    print(f"{'ok' if is_right else 'FAILED'}: {what}{f' ({detail})' if detail else ''}", flush=True)
    check.failures += not is_right


check.failures = 0


def samite(*words):
    result = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"samite {' '.join(map(str, words))} ended with {result.returncode}: {result.stderr[-2000:]}")
    return result.stdout


def write(*words):
    return samite("run", "-m", model, "--temp", "0", *words)


class Server:
    def __init__(self, *words):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [program, "serve", "-m", model, "--port", str(self.port), "-c", "2048", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready")
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(f"{' '.join(map(str, command))} ended with {self.process.returncode}")
                time.sleep(0.2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def chat(self, *messages, **fields):
        roles = ["user", "assistant"] * len(messages)
        messages = [{"role": role, "content": text} for role, text in zip(roles, messages)]
        body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 64} | fields).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/chat/completions", body, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def sessions(folder):
    session = folder / "session"
    whole = write("-p", PROMPT, "-n", 40)
    first = write("-p", PROMPT, "-n", 20, "--session", session)
    second = write("-n", 20, "--session", session)
    check("a saved session goes on as if it had not stopped", first != second == whole, repr(second.strip()[-40:]))


def prefixes():
    with Server() as server:
        text = (HERE / "text.txt").read_text()[:3000]
        first = server.chat(f"{text}\n\nWhat was carried by sail?")
        second = server.chat(f"{text}\n\nWhich birds nest there?")
        again = server.chat(f"{text}\n\nWhat was carried by sail?")
        cached, total = [second["usage"]["prompt_tokens_details"]["cached_tokens"], second["usage"]["prompt_tokens"]]
        check("the server reuses the prefix of another question", cached > 0.9 * (total - 30), f"{cached} of {total} tokens")
        check("an answer with a cached prefix is the one without", text_of(first) == text_of(again), repr(text_of(again)[:60]))


def shift():
    with Server("--context-shift", "-c", "256") as server:
        answer = server.chat("Tell a long story about a lighthouse.", max_tokens=600, ignore_eos=True)
        words = re.findall(r"[a-z]{3,}", text_of(answer).lower())
        written = answer["usage"]["completion_tokens"]
        check("a text longer than its context goes on in words", written == 600 and len(words) > 200, f"{written} tokens, {len(words)} words")


def schemas():
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "year": {"type": "integer"}, "is_open": {"type": "boolean"}},
        "required": ["name", "year", "is_open"],
        "additionalProperties": False,
    }
    text = write("-p", "The museum at Ellen's Point as JSON:", "-n", 120, "-j", json.dumps(schema)).split("JSON:")[-1]
    value = json.loads(text)
    types = {key: type(value[key]) for key in value}
    check("JSON keeps to its schema", types == {"name": str, "year": int, "is_open": bool}, text.strip().replace("\n", " ")[:80])


def tools():
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": parameters}}
    with Server() as server:
        answer = server.chat("What is the weather in Lisbon?", tools=[tool], tool_choice="required", max_tokens=120)
        call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        arguments = json.loads(call["arguments"])
        check("a call names its tool and keeps to its parameters", call["name"] == "get_weather" and list(arguments) == ["city"], call["arguments"])


def drafts():
    figures = {}
    for name, flags in {"plain": [], "n-grams": ["--draft", "16"], "draft of itself": ["--model-draft", str(model)]}.items():
        with Server(*flags) as server:
            server.chat(REPEAT, max_tokens=8)
            figures[name] = server.chat(REPEAT, max_tokens=128)
    plain = text_of(figures["plain"])
    for name, answer in figures.items():
        timings = answer.get("timings", {})
        drafted, kept = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        detail = f"{timings.get('predicted_per_second', 0):.1f} tokens/s, {kept} of {drafted} drafted tokens accepted"
        check(f"{name}: the text is the same", text_of(answer) == plain, detail)


def adapters(folder):
    paragraphs = [line for line in (HERE / "text.txt").read_text().splitlines() if len(line) > 300]
    (folder / "train.txt").write_text("\n".join(paragraphs))
    (folder / "lora.toml").write_text(f"""name = "harbour"
[lora]
base = {json.dumps(str(model))}
rank = 4
alpha = 8.0
targets = ["attn_q", "attn_v"]
context = 64
[data]
train = "train.txt"
held_out = "train.txt"
[training]
steps = 100
batch = 1
schedule = {{ rate = 0.001, warmup = 5, last_rate = 0.0002 }}
evaluate_every = 100
evaluate_batches = 2
""")
    begun = time.monotonic()
    samite("train", folder / "lora.toml", "-o", folder / "adapted")
    taken = time.monotonic() - begun
    measure = ["perplexity", "-m", model, "-f", folder / "train.txt", "-c", "128", "--json"]
    before = json.loads(samite(*measure))["perplexity"]
    after = json.loads(samite(*measure, "--lora", folder / "adapted/adapter.gguf"))["perplexity"]
    check("an adapter that was trained for 100 steps lowers the perplexity", after < 0.9 * before, f"{before:.2f} to {after:.2f}, {taken:.0f} s")


def main():
    with tempfile.TemporaryDirectory() as folder:
        sessions(Path(folder))
        prefixes()
        shift()
        schemas()
        tools()
        drafts()
        adapters(Path(folder))
    sys.exit(1 if check.failures else 0)


program, model = (Path(word).resolve() for word in sys.argv[1:])
main()
