"""Many clients that behave badly, and some that behave well: `samite serve` must answer the latter as if they were alone.

Usage: chaos.py PROGRAM [--seconds N] [--clients N] [--seed N] [--model FILE] [--device NAME] [--deterministic]

Clients leave in the middle, do not read, send broken JSON, prompts that are too long, schemas that explode, halves of requests, and hold connections open. The
server is stopped and continued (SIGSTOP, SIGCONT), may have 256 open files, and files of its cache on disk cannot become longer than some kilobytes, as on a
full disk. At the end no slot may be at work, no request may have failed, memory may not have grown, the quiet run's answers must come again, and SIGTERM must
end it. With --device reference or --deterministic, every text must be that of the quiet run. On other devices, sums are rounded in another order by what else is in a batch, so that two
tokens that are nearly as likely can change places: one greedy text in fifty may differ there, and texts that are drawn are not compared. Needs Linux and Python's own library only.
"""

import argparse
import collections
import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

PROMPTS = ["Once upon a time", "The cat", "One day, a little girl named Lily", "Tom and Sam", "There was a big tree", "A bird said"]
HOSTILE = [
    {"json_schema": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"enum": [str(i) for i in range(5000)]}},
    {"grammar": "root ::= root root | \"a\""},
    {"grammar": "root ::= ((\"a\"{1,1000}){1,1000}){1,1000}"},
    {"grammar": "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"\nroot ::= r0'},
    {"temperature": "hot"},
    {"logit_bias": [[10**9, 1]]},
    {"n": 10**6},
    {"stop": [["x"]]},
]


