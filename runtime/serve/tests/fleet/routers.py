#!/usr/bin/env python3
"""Conversations through routers: how many prompt tokens are cached, and which requests a failure loses.

    routers.py SAMITE [-m MODEL] [--bin FOLDER] [--servers 4] [--conversations 200] [--only ROUTER,...]
               [--no-failures]

SAMITE is built with `--features kv-events`. FOLDER has the programs of PyPI's vllm-router, sglang-router and
litellm; haproxy is searched in PATH. Routers that are not there are left out. All conversations begin with the same
system prompt. They are sent to one server first, which shows what a perfect router would reach, then through each
router. Eight clients send the first turns, which spreads conversations over the servers. One client sends the others,
because a router that weighs load against cached tokens may otherwise leave the server that a perfect one chooses. Then
eight clients send all turns to new servers. At last, servers are killed, stopped, frozen and restarted, and the router itself is restarted. Everything
listens on 127.0.0.1. Exits with 1 if a bound does not hold.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import queue
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[4]
WORDS = "the river house small stone light over under morning where children walked slowly through green fields".split()
TURNS = 5
CLIENTS = 8
# Seconds after which a router gives a request up.
ROUTER_TIMEOUT = 6
# The guard against hangs, in seconds.
GUARD = 120


def words(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


SYSTEM = words(random.Random(0), 90)


class Child:
    """A process and its children, which all end with `kill`."""

    def __init__(self, command, log):
        self.log = open(log, "ab")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)

    def signal(self, number):
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait(GUARD)
        self.log.close()


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def get(port, path, seconds=2):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def wait_for(port, path, process, name):
    end = time.monotonic() + GUARD
    while get(port, path)[0] != 200:
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"{name}: does not answer GET {path}")
        time.sleep(0.1)


class Fleet:
    """Servers with ports that they keep when they are restarted."""

    def __init__(self, args, folder, count, share=1):
        self.args, self.folder, self.share = args, folder, share
        self.ports = free_ports(3 * count)
        self.servers = [None] * count
        for number in range(count):
            self.start(number)

    def port(self, number):
        return self.ports[3 * number]

    def urls(self):
        return [f"http://127.0.0.1:{self.port(number)}" for number in range(len(self.servers))]

    def start(self, number):
        port, events, replay = self.ports[3 * number : 3 * number + 3]
        command = [self.args.samite, "serve", "-m", self.args.model, "--chat-template", "chatml", "--alias", "model"]
        command += ["--host", "127.0.0.1", "--port", str(port), "-t", "1", "--parallel", "4", "--metrics"]
        command += ["--ctx-size", str(self.args.conversations * 1024 // self.share), "--kv-unified"]
        command += ["--cached-prefixes", str(2 * self.args.conversations), "--cache-disk", f"{self.folder}/disk-{port}"]
        command += ["--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-replay", f"tcp://127.0.0.1:{replay}"]
        self.servers[number] = Child(command, f"{self.folder}/server-{number}.log")
        wait_for(port, "/ready", self.servers[number].process, f"server {number}")

    def kill(self, number):
        self.servers[number].kill()

    def end(self):
        for server in self.servers:
            server.kill()


class Router:
    """A router in front of a fleet."""

    health = "/health"

    def __init__(self, args, folder, fleet):
        self.folder, self.fleet = folder, fleet
        self.bin = pathlib.Path(args.bin) if args.bin else None
        self.port, self.extra = free_ports(2)
        self.start()

    def start(self):
        name = type(self).__name__.lower()
        self.child = Child(self.command(), f"{self.folder}/{name}.log")
        wait_for(self.port, self.health, self.child.process, name)
        # A router has seen its servers before conversations begin.
        time.sleep(2)

    def end(self):
        self.child.kill()


class Vllm(Router):
    program = ["vllm-router"]
    policy = "kv_aware"

    def command(self):
        # A health check that fails twice in a row removes a server.
        checks = ["--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--health-success-threshold", "1"]
        checks += ["--health-check-endpoint", "/ready", "--health-check-timeout-secs", "1"]
        limits = ["--request-timeout-secs", str(ROUTER_TIMEOUT), "--prometheus-port", str(self.extra)]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--policy", self.policy]
        program, *subcommand = self.program
        return [self.bin / program, *subcommand, "--worker-urls", *self.fleet.urls(), *place, *checks, *limits]


class VllmText(Vllm):
    policy = "cache_aware"


class VllmHash(Vllm):
    policy = "consistent_hash"


class Sglang(Vllm):
    program = ["sglang-router", "launch"]
    policy = "cache_aware"


class Haproxy(Router):
    """Sends a conversation to the server that the hash of its X-Session-ID names."""

    health = "/router-health"

    def command(self):
        servers = [
            f"    server s{number} 127.0.0.1:{self.fleet.port(number)} check inter 500ms fall 2 rise 1"
            for number in range(len(self.fleet.servers))
        ]
        text = f"""
global
    maxconn 1000
defaults
    mode http
    timeout connect 1s
    timeout client 300s
    timeout server {ROUTER_TIMEOUT}s
    option redispatch 1
    retries 3
    retry-on all-retryable-errors
