#!/usr/bin/env python3
"""Conversations through routers: how many prompt tokens are cached, and which requests a failure loses.

    routers.py SAMITE [-m MODEL] [--bin FOLDERS] [--servers 4] [--conversations 200] [--only ROUTER,...]
               [--no-failures] [--namespaces]

SAMITE is built with `--features kv-events`. FOLDERS, separated by `:`, have the programs of PyPI's vllm-router,
sglang-router and litellm; haproxy is searched in PATH. Routers that are not there are left out. All conversations begin
with the same system prompt. They are sent to one server first, which shows what a perfect router would reach, then
through each router. Eight clients send the first turns, which spreads conversations over the servers. One client sends
the others, because a router that weighs load against cached tokens may otherwise leave the server that a perfect one
chooses. Then eight clients send all turns to new servers. Servers are killed, stopped, frozen and restarted, and the
router itself is restarted. At last a further server joins, and one of the first leaves. Everything listens on
127.0.0.1. With --namespaces (Linux, root, `unshare`, `ip`), each server and the router have a network namespace of
their own, and a server's link is cut too. Exits with 1 if a bound does not hold.
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

    def __init__(self, command, log, extra=None):
        """`extra` are further variables of the environment."""
        self.log = open(log, "ab")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True, env={**os.environ, **(extra or {})}
        )

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


def send(address, method, path, body=None, seconds=2):
    """The status and body of a response; 0 if there is none. An address is HOST:PORT."""
    connection = http.client.HTTPConnection(address, timeout=seconds)
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def get(address, path):
    return send(address, "GET", path)


def wait_until(holds, what, process=None):
    end = time.monotonic() + GUARD
    while not holds():
        if (process and process.poll() is not None) or time.monotonic() > end:
            sys.exit(f"{what}: this does not happen")
        time.sleep(0.1)


def wait_for(address, path, process, name):
    wait_until(lambda: get(address, path)[0] == 200, f"{name} answers GET {path}", process)


class Local:
    """Everything on 127.0.0.1."""

    # What servers and routers listen on.
    every = every_events = "127.0.0.1"

    def join(self, name):
        """The address of `name`, and the command that runs a program there."""
        return "127.0.0.1", []


class Namespaces:
    """A network namespace for each name. Their links meet at a bridge in the namespace of this script."""

    inner = "SAMITE_ROUTERS_INNER"
    # Servers find out under which address they are asked.
    every, every_events = "0.0.0.0", "*"

    @classmethod
    def enter(cls):
        """Runs this script again in namespaces, which end with it and its children."""
        mounts = "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns"
        command = ["unshare", "--net", "--mount", "sh", "-c", f'{mounts} && exec "$0" "$@"', sys.executable, *sys.argv]
        return subprocess.run(command, env={**os.environ, cls.inner: "1"}).returncode

    def __init__(self):
        self.names = []
        self.ip("link set lo up")
        self.ip("link add hub type bridge")
        self.ip("addr add 10.0.0.1/24 dev hub")
        self.ip("link set hub up")

    def ip(self, command):
        subprocess.run(["ip", *command.split()], check=True)

    def join(self, name):
        if name not in self.names:
            self.names.append(name)
            self.ip(f"netns add {name}")
            self.ip(f"link add to-{name} type veth peer name eth0 netns {name}")
            self.ip(f"link set to-{name} master hub up")
            self.ip(f"-n {name} link set lo up")
            self.ip(f"-n {name} addr add 10.0.0.{1 + len(self.names)}/24 dev eth0")
            self.ip(f"-n {name} link set eth0 up")
        return f"10.0.0.{2 + self.names.index(name)}", ["ip", "netns", "exec", name]

    def cut(self, name):
        self.ip(f"link set to-{name} down")

    def mend(self, name):
        self.ip(f"link set to-{name} up")


def network_of(args):
    """The network in which servers and routers run. With namespaces, this script runs again."""
    if not args.namespaces:
        return Local()
    if Namespaces.inner not in os.environ:
        sys.exit(Namespaces.enter())
    return Namespaces()


class Fleet:
    """Servers with ports that they keep when they are restarted."""

    def __init__(self, args, folder, count, share=1):
        self.args, self.folder, self.share = args, folder, share
        self.ports, self.servers = [], []
        for _ in range(count):
            self.add()

    def add(self):
        """Starts a further server, and returns its number."""
        self.ports.append(free_ports(3))
        self.servers.append(None)
        self.start(len(self.servers) - 1)
        return len(self.servers) - 1

    def address(self, number):
        return f"{self.args.network.join(f's{number}')[0]}:{self.ports[number][0]}"

    def url(self, number):
        return f"http://{self.address(number)}"

    def urls(self):
        return [self.url(number) for number in range(len(self.servers))]

    def flags(self, number):
        port, events, replay = self.ports[number]
        source = f"tcp://{self.args.network.every_events}"
        flags = ["--ctx-size", str(self.args.conversations * 1024 // self.share)]
        flags += ["--cached-prefixes", str(2 * self.args.conversations), "--cache-disk", f"{self.folder}/disk-{port}"]
        return [*flags, "--kv-events", f"{source}:{events}", "--kv-events-replay", f"{source}:{replay}"]

    def start(self, number):
        network, port = self.args.network, self.ports[number][0]
        command = [*network.join(f"s{number}")[1], self.args.samite, "serve", "-m", self.args.model]
        command += ["--chat-template", "chatml", "--alias", "model", "--host", network.every, "--port", str(port)]
        command += ["-t", "1", "--parallel", "4", "--kv-unified", "--metrics", *self.flags(number)]
        self.servers[number] = Child(command, f"{self.folder}/server-{number}.log")
        wait_for(self.address(number), "/ready", self.servers[number].process, f"server {number}")

    def stop(self, number):
        """Stops a server by SIGTERM, and returns its exit status."""
        self.servers[number].signal(signal.SIGTERM)
        return self.servers[number].process.wait(GUARD)

    def kill(self, number):
        self.servers[number].kill()

    def end(self):
        for server in self.servers:
            server.kill()


class Router:
    """A router in front of a fleet."""

    program = None
    health = "/health"
    # Further flags while servers come and go.
    changing = []
    environment = {}

    def __init__(self, args, folder, fleet):
        self.args, self.folder, self.fleet = args, folder, fleet
        self.host, self.inside = args.network.join("router")
        self.port, self.extra = free_ports(2)
        self.address, self.metrics = f"{self.host}:{self.port}", f"{self.host}:{self.extra}"
        self.start()

    @classmethod
    def path(cls, args):
        """The program, if it is there."""
        return shutil.which(cls.program[0], path=args.bin or "")

    def start(self, flags=()):
        name = type(self).__name__.lower()
        command = [*self.inside, self.path(self.args), *self.program[1:], *self.flags(), *flags]
        self.child = Child(command, f"{self.folder}/{name}.log", self.environment)
        wait_for(self.address, self.health, self.child.process, name)
        # A router has seen its servers before conversations begin.
        time.sleep(2)

    def add(self, number):
        """Sends requests to a further server too."""
        raise NotImplementedError

    def remove(self, number):
        """Sends no more requests to a server. Those in flight go on."""
        raise NotImplementedError

    def call(self, method, path, body=None):
        status, answer = send(self.address, method, path, body, GUARD)
        if status // 100 != 2:
            sys.exit(f"{method} {path}: {status}: {answer[:300]}")
        return answer

    def end(self):
        self.child.kill()


class Vllm(Router):
    program = ["vllm-router"]
    policy = "kv_aware"

    def flags(self):
        # A health check that fails twice in a row removes a server.
        checks = ["--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--health-success-threshold", "1"]
        checks += ["--health-check-endpoint", "/ready", "--health-check-timeout-secs", "1"]
        limits = ["--request-timeout-secs", str(ROUTER_TIMEOUT), "--prometheus-port", str(self.extra)]
        limits += ["--prometheus-host", self.host]
        place = ["--host", self.host, "--port", str(self.port), "--policy", self.policy]
        return [*self.workers(), *place, *checks, *limits]

    def workers(self):
        return ["--worker-urls", *self.fleet.urls()]

    def add(self, number):
        self.call("POST", f"/add_worker?url={self.fleet.url(number)}")

    def remove(self, number):
        self.call("POST", f"/remove_worker?url={self.fleet.url(number)}")


class VllmText(Vllm):
    policy = "cache_aware"
    # All conversations begin alike, so a further server gets requests only by load.
    changing = ["--balance-abs-threshold", "1", "--balance-rel-threshold", "1.1"]


class VllmHash(Vllm):
    policy = "consistent_hash"


class Sglang(VllmText):
    program = ["sglang-router", "launch"]

    def ids(self):
        """The IDs of healthy servers by URL."""
        workers = json.loads(self.call("GET", "/workers"))["workers"]
        return {worker["url"]: worker["id"] for worker in workers if worker["is_healthy"]}

    def add(self, number):
        url = self.fleet.url(number)
        self.call("POST", "/workers", {"url": url})
        wait_until(lambda: url in self.ids(), f"{url} is added")

    def remove(self, number):
        url = self.fleet.url(number)
        self.call("DELETE", f"/workers/{self.ids()[url]}")
        wait_until(lambda: url not in self.ids(), f"{url} is removed")


class Haproxy(Router):
    """Sends a conversation to the server that the hash of its X-Session-ID names."""

    program = ["haproxy"]
    health = "/router-health"
    check = "check inter 500ms fall 2 rise 1"

    @classmethod
    def path(cls, args):
        return shutil.which("haproxy")

    def flags(self):
        numbers = range(len(self.fleet.servers))
        servers = [f"    server s{number} {self.fleet.address(number)} {self.check}" for number in numbers]
        self.socket = f"{self.folder}/haproxy.sock"
        text = f"""
