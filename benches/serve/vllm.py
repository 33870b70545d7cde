#!/usr/bin/env python3
"""samite serve beside vLLM on the processor, in turns: the same shape of a model in BF16, the same prompts as tokens, many clients.

    vllm.py --samite target/release/samite -m model.gguf --vllm VENV/bin/vllm --config FOLDER [--clients 8,32] [--rounds 3]

The folder has config.json of a model of the same shape, and a tokenizer, which nobody uses; its weights are made up (--load-format dummy). The file comes from
`samite dev synth --type bf16`. Weights differ, but not what is computed. Prompts of mixed lengths follow from a seed, and half of them begin alike. Told are medians
over the rounds.
"""

import argparse
import http.client
import json
import os
import random
import time

from load import Server, load, medians


def requests_of(client, count, seed):
    """What a client sends: tokens, and how many are to be written."""
    common = random.Random(seed)
    shared = [common.randrange(300, 31000) for _ in range(256)]
    rng = random.Random(f"{seed}/{client}")
    made = []
    for _ in range(count):
        own = [rng.randrange(300, 31000) for _ in range(rng.choice([16, 64, 200]))]
        made.append((shared + own if rng.random() < 0.5 else own, rng.choice([16, 48, 96])))
    return made


def ask(port, prompt, count):
    """One streamed completion: the time to the first token, and how many came."""
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
    return first, count


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
    shared = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048", "--served-model-name", "m"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}"}
    for clients in map(int, args.clients.split(",")):
        flags = ["-m", args.model, "-c", "32768", "--parallel", str(clients), "-t", str(args.threads)]
        starts = {
            "samite": lambda: Server([args.samite, "serve", "--kv-unified"], flags),
            "vllm": lambda: Server([args.vllm, "serve", args.config], [*shared, "--max-num-seqs", str(clients)], environment),
        }
        measured = {name: [] for name in starts}
        for number in range(args.rounds):
            for name, start in starts.items():
                server = start()
                try:
                    load(server.port, clients, 1, -1, requests_of, ask)
                    measured[name].append(load(server.port, clients, args.requests, number, requests_of, ask))
                finally:
                    server.end()
        for name, results in measured.items():
            row = medians(results)
            print(f"{clients:3} clients  {name:7} {row['tokens_per_second']:8.1f} tokens/s  first token {row['first_token_median'] * 1e3:8.0f} ms", flush=True)


if __name__ == "__main__":
    main()
