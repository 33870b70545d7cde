#!/usr/bin/env python3
r"""Tests the worker with Dynamo's frontend: two workers, many requests, one SIGTERM, one SIGKILL.

    test.py --samite PATH --model FILE [--text | --disaggregated] [--kv-events] -- \
        --chat-template chatml -c 4096

Compares the answers at temperature 0 with samite's own, counts lost ones, and checks that no
process remains. --disaggregated has two prefill and two decode workers. Without --text or
--tokenizer, writes the tokenizer from the model, whose vocabulary must be SentencePiece's
(tokenizer.ggml.model = llama). Flags after `--` are for `samite serve`.
"""

import argparse
import collections
import contextlib
import http.client
import json
import math
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from testing import free_port

WORKER = pathlib.Path(__file__).with_name("worker.py")
NAME = "model"
# The guard against hangs, in seconds.
GUARD = 60
# Share of answers that may differ without --deterministic: where two tokens are almost equally
# likely, the batch decides.
MAX_DIFFERENT = 0.05
# Seconds after which a worker's metrics contain all requests that have ended.
METRICS_SECONDS = 2.5
NOUNS = "cat dog bird tree house river boat star cloud child king garden".split()
OPENINGS = [
    "Tell me a story about a little {}.",
    "Once upon a time there was a {} who",
    "What did the {} and the {} say to the old man?",
]
TOKENS = [8, 48, 300]
# Numbers of words of the prompts of --disaggregated, and requests while workers end.
LENGTHS = [1, 3, 10, 30, 100, 200]
DISAGGREGATED_REQUESTS = 300
# Number of prompts that are repeated to see where the router sends them.
REPEATED = 6
# What samite logs with -v when it has fetched a cache.
FETCHED = re.compile(r"(\d+) tokens \(\d+ bytes\) fetched from")
HELD = threading.Lock()


