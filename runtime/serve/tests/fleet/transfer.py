#!/usr/bin/env python3
"""Prefill on one server, decode on another: is the text the same, how long does the transfer take, and what is gained?

    transfer.py SAMITE -m MODEL [--tokens 4096] [--gbit 1] [--mixed]

The servers are in a network of their own, whose link has the given speed (Linux, root, `unshare`, `ip`, `tc`). A
prompt is computed on one server and generated from on the other; the text has to be that of a single server, and the
transfer may take 1.2 times the bytes over the speed of the link. --mixed then has clients stream answers while long
prompts come in, and compares two servers that both do everything with one for prompts and one for answers. Exits
with 1 if a bound does not hold.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from routers import Bounds, Child, free_ports, wait_for, words

FETCHED = re.compile(r"(\d+) tokens \((\d+) bytes\) fetched from \S+ in ([\d.]+) ms")
INNER = "SAMITE_TRANSFER_INNER"
# Time in seconds over which --mixed measures.
MIXED_TIME = 40


def alone(gbit):
    """Runs this script again in a network that has only a link of that speed."""
    shape = f"tc qdisc add dev lo root tbf rate {gbit}gbit burst 1mb latency 100ms"
    command = f'ip link set lo up && {shape} && exec "$0" "$@"'
    inner = ["unshare", "--net", "sh", "-c", command, sys.executable, *sys.argv]
    return subprocess.run(inner, env={**os.environ, INNER: "1"}).returncode


def server(args, folder, name, *flags):
    port = free_ports(1)[0]
    command = [args.samite, "serve", "-v", "-m", args.model, "--host", "127.0.0.1", "--port", str(port), "-t", "1"]
    command += ["-c", str(2 * args.tokens + 2048), "--parallel", "8", "--kv-unified", *flags]
    child = Child(command, f"{folder}/{name}.log")
    wait_for(f"127.0.0.1:{port}", "/ready", child.process, name)
    return port, child


def post(port, body, on_token=lambda: None):
    """The response, or the text of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"POST /v1/completions: {response.status}: {response.read()[:300]}")
    if not body.get("stream"):
        return json.loads(response.read())
    text = ""
    for line in response:
        if line.startswith(b"data: {"):
            part = json.loads(line[6:])["choices"][0]["text"]
            text += part
            if part:
                on_token()
    return text


def prefill(port, body):
    asks = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = post(port, {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": asks})
    return answer["kv_transfer_params"]


def prompt_of(seed, tokens):
    # These words are one token each in most vocabularies.
    return words(random.Random(seed), tokens)


class Mixed:
    """Streams of answers beside long prompts. `send` answers one request."""

    def __init__(self, args, send):
        self.gaps, self.tokens, self.prompts, self.firsts = [], 0, 0, []
        self.end = time.monotonic() + MIXED_TIME
        self.lock = threading.Lock()
        threads = [threading.Thread(target=self.stream, args=(send, n)) for n in range(4)]
        threads.append(threading.Thread(target=self.long, args=(send, args.tokens // 2)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stream(self, send, number):
        count = 0
        while time.monotonic() < self.end:
            count += 1
            last = [None]

            def on_token():
                now = time.monotonic()
                with self.lock:
                    if last[0] is not None:
                        self.gaps.append(now - last[0])
                    self.tokens += 1
                last[0] = now

            body = {"prompt": prompt_of(1000 * number + count, 32), "max_tokens": 128, "temperature": 0, "stream": True, "ignore_eos": True}
            send(body, on_token)

    def long(self, send, tokens):
        while time.monotonic() < self.end:
            self.prompts += 1
            begin = time.monotonic()
            first = []
            body = {"prompt": prompt_of(9_000_000 + self.prompts, tokens), "max_tokens": 8, "temperature": 0, "stream": True, "ignore_eos": True}
            send(body, lambda: first.append(time.monotonic() - begin))
            self.firsts.append(first[0])

    def row(self, name):
        gaps = sorted(self.gaps)
        return (
            f"| {name} | {1e3 * statistics.median(gaps):.0f} ms | {1e3 * gaps[int(len(gaps) * 0.99)]:.0f} ms | "
            f"{self.tokens / MIXED_TIME:.0f} | {statistics.median(self.firsts):.1f} s | {self.prompts} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samite")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--gbit", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mixed", action="store_true")
    args = parser.parse_args()
    if INNER not in os.environ:
        sys.exit(alone(args.gbit))
    bounds = Bounds()
    with tempfile.TemporaryDirectory() as folder:
        secret = pathlib.Path(folder, "secret")
        secret.write_text("a secret of the fleet, for a test only")
        key = ["--kv-transfer-key", str(secret)]
        children = []
        try:
            decode_log = pathlib.Path(folder, "decode.log")
            ports = []
            for name, flags in [
                ("prefill", [*key, "--kv-transfer", "127.0.0.1:0"]),
                ("decode", key),
                ("single", []),
            ]:
                port, child = server(args, folder, name, *flags)
                ports.append(port)
                children.append(child)
            first, second, single = ports
            # Afterwards the decode server has touched all of its cache, as one that has run for a while.
            for round in (-2, -1):
                post(second, {"prompt": prompt_of(round, args.tokens), "max_tokens": 1})
            for round in range(args.rounds):
                body = {"prompt": prompt_of(round, args.tokens), "max_tokens": 32, "temperature": 0}
                expected = post(single, body)
                answer = post(second, {**body, "kv_transfer_params": prefill(first, body)})
                same = answer["choices"][0]["text"] == expected["choices"][0]["text"]
                bounds.check(same, f"round {round}: the text is that of one server")
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                prompt = answer["usage"]["prompt_tokens"]
                bounds.check(cached == prompt - 1, f"round {round}: {cached} of {prompt} tokens were fetched")
            fetched = FETCHED.findall(decode_log.read_text())
            bounds.check(len(fetched) == args.rounds, f"{args.rounds} caches are fetched: {fetched}")
            ratios = [float(ms) / 1e3 / (int(size) * 8 / (args.gbit * 1e9)) for _, size, ms in fetched]
            tokens, size, _ = fetched[-1]
            print(f"{tokens} tokens, {int(size) / 1e6:.1f} MB at {args.gbit:g} Gbit/s: {[ms for *_, ms in fetched]} ms")
            ratio = statistics.median(ratios)
            bounds.check(ratio <= 1.2, f"a transfer takes {ratio:.2f} times its bytes over the speed of the link")
            print(f"{ratio:.2f} times the bytes over the speed of the link")
            if args.mixed:
                turn = [0]

                def either(body, on_token):
                    turn[0] += 1
                    post([first, second][turn[0] % 2], body, on_token)

                def split(body, on_token):
                    long = len(body["prompt"]) > 1000
                    params = {"kv_transfer_params": prefill(first, body)} if long else {}
                    post(second, {**body, **params}, on_token)

                print("| servers | median gap of tokens | 99 % | tokens/s | first token of long prompts | long prompts |\n|---|---|---|---|---|---|")
                for name, send in [("both do all", either), ("prefill and decode", split)] * 2:
                    print(Mixed(args, send).row(name), flush=True)
        finally:
            for child in children:
                child.kill()
    sys.exit(1 if bounds.failed else 0)


if __name__ == "__main__":
    main()