frontend fleet
    bind 127.0.0.1:{self.port}
    monitor-uri {self.health}
    default_backend servers
backend servers
    balance hdr(X-Session-ID)
    hash-type consistent
    option httpchk GET /ready
""" + "\n".join(servers)
        path = f"{self.folder}/haproxy.cfg"
        pathlib.Path(path).write_text(text + "\n")
        return ["haproxy", "-f", path, "-db"]


class Litellm(Router):
    health = "/health/liveliness"

    def command(self):
        models = [
            {"model_name": "model", "litellm_params": {"model": "openai/model", "api_base": f"{url}/v1", "api_key": "none"}}
            for url in self.fleet.urls()
        ]
        settings = {"num_retries": 3, "timeout": ROUTER_TIMEOUT, "cooldown_time": 2, "allowed_fails": 1}
        path = f"{self.folder}/litellm.json"
        pathlib.Path(path).write_text(json.dumps({"model_list": models, "router_settings": settings}))
        return [self.bin / "litellm", "--config", path, "--host", "127.0.0.1", "--port", str(self.port)]


ROUTERS = {"vllm": Vllm, "vllm-text": VllmText, "vllm-hash": VllmHash, "sglang": Sglang, "haproxy": Haproxy, "litellm": Litellm}


def can_run(name, args):
    if name == "haproxy":
        return shutil.which("haproxy") is not None
    program = {"sglang": "sglang-router", "litellm": "litellm"}.get(name, "vllm-router")
    return bool(args.bin) and (pathlib.Path(args.bin) / program).exists()


class Lost(Exception):
    """A request without an answer; `had_token` if it had begun to stream."""

    def __init__(self, reason, had_token):
        super().__init__(reason)
        self.had_token = had_token


def ask(port, session, messages):
    """One streamed answer: its text, the cached and all prompt tokens, and the time to the first token."""
    body = {"model": "model", "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Content-Type": "application/json", "X-Session-ID": session, "Authorization": "Bearer none"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    begin, first, text, usage = time.monotonic(), None, "", None
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Lost(f"{response.status}: {response.read()[:200]}", False)
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise Lost(str(event["error"])[:200], first is not None)
            for choice in event.get("choices", []):
                part = choice["delta"].get("content") or ""
                first = first or (time.monotonic() - begin if part else None)
                text += part
            usage = event.get("usage") or usage
    except (OSError, http.client.HTTPException) as error:
        raise Lost(repr(error), first is not None) from error
    finally:
        connection.close()
    if usage is None:
        raise Lost("the stream ended early", first is not None)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return text, cached, usage["prompt_tokens"], first or time.monotonic() - begin


class Run:
    """All conversations once, through one port."""

    def __init__(self, port, conversations, clients=CLIENTS, begun=lambda share: None):
        """`clients` send all turns but the first ones."""
        self.port, self.total, self.begun = port, conversations * TURNS, begun
        self.cached, self.prompts, self.firsts = {}, {}, []
        self.lost, self.broken, self.done = [], [], 0
        self.lock = threading.Lock()
        first = [{"role": "system", "content": SYSTEM}]
        waiting = [(number, 0, first, random.Random(number + 1)) for number in range(conversations)]
        for turn in range(TURNS):
            self.waiting, self.next = queue.SimpleQueue(), []
            for conversation in waiting:
                self.waiting.put(conversation)
            threads = [threading.Thread(target=self.client) for _ in range(clients if turn else CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            waiting = sorted(self.next, key=lambda conversation: conversation[0])

    def client(self):
        while True:
            try:
                number, turn, messages, rng = self.waiting.get_nowait()
            except queue.Empty:
                return
            messages = messages + [{"role": "user", "content": words(rng, 20)}]
            text = ""
            try:
                text, cached, prompt, first = ask(self.port, f"conversation-{number}", messages)
                with self.lock:
                    self.cached[number, turn], self.prompts[number, turn] = cached, prompt
                    self.firsts.append(first)
            except Lost as lost:
                with self.lock:
                    (self.broken if lost.had_token else self.lost).append(str(lost))
            with self.lock:
                self.done += 1
                share = self.done / self.total
            self.begun(share)
            answer = {"role": "assistant", "content": text}
            with self.lock:
                self.next.append((number, turn + 1, [*messages, answer], rng))


def metric(port, name):
    for line in get(port, "/metrics")[1].decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    return 0.0


def served(fleet):
    """How many requests each server has answered."""
    return [metric(fleet.port(number), "samite:request_success_total") for number in range(len(fleet.servers))]


class Bounds:
    """What has to hold."""

    def __init__(self):
        self.failed = []

    def check(self, holds, text):
        if not holds:
            self.failed.append(text)
            print(f"DOES NOT HOLD: {text}")


def share_of(run, perfect):
    """The cached part of all prompts, as a share of that of one server."""
    part = lambda run: sum(run.cached.values()) / sum(run.prompts.values())
    return part(run) / part(perfect)


def row(name, run, perfect, fleet):
    share = share_of(run, perfect)
    firsts = sorted(run.firsts)
    counts = served(fleet)
    balance = max(counts) / max(1, statistics.mean(counts))
    print(
        f"| {name} | {share:.3f} | {balance:.2f} | {1e3 * statistics.median(firsts):.0f} ms | "
        f"{1e3 * firsts[int(len(firsts) * 0.95)]:.0f} ms | {len(run.lost)} | {len(run.broken)} |",
        flush=True,
    )
    return share


def failures(fleet):
    """Failures of the busiest server: how they begin and end."""
    counts = served(fleet)
    busiest = counts.index(max(counts))
    server = lambda: fleet.servers[busiest]
    return {
        "a server is killed and restarted": (lambda: fleet.kill(busiest), lambda: fleet.start(busiest)),
        "a server is stopped by SIGTERM and restarted": (
            lambda: server().signal(signal.SIGTERM),
            lambda: (fleet.kill(busiest), fleet.start(busiest)),
        ),
        "a server is frozen": (lambda: server().signal(signal.SIGSTOP), lambda: server().signal(signal.SIGCONT)),
    }


def once(acts):
    """Calls each of `acts` when the share of requests reaches its key, on a thread of its own."""
    pending = dict(acts)
    lock = threading.Lock()
    threads = []

    def begun(share):
        with lock:
            due = [limit for limit in pending if share >= limit]
            for limit in due:
                thread = threading.Thread(target=pending.pop(limit))
                thread.start()
                threads.append(thread)

    return begun, threads


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samite")
    parser.add_argument("-m", "--model", default=str(ROOT / "models/stories/stories.gguf"))
    parser.add_argument("--bin", help="folder with the programs of the routers")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--only", default=",".join(ROUTERS))
    parser.add_argument("--no-failures", action="store_true", help="leave failures out, whose bounds depend on time")
    parser.add_argument("--logs", help="folder for the logs")
    args = parser.parse_args()
    bounds = Bounds()
    with contextlib.ExitStack() as stack:
        folder = args.logs or stack.enter_context(tempfile.TemporaryDirectory())
        os.makedirs(folder, exist_ok=True)

        def fleet_of(count, share=1):
            here = tempfile.mkdtemp(dir=folder)
            fleet = Fleet(args, here, count, share)
            stack.callback(fleet.end)
            return fleet, here

        fleet, _ = fleet_of(1)
        perfect = Run(fleet.port(0), args.conversations, 1)
        bounds.check(not perfect.lost and not perfect.broken, "one server answers all")
        own = sum(perfect.cached.values()) / sum(perfect.prompts.values())
        print(f"{args.conversations} conversations of {TURNS} turns, {args.servers} servers; one server has {own:.3f} of all prompt tokens cached\n")
        print("| router | cached, of one server's | busiest server, of the mean | first token | 95 % | lost | broken |\n|---|---|---|---|---|---|---|")
        row("none, one server", perfect, perfect, fleet)
        fleet.end()
        for name in args.only.split(","):
            if not can_run(name, args):
                print(f"| {name} | not there |")
                continue
            fleet, here = fleet_of(args.servers, args.servers)
            router = ROUTERS[name](args, here, fleet)
            stack.callback(router.end)
            run = Run(router.port, args.conversations, 1)
            share = row(name, run, perfect, fleet)
            bounds.check(not run.lost and not run.broken, f"{name}: no request fails: {(run.lost + run.broken)[:3]}")
            if name == "vllm":
                bounds.check(share >= 0.99, f"{name}: {share:.3f} of the cached tokens of one server")
                router.end()
                router.start()
                run = Run(router.port, args.conversations, 1)
                share = row(f"{name}, restarted", run, perfect, fleet)
                bounds.check(share >= 0.99, f"{name}, restarted: {share:.3f} of the cached tokens of one server")
            # New servers, whose caches are empty.
            router.end()
            fleet.end()
            fleet, here = fleet_of(args.servers, args.servers)
            router = ROUTERS[name](args, here, fleet)
            stack.callback(router.end)
            run = Run(router.port, args.conversations)
            row(f"{name}, {CLIENTS} clients", run, perfect, fleet)
            bounds.check(not run.lost and not run.broken, f"{name}: no request fails: {(run.lost + run.broken)[:3]}")
            if name in ("vllm", "sglang", "haproxy") and not args.no_failures:
                for failure, (begin, end) in failures(fleet).items():
                    begun, threads = once({0.25: begin, 0.6: end})
                    run = Run(router.port, args.conversations, begun=begun)
                    for thread in threads:
                        thread.join()
                    row(f"{name}: {failure}", run, perfect, fleet)
                    if "frozen" in failure:
                        slowest = max(run.firsts)
                        bounds.check(slowest <= 2 * ROUTER_TIMEOUT + 5, f"{name}: {failure}: {slowest:.1f} s to the first token")
                    else:
                        bounds.check(not run.lost, f"{name}: {failure}: {len(run.lost)} lost: {run.lost[:3]}")
                    if "SIGTERM" in failure:
                        bounds.check(not run.broken, f"{name}: {failure}: {len(run.broken)} broken: {run.broken[:3]}")
            router.end()
            fleet.end()
    sys.exit(1 if bounds.failed else 0)


if __name__ == "__main__":
    main()