def free_low_port():
    """Returns a port below 32768: Dynamo reads DYN_SYSTEM_PORT as a signed 16-bit number."""
    for port in random.sample(range(20_000, 1 << 15), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    sys.exit("no port from 20000 to 32767 is free")


def wait_until(condition, what, process=None):
    guard = time.monotonic() + GUARD
    while not condition():
        if process and process.poll() is not None:
            sys.exit(f"{what}: the process exited with {process.returncode}")
        if time.monotonic() > guard:
            sys.exit(f"{what}: did not happen within {GUARD} s")
        time.sleep(0.1)


def get(port, path):
    """Returns the response's text, or None without a response of status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        return text if response.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def metric(text, name, labels=""):
    """Returns the sum of a metric over its series with these labels."""
    found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text or "", re.MULTILINE)
    return sum(float(value) for series, value in found if labels in series)


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children(pid):
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


class Process:
    """A process whose output goes to a file."""

    def __init__(self, folder, name, command, environment):
        self.name, self.log = name, folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.pids = {self.process.pid}

    def end(self, number, code):
        """Sends a signal, and checks the exit code and that no child remains."""
        self.process.send_signal(number)
        self.check_exit(code)

    def kill_children(self, code):
        for pid in self.pids - {self.process.pid}:
            os.kill(pid, signal.SIGKILL)
        self.check_exit(code)

    def check_exit(self, code):
        try:
            found = self.process.wait(GUARD)
        except subprocess.TimeoutExpired:
            sys.exit(f"{self.name}: did not exit within {GUARD} s")
        if found != code:
            sys.exit(f"{self.name}: exited with {found} instead of {code}")
        if "engine cleanup failed" in self.log.read_text():
            sys.exit(f"{self.name}: did not clean up")
        wait_until(
            lambda: not any(map(is_running, self.pids)), f"{self.name}: the end of its samite"
        )


class Fleet:
    """Dynamo's frontend and workers, which share a folder for discovery."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.processes = []
        self.port = free_port()
        self.key = folder / "key"
        self.key.write_text("a secret of the fleet, for a test only")
        local = [
            "DYN_TCP_RPC_HOST",
            "DYN_TCP_RESPONSE_STREAM_HOST",
            "DYN_EVENT_PLANE_HOST",
            "DYN_SYSTEM_HOST",
        ]
        self.environment = {
            **os.environ,
            **dict.fromkeys(local, "127.0.0.1"),
            # Dynamo caches model cards in the home folder.
            "HOME": str(folder),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
            "DYN_LOG": "warn",
            # Requests must still arrive when the worker drains.
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
        }
        mode = "kv" if args.kv_events else "round-robin"
        command = [sys.executable, "-m", "dynamo.frontend", f"--router-mode={mode}"]
        command += ["--http-host=127.0.0.1", f"--http-port={self.port}", "--migration-limit=3"]
        self.frontend = self.start("frontend", command, self.environment)
        wait_until(
            lambda: get(self.port, "/health"), "the start of dynamo.frontend", self.frontend.process
        )

    def start(self, *process):
        process = Process(self.folder, *process)
        self.processes.append(process)
        return process

    def worker(self, name, mode=None):
        """Starts a worker and waits until the frontend knows it."""
        args, before = self.args, self.instances()
        command = [sys.executable, str(WORKER), "--samite", args.samite, "--name", NAME]
        if not args.text:
            command += ["--tokenizer", args.tokenizer]
        if args.kv_events:
            command += ["--kv-events"]
        flags = list(args.flags)
        if mode:
            command += [f"--disaggregation-mode={mode}"]
            flags += [f"--kv-transfer-key={self.key}"]
        if mode == "decode":
            # It logs what it fetches.
            flags += ["-v"]
        if mode == "prefill":
            flags += ["--kv-transfer=127.0.0.1:0", "--kv-transfer-host=127.0.0.1"]
        port = free_low_port()
        environment = {**self.environment, "DYN_SYSTEM_PORT": str(port)}
        worker = self.start(name, [*command, "--", "-m", args.model, *flags], environment)
        worker.port = port
        wait_until(lambda: self.instances() - before, f"the registration of {name}", worker.process)
        wait_until(
            lambda: NAME in (get(self.port, "/v1/models") or ""),
            f"the model of {name} at the frontend",
            worker.process,
        )
        worker.pids.update(children(worker.process.pid))
        return worker

    def instances(self):
        return set((self.folder / "discovery/v1/instances").glob("*"))

    def metrics(self, worker, name):
        return metric(get(worker.port, "/metrics"), f"samite:{name}")

    def kill(self):
        for process in self.processes:
            if process.process.poll() is None:
                for pid in children(process.process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.process.kill()
                process.process.wait()


class Load:
    """Requests of several clients, and their results."""

    def __init__(self, port, expected):
        self.port, self.expected = port, expected
        self.results, self.failures, self.times = collections.Counter(), [], []

    def send(self, count, clients, seed, event=None):
        """Sends requests. With `event`, a third before it, and a third after it has returned."""
        self.sent, self.last = 0, math.inf if event else count

        def client():
            while True:
                with HELD:
                    job, self.sent = self.sent, self.sent + 1
                if job >= self.last:
                    return
                self.request(random.Random(f"{seed}/{job}"))

        threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        if event:
            wait_until(lambda: self.sent > count // 3, f"{seed}: a third of the requests")
            event()
            self.last = max(count, self.sent + count // 3)
        for thread in threads:
            thread.join()

    def request(self, rng):
        content, tokens = rng.choice(list(self.expected))
        self.request_of(content, tokens, rng.random() < 0.5, rng.random() < 0.1)

    def request_of(self, content, tokens, is_stream, leaves):
        begin, received = time.monotonic(), []
        try:
            result = ask(self.port, content, tokens, is_stream, leaves, received)
        except (OSError, http.client.HTTPException, ValueError) as error:
            result = f"{type(error).__name__}: {error}"
        text = "".join(received)
        if result == "answered" and text != self.expected[content, tokens]:
            result = "different"
        with HELD:
            if result in ("answered", "different", "left"):
                self.results[result] += 1
            else:
                self.results["lost after the first token" if is_stream and text else "lost"] += 1
                self.failures.append(result)
            if result == "answered":
                self.times.append(time.monotonic() - begin)

    def report(self, name, allowed):
        """Prints the results. A share `allowed` of the texts may differ."""
        total = sum(self.results.values())
        counts = ", ".join(f"{count} {result}" for result, count in sorted(self.results.items()))
        self.times.sort()
        median, last = self.times[len(self.times) // 2], self.times[-1]
        print(
            f"{name}: {total} requests: {counts}; "
            f"median {median * 1000:.0f} ms, slowest {last * 1000:.0f} ms",
            flush=True,
        )
        for failure, count in collections.Counter(self.failures).items():
            print(f"  {count} times: {failure}", flush=True)
        if self.results["different"] > allowed * total:
            sys.exit(f"{name}: {self.results['different']} texts differ from samite's own")

    @property
    def lost(self):
        return self.results["lost"] + self.results["lost after the first token"]


def ask(port, content, tokens, is_stream, leaves, received):
    """Sends a request, appends the answer's texts to `received`, and returns the result."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({**body, "stream": is_stream}),
            {"Content-Type": "application/json"},
        )
        if leaves and not is_stream:
            time.sleep(0.01)
            return "left"
        response = connection.getresponse()
        if response.status != 200:
            return f"status {response.status}: {response.read().decode()}"
        if not is_stream:
            received.append(json.load(response)["choices"][0]["message"]["content"])
            return "answered"
        reason = None
        for line in response:
            if line == b"data: [DONE]\n":
                return "answered" if reason else "the stream has no finish_reason"
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "choices" not in event:
                return f"event {line.decode().strip()}"
            for choice in event["choices"]:
                received.append(choice["delta"].get("content") or "")
                reason = choice["finish_reason"] or reason
            if leaves and received and received[-1]:
                return "left"
        return "the stream has no end"
    finally:
        connection.close()


def questions(args):
    """Returns contents with numbers of tokens."""
    if args.disaggregated:
        texts = [
            " ".join(random.Random(f"{seed}/{length}").choices(NOUNS, k=length))
            for length in LENGTHS
            for seed in range(len(OPENINGS))
        ]
    else:
        texts = [opening.format(noun, noun[::-1]) for opening in OPENINGS for noun in NOUNS]
    return [(text, tokens) for text in texts for tokens in TOKENS]


def expected_answers(args, folder):
    """Returns samite's own answers by content and number of tokens.

    Writes the tokenizer if Dynamo needs one and the caller named none.
    """
    port = free_port()
    command = [args.samite, "serve", "-m", args.model, *args.flags]
    command += ["--host=127.0.0.1", f"--port={port}"]
    samite = Process(folder, "samite", command, None)
    try:
        wait_until(lambda: get(port, "/ready"), "the start of samite serve", samite.process)
        if not args.text and not args.tokenizer:
            args.tokenizer = str(folder / "tokenizer")
            write_tokenizer(args, json.loads(get(port, "/props"))["chat_template"])
        answers = {}
        for content, tokens in questions(args):
            received = []
            result = ask(port, content, tokens, False, False, received)
            if result != "answered":
                sys.exit(f"samite serve: {result}")
            answers[content, tokens] = received[0]
        return answers
    finally:
        samite.process.kill()
        samite.process.wait()


def write_tokenizer(args, template):
    """Writes the Hugging Face folder of a model with a SentencePiece vocabulary."""
    command = [args.samite, "inspect", "--json", "--full", "--no-tensors", args.model]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)[
        "metadata"
    ]
    if metadata["tokenizer.ggml.model"] != "llama":
        sys.exit(
            f"{args.model}: its vocabulary is not SentencePiece's; "
            "name its Hugging Face folder with --tokenizer"
        )
    tokens, scores, kinds = (
        metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")
    )
    ids = {token: number for number, token in enumerate(tokens)}
    begin, end = (tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    NORMAL, UNKNOWN, CONTROL = 1, 2, 3
    merges = []
    # A pair merges earlier if the piece that it gives has a higher score.
    for number in sorted(
        (i for i, kind in enumerate(kinds) if kind == NORMAL), key=lambda i: -scores[i]
    ):
        piece = tokens[number]
        pairs = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += sorted(
            (pair for pair in pairs if ids.keys() >= set(pair)),
            key=lambda pair: [ids[part] for part in pair],
        )
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    special = [
        {"id": number, "content": tokens[number], "special": True, **flags}
        for number, kind in enumerate(kinds)
        if kind in (UNKNOWN, CONTROL)
    ]
    space = "\u2581"
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": space},
                {"type": "Replace", "pattern": {"String": " "}, "content": space},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": space}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[kinds.index(UNKNOWN)],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": merges,
        },
    }
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(tokens),
        "bos_token_id": ids[begin],
        "eos_token_id": ids[end],
        "max_position_embeddings": metadata["llama.context_length"],
    }
    # Dynamo adds no begin token to a chat, but samite does if the file says so.
    start = "{{ bos_token }}" if metadata.get("tokenizer.ggml.add_bos_token", True) else ""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "chat_template": start + template,
    }
    folder = pathlib.Path(args.tokenizer)
    folder.mkdir()
    for name, value in [
        ("tokenizer", tokenizer),
        ("config", config),
        ("tokenizer_config", settings),
    ]:
        (folder / f"{name}.json").write_text(json.dumps(value))


def test(args, fleet, expected):
    first, second = fleet.worker("worker-1"), fleet.worker("worker-2")

    def phase(share, name, event=None):
        load = Load(fleet.port, expected)
        load.send(args.requests * share // 10, args.clients, name, event)
        load.report(name, 0 if "--deterministic" in args.flags else MAX_DIFFERENT)
        return load

    load = phase(4, "two workers")
    if load.lost:
        sys.exit("two workers: requests were lost")
    check_metrics(fleet, first, second)
    if args.kv_events:
        check_routing(fleet)

    load = phase(2, "SIGTERM to a worker", lambda: first.end(signal.SIGTERM, 0))
    check_lost(args, load)

    third = fleet.worker("worker-3")
    load = phase(2, "SIGKILL of a worker", lambda: second.end(signal.SIGKILL, -signal.SIGKILL))
    check_lost(args, load)

    fourth = fleet.worker("worker-4")
    load = phase(2, "SIGKILL of a worker's samite", lambda: third.kill_children(1))
    check_lost(args, load)
    if "samite serve: exited with -9" not in third.log.read_text():
        sys.exit("worker-3: does not say that samite ended")

    fourth.end(signal.SIGTERM, 0)
    fleet.frontend.end(signal.SIGTERM, 0)
    print(f"no process of {len(fleet.processes)} and their servers remains", flush=True)


def test_disaggregated(args, fleet, expected):
    decode = [fleet.worker(f"decode-{number}", "decode") for number in (1, 2)]
    prefill = [fleet.worker(f"prefill-{number}", "prefill") for number in (1, 2)]

    # One after another, so that no batch decides.
    load = Load(fleet.port, expected)
    for content, tokens in expected:
        load.request_of(content, tokens, True, False)
    load.report("prefill and decode", MAX_DIFFERENT)
    if load.lost:
        sys.exit("prefill and decode: requests were lost")
    check_transfer(fleet, prefill, decode, len(expected))
    if args.kv_events:
        check_routing(fleet)

    def phase(name, event):
        load = Load(fleet.port, expected)
        load.send(DISAGGREGATED_REQUESTS, args.clients, name, event)
        load.report(name, MAX_DIFFERENT)
        check_lost(args, load)

    def end_two():
        prefill[0].end(signal.SIGKILL, -signal.SIGKILL)
        decode[0].end(signal.SIGTERM, 0)

    phase("SIGKILL of a prefill worker, SIGTERM to a decode worker", end_two)
    check_metrics(fleet, prefill[1], decode[1])
    phase("a further decode worker", lambda: decode.append(fleet.worker("decode-3", "decode")))
    phase("SIGTERM to the last prefill worker", lambda: prefill[1].end(signal.SIGTERM, 0))
    decode[1].end(signal.SIGINT, 0)
    decode[2].end(signal.SIGTERM, 0)
    fleet.frontend.end(signal.SIGTERM, 0)
    print(f"no process of {len(fleet.processes)} and their servers remains", flush=True)


def check_transfer(fleet, prefill, decode, requests):
    """Checks that prompts were computed by some servers and fetched by the others."""
    time.sleep(METRICS_SECONDS)
    for name, workers in [("prefill", prefill), ("decode", decode)]:
        asked, cached = (
            sum(fleet.metrics(worker, f"prefix_cache_{kind}_total") for worker in workers)
            for kind in ("queries", "hits")
        )
        print(
            f"  {name} servers: {asked:.0f} tokens of prompts, {cached:.0f} from the cache, "
            f"{asked - cached:.0f} computed",
            flush=True,
        )
    # Only the last token of a prompt is computed by the server that chooses its successor.
    if asked - cached != requests:
        sys.exit("prefill and decode: the decode servers computed prompts")
    fetched = [FETCHED.findall(worker.log.read_text()) for worker in decode]
    print(f"  fetched: {sum(map(int, sum(fetched, [])))} tokens", flush=True)
    if len(sum(fetched, [])) != requests:
        sys.exit(f"prefill and decode: {[len(each) for each in fetched]} caches were fetched")
    used = [fleet.metrics(worker, "request_success_total") for worker in prefill] + fetched
    # Without load, the router by KV events may prefer the first.
    if not fleet.args.kv_events and not all(used):
        sys.exit("prefill and decode: a worker got no request")


def check_metrics(fleet, *workers):
    time.sleep(METRICS_SECONDS)
    answered, cancelled, running = (
        [fleet.metrics(worker, name) for worker in workers]
        for name in ("request_success_total", "requests_cancelled_total", "num_requests_running")
    )
    print(f"  answered {answered}, cancelled {cancelled}, running {running}", flush=True)
    if not all(answered):
        sys.exit("two workers: one got no request")
    if not sum(cancelled):
        sys.exit("two workers: no request was cancelled, although clients left")
    if any(running):
        sys.exit("two workers: requests still run without clients")


def check_routing(fleet):
    """Checks that the router applied samite's events and routed by them."""
    text = get(fleet.port, "/metrics")
    applied = "dynamo_component_kv_cache_events_applied"
    kinds = ("stored", "removed")
    ok = [metric(text, applied, f'event_type="{kind}",status="ok"') for kind in kinds]
    failed = metric(text, applied) - metric(text, applied, 'status="ok"')
    router = "dynamo_component_router_kv"
    cached, reused = (
        metric(text, f"{router}_{name}_tokens_total")
        for name in ("selected_cached_prefix", "worker_reused")
    )
    print(f"  events: {ok[0]:.0f} stored, {ok[1]:.0f} removed, {failed:.0f} failed", flush=True)
    print(
        f"  cached tokens: {cached:.0f} expected by the router, {reused:.0f} reused by samite",
        flush=True,
    )
    if not ok[0] or not cached:
        sys.exit("two workers: the router did not use samite's events")
    if "--deterministic" in fleet.args.flags:
        return
    hits = 0
    for number in range(REPEATED):
        content = f"{number}: " + " ".join(random.Random(number).choices(NOUNS, k=30))
        for repeat in (False, True, True):
            usage = ask_usage(fleet.port, content)
            share = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
            hits += repeat and share > 0.8
            # The events of a request reach the router later than its answer.
            time.sleep(0.2)
    print(
        f"  {hits} of {2 * REPEATED} repeated prompts reached the worker that has them", flush=True
    )
    if hits < 2 * REPEATED:
        sys.exit("two workers: the router sent repeated prompts to a worker without them")


def ask_usage(port, content):
    """Returns the usage of a request for one token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    message = {"role": "user", "content": content}
    body = {"model": NAME, "messages": [message], "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = json.load(connection.getresponse())
    connection.close()
    return answer["usage"]


def check_lost(args, load):
    # Dynamo repeats requests of tokens on another worker, but not those of text. Lost are those in
    # flight, and those sent before the frontend knows. Even when a worker leaves in order, the
    # frontend cancels what it has just sent to it.
    allowed = 2 * args.clients if args.text else 0
    if load.lost > allowed:
        sys.exit(f"{load.lost} requests were lost; at most {allowed} may be")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="test.py [FLAGS] -- FLAGS OF samite serve"
    )
    parser.add_argument("--samite", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--tokenizer", help="Hugging Face folder of the model [default: written from the model]"
    )
    parser.add_argument("--text", action="store_true", help="let samite apply the chat template")
    parser.add_argument(
        "--kv-events",
        action="store_true",
        help="route by KV events; samite must be built with --features kv-events",
    )
    parser.add_argument(
        "--disaggregated", action="store_true", help="test prefill and decode workers"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of samite serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        begin = time.monotonic()
        expected = expected_answers(args, folder)
        fleet = Fleet(args, folder)
        try:
            (test_disaggregated if args.disaggregated else test)(args, fleet, expected)
        except SystemExit:
            for process in fleet.processes:
                print(f"--- {process.name}\n{process.log.read_text()[-3000:]}", file=sys.stderr)
            raise
        finally:
            fleet.kill()
        print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