class Chaos:
    def __init__(self, arguments):
        self.arguments = arguments
        self.counts = collections.Counter()
        self.wrong = []
        # Greedy texts that are others than in the quiet run.
        self.differing = []
        self.end = 0.0
        self.lock = threading.Lock()

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def start(self, folder):
        def limits():
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            # Without the signal, writing more is an error.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

        flags = ["serve", "--port", "0", "-c", "4096", "--device", self.arguments.device, "--metrics", "--drain", "10"]
        flags += ["--deterministic"] if self.arguments.deterministic else ["--parallel", "8", "--cache-disk", folder]
        if self.arguments.model:
            flags += ["-m", self.arguments.model]
        self.server = subprocess.Popen([self.arguments.program, *flags], stderr=subprocess.PIPE, text=True, preexec_fn=limits)
        for line in self.server.stderr:
            if " served at " in line:
                self.host, port = line.split("://")[1].strip().rsplit(":", 1)
                self.port = int(port)
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=self.read_log, daemon=True).start()

    def read_log(self):
        for line in self.server.stderr:
            if "panicked" in line:
                self.wrong.append(line.strip())

    def connect(self, timeout=60):
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def ask(self, method, path, body=None, timeout=120):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def raw(self, body, path="/completion"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        stream = self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        stream.sendall(head.encode() + data)
        return stream

    def quiet(self, prompt, seed, is_stream=False):
        body = {"prompt": prompt, "n_predict": 24, "seed": seed, "temperature": 0.0 if seed == 0 else 0.9, "stream": is_stream}
        status, answer = self.ask("POST", "/completion", body)
        if status != 200:
            return f"{status} {answer[:200]}"
        if not is_stream:
            return json.loads(answer)["content"]
        lines = [line[6:] for line in answer.decode().split("\n") if line.startswith("data: ")]
        return "".join(json.loads(line).get("content", "") for line in lines)

    # What clients do. Each returns what it counts as.

    def good(self, chance):
        prompt, seed = chance.choice(PROMPTS), chance.randrange(2)
        text = self.quiet(prompt, seed, chance.random() < 0.5)
        self.judge(prompt, seed, text)

    def judge(self, prompt, seed, text):
        if text == self.expected[prompt, seed]:
            return
        told = f"{prompt!r}, seed {seed}: {text!r} instead of {self.expected[prompt, seed]!r}"
        is_exact = self.arguments.deterministic or self.arguments.device == "reference"
        if is_exact or not text or text.startswith(("4", "5")):
            self.wrong.append(told)
        elif seed == 0:
            self.differing.append(told)

    def leave(self, chance):
        stream = self.raw({"prompt": chance.choice(PROMPTS), "n_predict": 400, "stream": chance.random() < 0.7, "ignore_eos": True})
        if chance.random() < 0.6:
            stream.recv(chance.choice([1, 100, 3000]))
        stream.close()

    def stall(self, chance):
        stream = self.raw({"prompt": chance.choice(PROMPTS), "n_predict": 300, "stream": True, "n_probs": 20, "ignore_eos": True})
        stream.recv(100)
        time.sleep(chance.uniform(0.2, 3))
        stream.close()

    def broken(self, chance):
        body = chance.choice([b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a", "n_predict": }', b"", b'{"prompt": "\\ud800"}'])
        status = self.raw(body).recv(12)
        if not status:
            raise ConnectionError("closed without an answer")
        if not status.startswith(b"HTTP/1.1 400"):
            self.wrong.append(f"{body[:20]}: {status}")

    def huge(self, chance):
        status, answer = self.ask("POST", "/completion", {"prompt": "once " * chance.choice([5_000, 200_000])})
        if status != 400:
            self.wrong.append(f"a long prompt: {status} {answer[:100]}")

    def hostile(self, chance):
        status, answer = self.ask("POST", "/completion", {"prompt": "a", "n_predict": 3, **chance.choice(HOSTILE)})
        if status not in (200, 400, 503):
            self.wrong.append(f"hostile: {status} {answer[:200]}")

    def half(self, chance):
        stream = self.connect()
        stream.sendall(chance.choice([b"POST /comp", b"POST /completion HTTP/1.1\r\nContent-Length: 50\r\n\r\n{\"a\"", b"\x16\x03\x01"]))
        time.sleep(chance.uniform(0, 1))
        stream.close()

    def hold(self, chance):
        connections = []
        try:
            for _ in range(60):
                connections.append(self.connect())
            time.sleep(chance.uniform(0.2, 2))
        finally:
            for connection in connections:
                connection.close()

    def client(self, number):
        chance = random.Random(self.arguments.seed * 1000 + number)
        acts = [self.good] * 6 + [self.leave] * 3 + [self.stall] * 2 + [self.broken, self.huge, self.hostile, self.half, self.hold]
        if number < 5:
            # Together they hold more connections than there are files.
            acts = [self.hold]
        while time.monotonic() < self.end:
            act = chance.choice(acts)
            try:
                act(chance)
                self.count(act.__name__)
            except (OSError, http.client.HTTPException) as error:
                # A connection can be closed in favour of others before its request is there; whoever holds many counts on it.
                self.count(f"{act.__name__}: connection lost")
                if act == self.good:
                    self.lost.append(repr(error))

    def stop_now_and_then(self):
        chance = random.Random(self.arguments.seed)
        while time.monotonic() < self.end - 3:
            time.sleep(chance.uniform(3, 8))
            self.server.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 1))
            self.server.send_signal(signal.SIGCONT)
            self.count("stopped and continued")

    def memory(self):
        with open(f"/proc/{self.server.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) >> 10

    def wait_until_idle(self):
        start = time.monotonic()
        while True:
            slots = json.loads(self.ask("GET", "/slots")[1])
            if not any(slot["is_processing"] for slot in slots):
                return
            if time.monotonic() - start > 30:
                self.wrong.append(f"slots are at work: {[slot['id'] for slot in slots if slot['is_processing']]}")
                return
            time.sleep(0.1)

    def run(self):
        arguments = self.arguments
        self.lost = []
        with tempfile.TemporaryDirectory() as folder:
            self.start(folder)
            try:
                self.expected = {(prompt, seed): self.quiet(prompt, seed) for prompt in PROMPTS for seed in (0, 1)}
                started = time.monotonic()
                self.end = started + arguments.seconds
                threads = [threading.Thread(target=self.client, args=(i,)) for i in range(arguments.clients)]
                threads.append(threading.Thread(target=self.stop_now_and_then))
                for thread in threads:
                    thread.start()
                series = []
                while time.monotonic() < self.end:
                    time.sleep(arguments.seconds / 10)
                    series.append(self.memory())
                before = series[3]
                for thread in threads:
                    thread.join()
                self.wait_until_idle()
                after = self.memory()
                for prompt, seed in self.expected:
                    self.judge(prompt, seed, self.quiet(prompt, seed))
                metrics = self.ask("GET", "/metrics")[1].decode()
                told = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if not line.startswith("#")}
                # Until everything was used once, there is less of it.
                if after - before > (64 if arguments.seconds >= 240 else 256):
                    self.wrong.append(f"memory grew from {before} to {after} MiB")
                if self.server.poll() is not None:
                    self.wrong.append(f"the server ended with {self.server.returncode}")
                self.server.terminate()
                if self.server.wait(timeout=30) != 0:
                    self.wrong.append(f"SIGTERM: it ended with {self.server.returncode}")
            finally:
                self.server.kill()
        for what, count in sorted(self.counts.items()):
            print(f"{count:8} {what}")
        lost = len(self.lost)
        print(
            f"{arguments.clients} clients in {time.monotonic() - started:.0f} s: {told['samite:request_success_total']:.0f} answered, "
            f"{told['samite:requests_cancelled_total']:.0f} left, {told['samite:requests_failed_total']:.0f} failed; "
            f"memory {' '.join(map(str, series))} MiB, at the end {after} MiB; good clients lost {lost} connections"
        )
        print(f"{len(self.differing)} greedy texts differ")
        if len(self.differing) > 1 + self.counts["good"] / 50:
            self.wrong.extend(self.differing)
        if self.counts["good"] < arguments.seconds or lost > self.counts["good"] / 20:
            self.wrong.append(f"good clients: {self.counts['good']} answers, {lost} connections lost: {collections.Counter(self.lost).most_common(3)}")
        for what in self.wrong[:20]:
            print("wrong:", what)
        return 1 if self.wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("program")
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    sys.exit(Chaos(parser.parse_args()).run())


main()