global
    maxconn 1000
    stats socket {self.socket} mode 600 level admin
defaults
    mode http
    timeout connect 1s
    timeout client 300s
    timeout server {ROUTER_TIMEOUT}s
    # Only requests that are there in full can be repeated.
    option http-buffer-request
    option redispatch 1
    retries 3
    retry-on all-retryable-errors
frontend fleet
    bind {self.address}
    monitor-uri {self.health}
    default_backend servers
backend servers
    balance hdr(X-Session-ID)
    hash-type consistent
    option httpchk GET /ready
""" + "\n".join(servers)
        path = f"{self.folder}/haproxy.cfg"
        pathlib.Path(path).write_text(text + "\n")
        return ["-f", path, "-db"]

    def ask(self, command):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.socket)
            connection.sendall(f"{command}\n".encode())
            return connection.makefile().read()

    def add(self, number):
        self.ask(f"add server servers/s{number} {self.fleet.address(number)} {self.check}")
        self.ask(f"enable health servers/s{number}")
        self.ask(f"enable server servers/s{number}")
        is_up = lambda line: line.startswith(f"servers,s{number},") and ",UP," in line
        wait_until(lambda: any(map(is_up, self.ask("show stat").splitlines())), f"s{number} is added")

    def remove(self, number):
        self.ask(f"set server servers/s{number} state drain")


class Litellm(Router):
    """Sends a request to any server."""

    program = ["litellm"]
    health = "/health/liveliness"
    # Prices of models come with the package, not from the network.
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def flags(self):
        models = [
            {"model_name": "model", "litellm_params": {"model": "openai/model", "api_base": f"{url}/v1", "api_key": "none"}}
            for url in self.fleet.urls()
        ]
        settings = {"num_retries": 3, "timeout": ROUTER_TIMEOUT, "cooldown_time": 2, "allowed_fails": 1}
        path = f"{self.folder}/litellm.json"
        pathlib.Path(path).write_text(json.dumps({"model_list": models, "router_settings": settings}))
        return ["--config", path, "--host", self.host, "--port", str(self.port), "--telemetry", "False"]


ROUTERS = {"vllm": Vllm, "vllm-text": VllmText, "vllm-hash": VllmHash, "sglang": Sglang, "haproxy": Haproxy, "litellm": Litellm}


class Lost(Exception):
    """A request without an answer; `had_token` if it had begun to stream."""

    def __init__(self, reason, had_token):
        super().__init__(reason)
        self.had_token = had_token


def ask(address, session, messages):
    """One streamed answer: its text, the cached and all prompt tokens, and the time to the first token."""
    body = {"model": "model", "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Content-Type": "application/json", "X-Session-ID": session, "Authorization": "Bearer none"}
    connection = http.client.HTTPConnection(address, timeout=GUARD)
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
    """All conversations once, through one address."""

    def __init__(self, address, conversations, clients=CLIENTS, begun=lambda share: None, start=0):
        """`clients` send all turns but the first ones. `start` is the number of the first conversation."""
        self.address, self.total, self.begun = address, conversations * TURNS, begun
        self.cached, self.prompts, self.firsts = {}, {}, []
        self.lost, self.broken, self.waited, self.done = [], [], [], 0
        self.lock = threading.Lock()
        first = [{"role": "system", "content": SYSTEM}]
        numbers = range(start, start + conversations)
        waiting = [(number, 0, first, random.Random(number + 1)) for number in numbers]
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
        if self.done != self.total:
            sys.exit("a client ended early")

    def client(self):
        while True:
            try:
                number, turn, messages, rng = self.waiting.get_nowait()
            except queue.Empty:
                return
            messages = messages + [{"role": "user", "content": words(rng, 20)}]
            text, begin = "", time.monotonic()
            try:
                text, cached, prompt, first = ask(self.address, f"conversation-{number}", messages)
                with self.lock:
                    self.cached[number, turn], self.prompts[number, turn] = cached, prompt
                    self.firsts.append(first)
            except Lost as lost:
                with self.lock:
                    (self.broken if lost.had_token else self.lost).append(str(lost))
                    if not lost.had_token:
                        self.waited.append(time.monotonic() - begin)
            with self.lock:
                self.done += 1
                share = self.done / self.total
            self.begun(share)
            answer = {"role": "assistant", "content": text}
            with self.lock:
                self.next.append((number, turn + 1, [*messages, answer], rng))


def metric(address, name, label=""):
    """The sum of a metric's values over all labels, or over those that contain `label`."""
    lines = get(address, "/metrics")[1].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")) and label in line)


