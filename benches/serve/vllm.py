#!/usr/bin/env python3
"""samite serve beside vLLM on the processor, in turns: the same shape of a model in BF16, the same prompts as tokens, many clients.

    vllm.py --samite target/release/samite -m model.gguf --vllm VENV/bin/vllm --config FOLDER [--clients 8,32] [--rounds 3]

The folder has config.json of a model of the same shape, and a tokenizer, which nobody uses; its weights are made up (--load-format dummy). The file comes from
`samite synth --type bf16`. Weights differ, but not what is computed. Prompts of mixed lengths follow from a seed, and half of them begin alike. Told are medians
over the rounds.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time

from load import Server, at_once


class Vllm:
    """vLLM's server, from start to end."""

    port = 8399

    def __init__(self, program, config, clients, threads):
        command = [program, "serve", config, "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048"]
        command += ["--max-num-seqs", str(clients), "--port", str(self.port), "--served-model-name", "m"]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 600
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{' '.join(command)}: did not start")
            time.sleep(1)

    def is_ready(self):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def end(self):
        self.process.terminate()
        self.process.wait()


def requests_of(client, count, seed):
    """What a client sends: tokens, and how many are to be written."""
    shared = [random.Random(seed).randrange(300, 31000) for _ in range(256)]
    rng = random.Random(f"{seed}/{client}")
    made = []
    for _ in range(count):
        own = [rng.randrange(300, 31000) for _ in range(rng.choice([16, 64, 200]))]
        made.append((shared + own if rng.random() < 0.5 else own, rng.choice([16, 48, 96])))
    return made


def ask(port, prompt, count):
    """One streamed completion: the time to the first token."""
    body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()[:300]}")
    first = None
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.monotonic() - start
    return first


def load(port, clients, count, seed):
    firsts, wrong, lock = [], [], threading.Lock()
    sent = [requests_of(number, count, seed) for number in range(clients)]

    def client(number):
        for prompt, tokens in sent[number]:
            try:
                first = ask(port, prompt, tokens)
            except Exception as error:  # a thread's errors are told at the end
                with lock:
                    wrong.append(str(error))
                return
            with lock:
                firsts.append(first)

    seconds = at_once(clients, client, wrong)
    written = sum(tokens for requests in sent for _, tokens in requests)
    return {"tokens_per_second": written / seconds, "first_token": statistics.median(firsts)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samite", required=True, help="the program samite")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--vllm", required=True, help="the program vllm")
    parser.add_argument("--config", required=True, help="a folder with config.json and a tokenizer")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clients", default="8,32")
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for clients in map(int, args.clients.split(",")):
        flags = ["-m", args.model, "-c", "32768", "--parallel", str(clients), "-t", str(args.threads)]
        starts = {
            "samite": lambda: Server([args.samite, "serve", "--kv-unified"], flags),
            "vllm": lambda: Vllm(args.vllm, args.config, clients, args.threads),
        }
        measured = {name: [] for name in starts}
        for number in range(args.rounds):
            for name, start in starts.items():
                server = start()
                try:
                    load(server.port, clients, 1, -1)
                    measured[name].append(load(server.port, clients, args.requests, number))
                finally:
                    server.end()
        for name, results in measured.items():
            row = {key: statistics.median(result[key] for result in results) for key in results[0]}
            print(f"{clients:3} clients  {name:7} {row['tokens_per_second']:8.1f} tokens/s  first token {row['first_token'] * 1e3:8.0f} ms", flush=True)


if __name__ == "__main__":
    main()
