#!/usr/bin/env python3
"""Runs deployment.py on this machine with clients that leave or wait, load, and killed replicas.

    test.py --samite target/release/samite -m model.gguf [--proxy] [-- --chat-template chatml]

Clients connect to the gateway, or with --proxy to Ray's own proxy, which buffers answers. Flags
after `--` go to samite. Needs Linux, ray[serve] and a model that can continue past its context.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLIENTS = 24
CONVERSATIONS = 40
# The guard against hangs, in seconds.
GUARD = 120
NAMES = ["Lily", "Tom", "Ben", "Sue", "Max"]
THINGS = [
    "a red ball",
    "a big dog",
    "a blue boat",
    "an old tree",
    "a small bird",
    "a green frog",
    "a hat",
    "a cake",
]


def free_port():
    """Returns a port below those that the system gives to Ray's processes."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


PORT = free_port()
# Ray replaces 127.0.0.1 by an address that other machines reach.
NODE = "127.0.0.2"
# Ray reads these variables when it is imported.
os.environ |= {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": str(int("--proxy" not in sys.argv)),
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(PORT),
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(PORT + 1),
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(HERE),
}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import aiohttp
import ray
from deployment import REPLICA_HEADER, Args, app
from ray import serve
from testing import Check


check = Check()


def first_message(number):
    name, thing = NAMES[number % 5], THINGS[number // 5]
    return f"Once upon a time {name} had {thing}. Tell me what happened to them."


def small_request(number):
    """Returns the body of a request: one of four follow-ups of a conversation."""
    messages = [{"role": "user", "content": first_message(number % CONVERSATIONS)}]
    follow_up = number // CONVERSATIONS % 4
    if follow_up:
        messages += [
            {"role": "assistant", "content": "They went out to play."},
            {"role": "user", "content": f"And then? {follow_up}"},
        ]
    return {"messages": messages, "max_tokens": 12, "temperature": 0}


def long(tokens):
    """Returns the body of a request with so many tokens."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@dataclasses.dataclass
class Answer:
    text: str = ""
    usage: dict | None = None
    replica: str | None = None
    # Tokens and their lead over the second likeliest, in natural logarithms.
    leads: list | None = None
    # The stream failed after a token.
    is_cut: bool = False


async def ask(session, body, is_stream=False):
    if is_stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer, finished = Answer(), False
    try:
        async with session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            answer.replica = response.headers.get(REPLICA_HEADER)
            if not is_stream:
                fields = await response.json()
                (choice,), answer.usage = fields["choices"], fields["usage"]
                answer.text = choice["message"]["content"]
                answer.leads = leads(choice.get("logprobs"))
                return answer
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    answer.text += choice["delta"].get("content") or ""
                    finished |= choice["finish_reason"] is not None
                answer.usage = event.get("usage") or answer.usage
        if not finished:
            raise RuntimeError("the stream ended early")
    except (aiohttp.ClientError, RuntimeError) as error:
        if not answer.text:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        answer.is_cut = True
    return answer


def leads(logprobs):
    if not logprobs:
        return None
    tokens = [
        (item["token"], [other["logprob"] for other in item["top_logprobs"]])
        for item in logprobs["content"]
    ]
    return [(token, best - second) for token, (best, second) in tokens]


def is_equal(text, expected):
    """Returns whether a text is as expected, up to a token that rounding may decide."""
    if text == expected.text:
        return True
    for token, lead in expected.leads:
        if not text.startswith(token):
            return lead < 0.01
        text = text.removeprefix(token)
    return False


def connect(port):
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=connector, timeout=aiohttp.ClientTimeout(GUARD)
    )


async def expected_texts(samite, flags):
    """Returns the answer to each different request from a samite without Ray."""
    port = free_port()
    server = subprocess.Popen(
        [samite, "serve", *flags, "--port", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        async with connect(port) as session:
            await wait_for("samite serve", lambda: is_ready(session))
            more = {"logprobs": True, "top_logprobs": 2}
            return [
                await ask(session, {**small_request(number), **more})
                for number in range(4 * CONVERSATIONS)
            ]
    finally:
        server.terminate()
        server.wait()


async def is_ready(session):
    try:
        async with session.get("/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def wait_for(what, holds):
    begin = time.monotonic()
    while not await holds():
        if time.monotonic() - begin > GUARD:
            raise SystemExit(
                f"{what}: not so after {GUARD} s; start deployment.py alone and read Ray's logs"
            )
        await asyncio.sleep(0.1)
    return time.monotonic() - begin


async def replicas():
    """Returns the number of running replicas."""
    status = await asyncio.to_thread(serve.status)
    states = status.applications["default"].deployments["Samite"].replica_states
    return states.get("RUNNING", 0)


def descendants():
    """Returns the command lines of all processes below this one, and their parents."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
            names[int(folder.name)] = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            )
        except (OSError, ProcessLookupError):
            continue

    def is_below(process):
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return {
        process: (names[process], parents[process])
        for process in names
        if names[process] and is_below(process)
    }