def served(fleet):
    """How many requests each server has answered."""
    return [metric(fleet.address(number), "samite:request_success_total") for number in range(len(fleet.servers))]


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
    counts = served(fleet) if fleet else []
    balance = f"{max(counts) / max(1, statistics.mean(counts)):.2f}" if fleet else "–"
    print(
        f"| {name} | {share:.3f} | {balance} | {1e3 * statistics.median(firsts):.0f} ms | "
        f"{1e3 * firsts[int(len(firsts) * 0.95)]:.0f} ms | {len(run.lost)} | {len(run.broken)} |",
        flush=True,
    )
    return share


def failures(fleet):
    """Failures of the busiest server: how they begin and end."""
    counts = served(fleet)
    busiest = counts.index(max(counts))
    server = lambda: fleet.servers[busiest]
    network, name = fleet.args.network, f"s{busiest}"
    cut = {"a server's link is cut": (lambda: network.cut(name), lambda: network.mend(name))}
    return {
        "a server is killed and restarted": (lambda: fleet.kill(busiest), lambda: fleet.start(busiest)),
        "a server is stopped by SIGTERM and restarted": (
            lambda: server().signal(signal.SIGTERM),
            lambda: (fleet.kill(busiest), fleet.start(busiest)),
        ),
        "a server is frozen": (lambda: server().signal(signal.SIGSTOP), lambda: server().signal(signal.SIGCONT)),
        **(cut if isinstance(network, Namespaces) else {}),
    }


