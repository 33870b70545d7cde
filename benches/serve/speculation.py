#!/usr/bin/env python3
"""Speculation on and off: two servers of the same model, one with drafts and one without, get the same load in turns.

    speculation.py --samite target/release/samite -m model.gguf [-md draft.gguf] [--clients 1,2,4,8,32] [--pairs 4]

Both servers run all the time, and one that nobody asks uses no processor. A pair is a load on one, then the same load on the other, each time in the other
order. Told are the tokens per second of both, the ratio of each pair (median and least), and what was drafted and stood. Texts must be the same on
both sides, or the script fails. Prompts repeat words, as code and lists do, with `--prompts repeating`, or do not, with `--prompts plain`.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import threading

from load import Server, at_once, text


def ask(port, prompt, count):
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {answer}")
    return answer


def prompt_of(kind, seed, client, number):
    rng = random.Random(f"{seed}/{client}/{number}")
    if kind == "repeating":
        return " ".join([text(rng, 12)] * 3)
    return text(rng, 30)


def load(port, clients, requests, tokens, kind, seed):
    """All clients at the same time: tokens per second, the texts, and what was drafted and stood."""
    texts, drafted, stood, wrong, lock = {}, 0, 0, [], threading.Lock()
    written = 0

    def client(number):
        nonlocal drafted, stood, written
        for request in range(requests):
            try:
                answer = ask(port, prompt_of(kind, seed, number, request), tokens)
            except Exception as error:  # a thread's errors are told at the end
                with lock:
                    wrong.append(str(error))
                return
            with lock:
                texts[number, request] = answer["content"]
                timings = answer["timings"]
                written += timings["predicted_n"]
                drafted += timings.get("draft_n", 0)
                stood += timings.get("draft_n_accepted", 0)

    seconds = at_once(clients, client, wrong)
    return written / seconds, texts, drafted, stood


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samite", required=True, help="the program samite")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--draft", type=int, default=16)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clients", default="1,2,4,8,32")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1, help="of each client, in each load")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--prompts", choices=["repeating", "plain"], default="plain")
    parser.add_argument("--differing", action="store_true", help="texts may differ: of a device whose sums depend on the size of a batch")
    args = parser.parse_args()
    least = float("inf")
    for clients in map(int, args.clients.split(",")):
        flags = ["-m", args.model, "-c", str(max(2048, 256 * clients)), "--parallel", str(clients), "-t", str(args.threads)]
        drafts = ["--draft", str(args.draft)] + (["-md", args.model_draft] if args.model_draft else [])
        off = Server([args.samite, "serve", "--kv-unified"], flags)
        on = Server([args.samite, "serve", "--kv-unified"], flags + drafts)
        try:
            rates = {"off": [], "on": []}
            drafted = stood = differing = 0
            for pair in range(-1, args.pairs):
                seen = {}
                order = [("off", off), ("on", on)]
                for name, server in order if pair % 2 else order[::-1]:
                    rate, texts, more, stay = load(server.port, clients, args.requests, args.tokens, args.prompts, pair)
                    seen[name] = texts
                    # The first pair warms up.
                    if pair >= 0:
                        rates[name].append(rate)
                        drafted, stood = drafted + more, stood + stay
                differing += sum(seen["off"][key] != seen["on"][key] for key in seen["off"])
            if differing and not args.differing:
                sys.exit(f"{differing} texts differ")
        finally:
            off.end()
            on.end()
        ratios = [b / a for a, b in zip(rates["off"], rates["on"])]
        median = statistics.median(ratios)
        least = min(least, median)
        print(
            f"{clients:3} clients  off {statistics.median(rates['off']):8.1f} tokens/s  on {statistics.median(rates['on']):8.1f}"
            f"  ratio {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})  drafted {drafted}, stood {stood}  differing texts {differing}",
            flush=True,
        )
    print(f"least ratio {least:.3f}")


if __name__ == "__main__":
    main()