def children(samite):
    """Returns the processes of samite with the replicas that started them."""
    found = descendants()
    return [
        (process, parent)
        for process, (name, parent) in found.items()
        if name.startswith(f"{samite} serve")
    ]


async def metric(session, name):
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def cancelled(session):
    """Leaves a stream and a whole answer in the middle."""
    for is_stream in (True, False):
        async with connect(PORT) as own:
            request = asyncio.create_task(
                own.post("/v1/chat/completions", json={**long(1_000_000), "stream": is_stream})
            )
            await wait_for("a running request", lambda: has_running(session, 1))
            if is_stream:
                response = await request
                await response.content.readany()
                response.close()
            request.cancel()
        seconds = await wait_for("a cancelled request", lambda: has_running(session, 0))
        check(
            True,
            f"client left {'a stream' if is_stream else 'an answer'}: samite stopped "
            f"after {seconds:.1f} s",
        )


async def has_running(session, count):
    return await metric(session, "samite:num_requests_running") == count


async def unread(session):
    """Opens a stream and does not read it: samite must pause, then continue when it is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", PORT))
    # Large events soon fill all buffers between samite and the client.
    more = {"stream": True, "logprobs": True, "top_logprobs": 100}
    text = json.dumps({**long(1_000_000), **more})
    connection.sendall(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    )
    tokens = lambda: metric(session, "llamacpp:tokens_predicted_total")
    before, now, begin = -1, await tokens(), time.monotonic()
    while now != before and time.monotonic() - begin < GUARD / 2:
        await asyncio.sleep(2)
        before, now = now, await tokens()
    seconds = time.monotonic() - begin
    read = 0
    while read < 50 << 20 and await tokens() == now:
        read += len(await asyncio.to_thread(connection.recv, 1 << 16))
    check(
        before == now and await tokens() > now,
        f"unread stream: samite paused at {now:.0f} tokens within {seconds:.0f} s, "
        f"and continued after {read >> 10} KiB were read",
    )
    connection.close()
    await wait_for("a cancelled request", lambda: has_running(session, 0))


async def scale_up(session):
    """Loads one replica until Ray starts the second."""
    sent, begin = 0, time.monotonic()

    async def client(number):
        nonlocal sent
        while await replicas() < 2:
            await ask(session, {**small_request(number), "max_tokens": 200, "ignore_eos": True})
            sent += 1
            if time.monotonic() - begin > GUARD:
                return

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    check(
        await replicas() == 2,
        f"autoscaling from 1 to 2 replicas after {time.monotonic() - begin:.1f} s "
        f"and {sent} requests",
    )


async def thousand(session, expected, count, samite):
    """Sends requests, half of them streams. Kills a samite, then a replica with its samite."""
    counts, delays = Counter(), []
    numbers = iter(range(count))

    async def client():
        for number in numbers:
            if number in (count // 5, count // 2):
                process, parent = children(samite)[0]
                for killed in (process, parent) if number == count // 2 else (process,):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(killed, signal.SIGKILL)
            begin = time.monotonic()
            try:
                answer = await ask(session, small_request(number), number % 2 == 1)
            except RuntimeError as error:
                counts["lost"] += 1
                print(f"request {number}: {error}")
                continue
            delays.append(time.monotonic() - begin)
            reference = expected[number % (4 * CONVERSATIONS)]
            counts["cut" if answer.is_cut else "complete"] += 1
            counts["ties"] += not answer.is_cut and answer.text != reference.text
            counts["different"] += not answer.is_cut and not is_equal(answer.text, reference)

    begin = time.monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seconds = time.monotonic() - begin
    delays.sort()
    print(
        f"{count} requests in {seconds:.1f} s, {count / seconds:.0f}/s, "
        f"median {delays[len(delays) // 2]:.2f} s, longest {delays[-1]:.2f} s"
    )
    check(
        counts["lost"] == 0,
        f"a samite and a replica killed: {counts['complete']} complete, {counts['lost']} lost, "
        f"{counts['cut']} cut after a token",
    )
    check(
        counts["different"] == 0,
        f"{counts['different']} texts differ from those of samite without Ray, "
        f"{counts['ties']} at ties",
    )
    seconds = await wait_for("two replicas", lambda: has_replicas(2))
    print(f"both replicas run {seconds:.1f} s after the requests")


async def has_replicas(count):
    return await replicas() == count


async def affinity(session):
    """Sends conversations that are new to both replicas, then their second turns."""
    hits, cached, prompt, places = 0, 0, 0, Counter()
    for number in range(CONVERSATIONS):
        messages = [{"role": "user", "content": f"{number} {first_message(number)}"}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        first = await ask(session, body)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        second = await ask(session, body)
        found = second.usage["prompt_tokens_details"]["cached_tokens"]
        # The first prompt ends with the begin of the answer.
        hits += first.replica == second.replica and found >= first.usage["prompt_tokens"] - 2
        cached, prompt = cached + found, prompt + second.usage["prompt_tokens"]
        places[second.replica] += 1
    share = (
        f"{hits} of {CONVERSATIONS} second turns found the first one's prompt, "
        f"{100 * cached / prompt:.0f} % of their tokens were cached"
    )
    check(
        hits == CONVERSATIONS and len(places) == 2,
        f"affinity over replicas with {sorted(places.values())} conversations: {share}",
    )


async def stop(session):
    """Stops the application while a stream runs, which must end."""
    stream = asyncio.create_task(ask(session, long(2000), is_stream=True))
    await asyncio.sleep(0.3)
    begin = time.monotonic()
    await asyncio.to_thread(serve.delete, "default")
    answer = await stream
    tokens = answer.usage and answer.usage["completion_tokens"]
    check(
        tokens == 2000,
        f"stopped in {time.monotonic() - begin:.1f} s: the stream ended after {tokens} tokens",
    )


async def run(args, flags):
    expected = await expected_texts(args.samite, flags)
    arguments = Args(
        program=args.samite,
        flags=shlex.join(flags),
        cpus=0.5,
        max_replicas=2,
        upscale_delay_s=1,
        drain=30,
    )
    begin = time.monotonic()
    await asyncio.to_thread(serve.run, app(arguments))
    async with connect(PORT) as session:
        await wait_for("the gateway", lambda: is_ready(session))
        print(f"one replica is ready after {time.monotonic() - begin:.1f} s")
        await cancelled(session)
        if not args.proxy:
            await unread(session)
        await scale_up(session)
        await thousand(session, expected, args.requests, args.samite)
        await affinity(session)
        started = descendants()
        await stop(session)
    return started


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samite", required=True)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--proxy", action="store_true")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    own = "--parallel 4 --kv-unified -c 8192 -t 1 --context-shift --cached-prefixes 128 --metrics"
    flags = ["-m", str(Path(args.model).resolve()), *own.split(), *args.flags]
    args.samite = str(Path(args.samite).resolve())
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _node_ip_address=NODE,
            _temp_dir=folder,
            log_to_driver=False,
        )
        try:
            serve.start(
                http_options={"host": "127.0.0.1", "port": PORT if args.proxy else free_port()}
            )
            started = asyncio.run(run(args, flags))
        finally:
            serve.shutdown()
            ray.shutdown()
    time.sleep(2)
    left = [name for process, (name, _) in started.items() if Path(f"/proc/{process}").exists()]
    check(
        not left and not children(args.samite),
        f"{len(started)} processes, {len(left)} left: {left}",
    )
    sys.exit(bool(check.failed))


if __name__ == "__main__":
    main()