def once(acts, inline=False):
    """Calls each of `acts` when the share of requests reaches its key, on a thread of its own, or on that of the client
    whose request reaches it."""
    pending = dict(acts)
    lock = threading.Lock()
    threads = []

    def begun(share):
        with lock:
            due = [pending.pop(limit) for limit in sorted(pending) if share >= limit]
        for act in due:
            if inline:
                act()
                continue
            thread = threading.Thread(target=act)
            thread.start()
            threads.append(thread)

    return begun, threads


def change(name, router, fleet, perfect, bounds):
    """A server joins and the first one leaves, while requests flow."""
    router.end()
    router.start(router.changing)
    count, statuses = fleet.args.conversations, []
    what = f"{name}: a server joins, another leaves"

    def grow():
        router.add(fleet.add())

    def shrink():
        router.remove(0)
        statuses.append(fleet.stop(0))

    # The other clients go on meanwhile. A turn ends after the act, however few requests it has.
    begun, _ = once({0.25: grow, 0.65: shrink}, inline=True)
    # No server knows these conversations.
    run = Run(router.address, count, begun=begun, start=count)
    row(what, run, perfect, None)
    bounds.check(not run.lost and not run.broken, f"{what}: no request fails: {(run.lost + run.broken)[:3]}")
    bounds.check(statuses == [0], f"{what}: the server that leaves exits with 0: {statuses}")
    bounds.check(served(fleet)[-1] > 0, f"{what}: the new server answers")
    if name != "vllm":
        return
    lookups = lambda result: metric(router.metrics, "vllm_router_kv_placement_lookups_total", f'"{result}"')
    missing = lookups("missing_tokens")
    bounds.check(missing == 0 < lookups("hit"), f"{what}: the router had no tokens of {missing:.0f} prompts")
    # Only events tell the router what the new server has computed.
    prompts = [[{"role": "user", "content": words(random.Random(-1 - number), 100)}] for number in range(8)]
    for prompt in prompts:
        ask(fleet.address(len(fleet.servers) - 1), "new", prompt)
    time.sleep(1)
    for prompt in prompts:
        _, cached, tokens, _ = ask(router.address, "new", prompt)
        bounds.check(cached >= tokens - 1, f"{what}: {cached} of {tokens} tokens that the new server has are found")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samite")
    parser.add_argument("-m", "--model", default=str(ROOT / "models/stories/stories.gguf"))
    parser.add_argument("--bin", help="folders with the programs of the routers")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--only", default=",".join(ROUTERS))
    parser.add_argument("--no-failures", action="store_true", help="leave failures out, whose bounds depend on time")
    parser.add_argument("--logs", help="folder for the logs")
    parser.add_argument("--namespaces", action="store_true", help="each server and the router in a network namespace")
    args = parser.parse_args()
    args.network = network_of(args)
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
        perfect = Run(fleet.address(0), args.conversations, 1)
        bounds.check(not perfect.lost and not perfect.broken, "one server answers all")
        own = sum(perfect.cached.values()) / sum(perfect.prompts.values())
        print(f"{args.conversations} conversations of {TURNS} turns, {args.servers} servers; one server has {own:.3f} of all prompt tokens cached\n")
        print("| router | cached, of one server's | busiest server, of the mean | first token | 95 % | lost | broken |\n|---|---|---|---|---|---|---|")
        row("none, one server", perfect, perfect, fleet)
        fleet.end()
        for name in args.only.split(","):
            if not ROUTERS[name].path(args):
                print(f"| {name} | not there |")
                continue
            fleet, here = fleet_of(args.servers, args.servers)
            router = ROUTERS[name](args, here, fleet)
            stack.callback(router.end)
            run = Run(router.address, args.conversations, 1)
            share = row(name, run, perfect, fleet)
            bounds.check(not run.lost and not run.broken, f"{name}: no request fails: {(run.lost + run.broken)[:3]}")
            if name == "vllm":
                bounds.check(share >= 0.99, f"{name}: {share:.3f} of the cached tokens of one server")
                router.end()
                router.start()
                run = Run(router.address, args.conversations, 1)
                share = row(f"{name}, restarted", run, perfect, fleet)
                bounds.check(share >= 0.99, f"{name}, restarted: {share:.3f} of the cached tokens of one server")
            # New servers, whose caches are empty.
            router.end()
            fleet.end()
            fleet, here = fleet_of(args.servers, args.servers)
            router = ROUTERS[name](args, here, fleet)
            stack.callback(router.end)
            run = Run(router.address, args.conversations)
            row(f"{name}, {CLIENTS} clients", run, perfect, fleet)
            bounds.check(not run.lost and not run.broken, f"{name}: no request fails: {(run.lost + run.broken)[:3]}")
            if name in ("vllm", "sglang", "haproxy", "litellm") and not args.no_failures:
                for failure, (begin, end) in failures(fleet).items():
                    begun, threads = once({0.25: begin, 0.6: end})
                    run = Run(router.address, args.conversations, begun=begun)
                    for thread in threads:
                        thread.join()
                    row(f"{name}: {failure}", run, perfect, fleet)
                    if "frozen" in failure or "cut" in failure:
                        slowest = max(run.firsts + run.waited)
                        what = f"{name}: {failure}"
                        bounds.check(slowest <= 2 * ROUTER_TIMEOUT + 5, f"{what}: {slowest:.1f} s to the first token")
                        # Only the router's time limit gives requests up.
                        early = [seconds for seconds in run.waited if seconds < ROUTER_TIMEOUT - 0.5]
                        bounds.check(not early, f"{what}: lost after {early} s: {run.lost[:3]}")
                    else:
                        bounds.check(not run.lost, f"{name}: {failure}: {len(run.lost)} lost: {run.lost[:3]}")
                    if "SIGTERM" in failure:
                        bounds.check(not run.broken, f"{name}: {failure}: {len(run.broken)} broken: {run.broken[:3]}")
            if name != "litellm":
                # LiteLLM's interface for this needs a database.
                change(name, router, fleet, perfect, bounds)
            router.end()
            fleet.end()
    sys.exit(1 if bounds.failed else 0)


if __name__ == "__main__":
    main()
