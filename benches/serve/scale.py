#!/usr/bin/env python3
"""How many requests two servers on two cores answer, compared with one on one core, and what that says of four.

    scale.py samite -m model.gguf [--seconds 30] [--rounds 3]

Each server has one core and one thread. Clients send requests of one size, eight for each server, and the next one
goes to the server with the fewest. One server is measured with one to eight requests at the same time; a simulation of
servers with these rates says how many two and four servers answer, and the two are measured in turns with one. Needs
Linux. Only Python's own library is needed.
"""

import argparse
import heapq
import http.client
import json
import os
import random
import statistics
import threading
import time

from load import Server, text

CLIENTS = 8
PROMPT_WORDS = 150
TOKENS = 32


def ask(port, number):
    body = {"prompt": text(random.Random(number), PROMPT_WORDS), "n_predict": TOKENS, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"POST /completion: {response.status}: {response.read()[:300]}")
    response.read()
    connection.close()


def rate(ports, clients, seconds):
    """Requests per second that `clients` get answered, without those that are unfinished at the end."""
    active, lock = dict.fromkeys(ports, 0), threading.Lock()
    begin = time.monotonic()
    ended = []

    def client(number):
        count = 0
        while time.monotonic() < begin + seconds:
            with lock:
                port = min(active, key=active.get)
                active[port] += 1
            ask(port, f"{begin}/{number}/{count}")
            count += 1
            with lock:
                active[port] -= 1
                ended.append(time.monotonic())

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The first and the last requests run beside fewer others.
    ended.sort()
    middle = ended[clients : len(ended) - clients]
    return (len(middle) - 1) / (middle[-1] - middle[0])


def simulated(rates, servers, requests=20_000):
    """Requests per second of servers that share their rate among the requests that they have.

    `rates[n]` are the requests per second of one server that has n. Clients behave as in `rate`."""
    active = [[] for _ in range(servers)]
    progress, last = [0.0] * servers, [0.0] * servers
    versions = [0] * servers
    events = []

    def advance(server, now):
        count = len(active[server])
        if count:
            progress[server] += (now - last[server]) * rates[count] / count
        last[server] = now

    def schedule(server, now):
        versions[server] += 1
        if active[server]:
            count = len(active[server])
            rest = active[server][0] - progress[server]
            heapq.heappush(events, (now + max(0.0, rest) * count / rates[count], server, versions[server]))

    def begin(now):
        server = min(range(servers), key=lambda one: len(active[one]))
        advance(server, now)
        # Requests have one size, so that they end in the order in which they began.
        active[server].append(progress[server] + 1)
        schedule(server, now)

    for client in range(CLIENTS * servers):
        begin(1e-3 * client)
    done, now = 0, 0.0
    while done < requests:
        now, server, version = heapq.heappop(events)
        if version != versions[server]:
            continue
        advance(server, now)
        active[server].pop(0)
        done += 1
        schedule(server, now)
        begin(now)
    return done / now


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samite")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("scale.py: needs two processors")
    flags = ["-m", args.model, "-t", "1", "-c", str(CLIENTS * 1024), "--parallel", str(CLIENTS), "--kv-unified"]
    servers = [Server(["taskset", "-c", str(core), args.samite, "serve"], flags) for core in cores]
    ports = [server.port for server in servers]
    try:
        rates = {count: rate(ports[:1], count, args.seconds) for count in range(1, CLIENTS + 1)}
        print("requests at once: requests/s of one server: " + ", ".join(f"{count}: {value:.2f}" for count, value in rates.items()))
        pairs = []
        for _ in range(args.rounds):
            one = rate(ports[:1], CLIENTS, args.seconds)
            two = rate(ports, 2 * CLIENTS, args.seconds)
            pairs.append((one, two))
            print(f"one server {one:.2f}, two {two:.2f} requests/s: {two / one:.2f} times", flush=True)
        measured = statistics.median(two / one for one, two in pairs)
        one, two, four = (simulated(rates, count) for count in (1, 2, 4))
        print(f"two servers: {measured:.2f} times one, simulated {two / one:.2f}; four servers: simulated {four / one:.2f} times one")
    finally:
        for server in servers:
            server.end()


if __name__ == "__main__":
    main()
