#!/usr/bin/env python3
"""Turns of a coding agent: samite serve beside llama-server, in turns.

    turns.py --samite target/release/samite --other PATH/llama-server -m model.gguf [--tokens 30000] [--turns 10]

A session is recorded by this script: a system prompt with tools, a question, then in each turn a call of a tool and its result (files of this
repository). The first turn has 40 % of the tokens, each further one an equal share of the rest. A turn is sent to one server and then to the
other, which both hold the session; the messages before it are those of the recording, as an agent sends them. Printed are, for each turn, the
tokens of the prompt, those that are new, those that each server computed, and the times to the first token. Only Python's own library is needed.
"""

import argparse
import http.client
import json
import statistics
import time
from pathlib import Path

from load import Server

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name, what in [("read", "Reads a file."), ("list", "Lists a folder."), ("test", "Runs the tests of a crate.")]
]

# Both servers render the same text.
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if loop.first %}{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}
{% endfor %}{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def session(tokens, turns, count):
    """The messages that each turn adds. `count` returns the tokens of a text."""
    files = sorted(ROOT.glob("runtime/*/src/*.rs"))
    source = "\n".join(file.read_text() for file in files)
    rate = count(source[: 2 * tokens]) / (2 * tokens)
    share = int(tokens * 0.6 / (turns - 1) / rate)
    first = int(tokens * 0.4 / rate)
    added = [[{"role": "system", "content": source[:first]}, {"role": "user", "content": "Why does the server compute a prompt twice?"}]]
    for turn in range(1, turns):
        at = first + (turn - 1) * share
        path = str(files[turn].relative_to(ROOT))
        call = {"id": f"call{turn:05}", "type": "function", "function": {"name": "read", "arguments": json.dumps({"path": path})}}
        added.append(
            [
                {"role": "assistant", "content": f"I read {path} next.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": source[at : at + share]},
            ]
        )
    return added


def ask(port, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=7200)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def turn(port, messages):
    """The time to the first token, and the tokens of the prompt that were cached and computed."""
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 8, "temperature": 0, "stream": True, "ignore_eos": True}
    begin = time.monotonic()
    response = ask(port, "/v1/chat/completions", body)
    if response.status != 200:
        raise SystemExit(response.read().decode())
    first, timings = None, None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        delta = (event.get("choices") or [{}])[0].get("delta", {})
        if first is None and any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            first = time.monotonic() - begin
        timings = event.get("timings") or timings
    # Tokens of the model may be no text.
    first = time.monotonic() - begin if first is None else first
    return first, timings["cache_n"], timings["prompt_n"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samite", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("-t", "--threads", default="2")
    parser.add_argument("--side", action="store_true", help="ask for a title between turns, as agents do")
    args = parser.parse_args()
    flags = ["-m", args.model, "-c", str(args.tokens * 3 // 2), "-np", "1", "-t", args.threads, "--jinja", "--chat-template", TEMPLATE]
    servers = [Server([args.samite, "serve"], flags), Server([args.other], flags)]
    try:
        tokenize = lambda text: len(json.load(ask(servers[0].port, "/tokenize", {"content": text}))["tokens"])
        messages, before, ratios = [], 0, []
        print("| turn | prompt | new | computed: samite | llama-server | first token: samite | llama-server | ratio |\n|---|---|---|---|---|---|---|---|")
        for number, added in enumerate(session(args.tokens, args.turns, tokenize), 1):
            messages += added
            if args.side and number > 1:
                for server in servers:
                    turn(server.port, [{"role": "system", "content": "Write a title."}, {"role": "user", "content": f"Turn {number}"}])
            rows = [turn(server.port, messages) for server in servers]
            (own, cached, computed), (other, _, computed_other) = rows
            prompt = cached + computed
            ratios.append(other / own)
            print(f"| {number} | {prompt} | {prompt - before} | {computed} | {computed_other} | {own:.2f} s | {other:.2f} s | {other / own:.2f} |", flush=True)
            before = prompt
        print(f"median ratio of turns 2 to {args.turns}: {statistics.median(ratios[1:]):.2f}")
    finally:
        for server in servers:
            server.process.kill()


if __name__ == "__main__":
    main()
