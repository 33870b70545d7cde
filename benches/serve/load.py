#!/usr/bin/env python3
"""Many clients of a server at the same time: samite serve beside llama-server, in turns.

    load.py --samite target/release/samite --other PATH/llama-server -m model.gguf [--clients 8,32] [--rounds 3]

Each round starts one server, has all clients send their requests, ends it, and does the same with the other one. Clients send prompts of mixed
lengths, half of which share a long beginning, and ask for answers of mixed lengths; what they send follows from a seed, so both servers get the
same. Told are tokens per second over all clients, the time to the first token (median and 90th percentile), and the memory that the server had
at most. Only Python's own library is needed.
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

WORDS = "the river house small stone light over under morning where children walked slowly through green fields and old bridges".split()


def text(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def requests_of(client, count, seed):
    """What a client sends: prompts and numbers of tokens."""
    shared = text(random.Random(seed), 300)
    rng = random.Random(f"{seed}/{client}")
    made = []
    for _ in range(count):
        own = text(rng, rng.choice([10, 40, 150]))
        prompt = f"{shared} {own}" if rng.random() < 0.5 else own
        made.append((prompt, rng.choice([16, 48, 96])))
    return made


class Server:
    """A server with a free port, from start to end."""

    def __init__(self, program, arguments, environment=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [*program, *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 300
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{' '.join(command)}: did not start")
            time.sleep(0.2)

    def is_ready(self):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def peak_mib(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        return float("nan")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ask(port, prompt, count):
    """One streamed completion: the time to the first token, and how many came."""
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": True}
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()[:300]}")
    first, last = None, {}
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            first = first or time.monotonic() - start
            last = json.loads(line[6:])
    if "timings" not in last:
        raise RuntimeError(f"the answer broke off: {last}")
    return first, last["timings"]["predicted_n"]


def at_once(clients, client, wrong):
    """Runs `client(number)` of all clients in threads. Seconds; an end of the program if there is something in `wrong`."""
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    if wrong:
        sys.exit(f"{len(wrong)} clients failed: {wrong[0]}")
    return seconds


def load(port, clients, count, seed, requests_of=requests_of, ask=ask):
    """All clients at the same time."""
    results, wrong, lock = [], [], threading.Lock()
    sent = [requests_of(number, count, seed) for number in range(clients)]

    def client(number):
        for prompt, tokens in sent[number]:
            try:
                result = ask(port, prompt, tokens)
            except Exception as error:  # a thread's errors are told at the end
                with lock:
                    wrong.append(str(error))
                return
            with lock:
                results.append(result)

    seconds = at_once(clients, client, wrong)
    firsts = sorted(first for first, _ in results)
    return {
        "tokens_per_second": sum(tokens for _, tokens in results) / seconds,
        "first_token_median": statistics.median(firsts),
        "first_token_90": firsts[int(len(firsts) * 0.9)],
    }


def medians(results):
    """The median of each number over the rounds."""
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def repeated_prefix(port, seed):
    """The time to the first token of a long prompt, and of the same once more."""
    prompt = text(random.Random(seed + 1), 500)
    return [ask(port, prompt, 1)[0] for _ in range(2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samite", required=True, help="the program samite")
    parser.add_argument("--other", help="the program llama-server; without it, samite alone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("-c", "--context", type=int, default=32768, help="tokens of all requests together")
    parser.add_argument("--clients", default="8,32")
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    rows = []
    for clients in map(int, args.clients.split(",")):
        # As many slots as clients: what both can do at best.
        flags = ["-m", args.model, "-c", str(args.context), "--parallel", str(clients), "-t", str(args.threads), "-fa", "on"]
        programs = {"samite": [args.samite, "serve", "--kv-unified"]}
        if args.other:
            programs["llama-server"] = [args.other, "--kv-unified"]
        measured = {name: [] for name in programs}
        for round_number in range(args.rounds):
            for name, program in programs.items():
                server = Server(program, flags)
                try:
                    result = load(server.port, clients, args.requests, args.seed + round_number)
                    cold, warm = repeated_prefix(server.port, args.seed + round_number)
                    result |= {"prefix_cold": cold, "prefix_warm": warm, "peak_mib": server.peak_mib()}
                    measured[name].append(result)
                finally:
                    server.end()
        for name, results in measured.items():
            row = medians(results)
            rows.append({"clients": clients, "server": name, **row})
            if not args.json:
                print(
                    f"{clients:3} clients  {name:13} {row['tokens_per_second']:8.1f} tokens/s  first token {row['first_token_median'] * 1e3:8.0f} ms"
                    f" (90 %: {row['first_token_90'] * 1e3:.0f})  long prefix {row['prefix_cold'] * 1e3:.0f} ms, again {row['prefix_warm'] * 1e3:.0f} ms"
                    f"  memory {row['peak_mib']:.0f} MiB",
                    flush=True,
                )
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
