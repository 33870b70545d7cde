#!/usr/bin/env python3
"""vllm-router sends prompts to some servers and answers to others: is the text that of one server, also after failures?

    disaggregated.py SAMITE --bin FOLDERS [-m MODEL] [--clients 4] [--no-failures] [--namespaces]

FOLDERS, separated by `:`, have the program of PyPI's vllm-router. Two servers compute prompts, two others fetch their
KV caches and generate. A fifth one does both, and has no router. Prompts differ in length, are for completions and for
chats, and are answered whole and streamed. Then servers are killed, frozen and restarted. The router does not repeat a
request whose server is gone, so it may answer with an error until it has noticed; nothing may hang, and no text may
differ. Exits with 1 if a bound does not hold.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import math
import pathlib
import random
import signal
import sys
import tempfile
import time

from routers import GUARD, ROOT, ROUTER_TIMEOUT, Bounds, Fleet, Vllm, metric, network_of, words
from transfer import FETCHED

PREFILL, DECODE, SINGLE = (0, 1), (2, 3), 4
# Words of prompts.
LENGTHS = [1, 2, 5, 15, 16, 17, 32, 33, 60, 80, 100, 150, 250]
# Seconds after which the router has noticed that a server is gone, or back.
NOTICED = 5
# How far logarithms of probabilities are apart by rounding: other requests and places in the cache change its order.
TOLERANCE = 0.6
# A server waits for a part of a cache no longer than this, in seconds.
PATIENCE = 10


class Split(Fleet):
    def flags(self, number):
        flags = ["-v", "--ctx-size", "16384", "--cached-prefixes", "64"]
        if number != SINGLE:
            flags += ["--kv-transfer-key", f"{self.folder}/secret"]
        if number in PREFILL:
            flags += ["--kv-transfer", f"{self.args.network.every}:{self.ports[number][1]}"]
        return flags


class SplitRouter(Vllm):
    policy = "round_robin"

    def workers(self):
        flags = ["--vllm-pd-disaggregation"]
        for role, numbers in [("--prefill", PREFILL), ("--decode", DECODE)]:
            for number in numbers:
                flags += [role, self.fleet.url(number)]
        return flags


class Failed(Exception):
    """An answer without a text."""


def ask(address, path, body):
    """The tokens of an answer, each with the logarithms of probabilities of the likeliest ones, and its usage."""
    connection = http.client.HTTPConnection(address, timeout=GUARD)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise Failed(f"{response.status}: {content[:200]}")
        if not body["stream"]:
            events = [json.loads(content)]
        else:
            events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed(repr(error)) from error
    finally:
        connection.close()
    tokens, reason, usage = [], None, None
    for event in events:
        if "error" in event:
            raise Failed(str(event["error"])[:200])
        for choice in event["choices"]:
            chances = choice.get("logprobs") or {}
            tokens += zip(chances.get("tokens", []), chances.get("top_logprobs", []))
            for token in chances.get("content") or []:
                tokens.append((token["token"], {one["token"]: one["logprob"] for one in token["top_logprobs"]}))
            reason = choice.get("finish_reason") or reason
        usage = event.get("usage") or usage
    if reason is None or usage is None:
        raise Failed("the answer ended early")
    return tokens, (usage["prompt_tokens"], usage["completion_tokens"])


def difference(answer, expected):
    """How an answer differs from the expected one, if it does. Where tokens are nearly as likely, rounding chooses, and
    what follows is free."""
    (tokens, usage), (others, other_usage) = answer, expected
    if usage[0] != other_usage[0]:
        return f"{usage[0]} tokens of the prompt, not {other_usage[0]}"
    for number, ((token, chances), (other, expects)) in enumerate(zip(tokens, others)):
        likeliest = expects[other]
        gap = max(abs(likeliest - rest) for rest in (expects.get(token, -math.inf), chances.get(other, -math.inf)))
        if gap > TOLERANCE:
            return f"token {number} is {token!r}, not {other!r}: {gap:.2f}"
        if token != other:
            return None
    same = usage == other_usage and len(tokens) == len(others) > 0
    return None if same else f"{len(tokens)} tokens of {usage}, not {len(others)} of {other_usage}"


def requests(seed):
    """Paths and bodies. No prompt of another seed is like these."""
    rng = random.Random(seed)
    for length in LENGTHS:
        for stream in (False, True):
            body = {"model": "model", "temperature": 0, "max_tokens": 24, "stream": stream}
            if stream:
                body["stream_options"] = {"include_usage": True}
            yield "/v1/completions", {**body, "prompt": words(rng, length), "logprobs": 5}
            chat = [{"role": "user", "content": words(rng, length)}]
            yield "/v1/chat/completions", {**body, "messages": chat, "logprobs": True, "top_logprobs": 5}


class Round:
    """Requests through the router, whose answers are compared with those of one server."""

    def __init__(self, args, router, fleet, bounds, name, during=lambda: None):
        """`during` is called when a third of the requests is answered."""
        self.failed, self.slowest, self.answered, self.prompts = [], 0, 0, 0
        args.seed += 1
        todo = list(requests(args.seed))
        expected = {}

        def one(number):
            begin = time.monotonic()
            try:
                return ask(router.address, *todo[number]), time.monotonic() - begin
            except Failed as error:
                return error, time.monotonic() - begin

        for number, (path, body) in enumerate(todo):
            expected[number] = ask(fleet.address(SINGLE), path, body)
        with concurrent.futures.ThreadPoolExecutor(args.clients) as clients:
            answers = [clients.submit(one, number) for number in range(len(todo))]
            for number, future in enumerate(answers):
                if number == len(todo) // 3:
                    during()
                answer, seconds = future.result()
                self.slowest = max(self.slowest, seconds)
                if isinstance(answer, Failed):
                    self.failed.append(str(answer))
                    continue
                self.answered += 1
                self.prompts += answer[1][0]
                path, body = todo[number]
                differs = difference(answer, expected[number])
                bounds.check(not differs, f"{name}: {path}, {body}: {differs}")
        print(f"| {name} | {self.answered} | {len(self.failed)} | {self.slowest:.1f} s |", flush=True)
        # A router that gives up at its limit may have waited for the prompt and for the answer.
        bounds.check(self.slowest <= 2 * ROUTER_TIMEOUT + 2, f"{name}: a request takes {self.slowest:.1f} s")


def counts(fleet, numbers):
    """All tokens of prompts, and those that were cached."""
    names = ("samite:prompt_tokens_total", "samite:prefix_cache_hits_total")
    return [sum(metric(fleet.address(number), name) for number in numbers) for name in names]


def fetches(args, fleet, router, bounds):
    """Who computes which tokens."""
    before = {numbers: counts(fleet, numbers) for numbers in (PREFILL, DECODE)}
    run = Round(args, router, fleet, bounds, "nothing fails")
    bounds.check(not run.failed, f"nothing fails: {run.failed[:3]}")
    (asked, cached), (again, found) = [
        [now - then for now, then in zip(counts(fleet, numbers), before[numbers])] for numbers in (PREFILL, DECODE)
    ]
    logs = [pathlib.Path(fleet.folder, f"server-{number}.log").read_text() for number in DECODE]
    fetched = [int(tokens) for log in logs for tokens, *_ in FETCHED.findall(log)]
    print(f"\n{run.prompts} tokens of prompts: {asked - cached:.0f} computed where they are computed, {cached:.0f} cached;")
    print(f"{sum(fetched)} fetched by servers for answers, {again - found:.0f} computed\n")
    bounds.check(asked == again == run.prompts, f"both have all {run.prompts} tokens of prompts: {asked}, {again}")
    bounds.check(again - found == run.answered, f"all tokens but the last of {run.answered} prompts are known")
    bounds.check(sum(fetched) == found, f"{found:.0f} tokens are fetched: {fetched}")


def orphan(args, fleet, bounds, name, act):
    """A server computes a prompt, and is gone when another one wants to fetch it."""
    args.seed += 1
    path, body = list(requests(args.seed))[-2]
    expected = ask(fleet.address(SINGLE), path, body)
    prefill = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    prefill.pop("stream_options", None)
    connection = http.client.HTTPConnection(fleet.address(PREFILL[0]), timeout=GUARD)
    connection.request("POST", path, json.dumps(prefill), {"Content-Type": "application/json"})
    params = json.loads(connection.getresponse().read())["kv_transfer_params"]
    connection.close()
    act()
    begin = time.monotonic()
    answer = ask(fleet.address(DECODE[0]), path, {**body, "kv_transfer_params": params})
    seconds = time.monotonic() - begin
    print(f"| {name} after it has computed a prompt | 1 | 0 | {seconds:.1f} s |", flush=True)
    differs = difference(answer, expected)
    bounds.check(not differs, f"{name}: {differs}")
    bounds.check(seconds <= PATIENCE + 3, f"{name}: the other one computes the prompt after {seconds:.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samite")
    parser.add_argument("-m", "--model", default=str(ROOT / "models/stories/stories.gguf"))
    parser.add_argument("--bin", help="folders with the program of the router", required=True)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--no-failures", action="store_true", help="leave most failures out, which take minutes")
    parser.add_argument("--logs", help="folder for the logs")
    parser.add_argument("--namespaces", action="store_true", help="each server and the router in a network namespace")
    args = parser.parse_args()
    args.network, args.seed = network_of(args), 0
    bounds = Bounds()
    with contextlib.ExitStack() as stack:
        folder = args.logs or stack.enter_context(tempfile.TemporaryDirectory())
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        pathlib.Path(folder, "secret").write_text("a secret of the fleet, for a test only")
        fleet = Split(args, folder, SINGLE + 1)
        stack.callback(fleet.end)
        router = SplitRouter(args, folder, fleet)
        stack.callback(router.end)
        print("| servers | answered | errors | slowest |\n|---|---|---|---|")
        fetches(args, fleet, router, bounds)

        def round_of(name, during=lambda: None, fails=None):
            """`fails` is whether requests have to fail; None if they may."""
            run = Round(args, router, fleet, bounds, name, during)
            bounds.check(fails is not False or not run.failed, f"{name}: {run.failed[:3]}")
            bounds.check(fails is not True or not run.answered, f"{name}: {run.answered} answered")

        def signal_to(number, which):
            return lambda: fleet.servers[number].signal(which)

        print("| servers | answered | errors | slowest |\n|---|---|---|---|")
        for role, numbers in [] if args.no_failures else [("prompts", PREFILL), ("answers", DECODE)]:
            for failure, begin, end in [
                ("killed", lambda: fleet.kill(numbers[0]), lambda: fleet.start(numbers[0])),
                ("frozen", signal_to(numbers[0], signal.SIGSTOP), signal_to(numbers[0], signal.SIGCONT)),
            ]:
                round_of(f"one of two for {role} is {failure}", begin)
                time.sleep(NOTICED)
                round_of(f"one of two for {role} was {failure}", fails=False)
                end()
                time.sleep(NOTICED)
                round_of(f"one of two for {role} is back", fails=False)
            for number in numbers:
                fleet.kill(number)
            time.sleep(NOTICED)
            round_of(f"both for {role} are gone", fails=True)
            for number in numbers:
                fleet.start(number)
            time.sleep(NOTICED)
            round_of(f"both for {role} are back", fails=False)
        first = PREFILL[0]
        if not args.no_failures:
            orphan(args, fleet, bounds, "a server is frozen", signal_to(first, signal.SIGSTOP))
            signal_to(first, signal.SIGCONT)()
        if args.namespaces:
            orphan(args, fleet, bounds, "a server's link is cut", lambda: args.network.cut(f"s{first}"))
            args.network.mend(f"s{first}")
        orphan(args, fleet, bounds, "a server is killed", lambda: fleet.kill(first))
    sys.exit(1 if bounds.failed else 0)


if __name__ == "__main__":
    main()
