"""Hostile requests and connections beside honest clients, in little memory and with few open files.

Usage: hostile.py PROGRAM [--model FILE] [--requests N] [--connections N] [--clients N] [--memory MIB]
                  [--seed N] [--kinds LIST]

`samite serve` runs with an address space of MIB (RLIMIT_AS) and 256 open files. N honest clients
with one key ask for short answers, first alone and then while hostile clients with another key send
requests of 40 kinds and open connections of 10 kinds. The program prints the times of the honest
answers and the memory, and ends with status 1 if an honest request is not answered or takes more
than five times the longest quiet time, if the server ends, or if it does not end at SIGTERM.
Needs Linux and Python's own library only.
"""

import argparse
import collections
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

MIB = 1 << 20
# Longer than any honest answer takes.
PATIENCE = 120
END = b"\r\n\r\n"
# Hostile clients at once.
SENDERS = 64
# Its processes share the requests' bodies.
FORK = multiprocessing.get_context("fork")
HONEST = {"prompt": "Once upon a time there was", "n_predict": 8, "temperature": 0}


def completion(**fields):
    return "/completion", {"prompt": "a", "n_predict": 4, **fields}


def chat(**fields):
    messages = [{"role": "user", "content": "Hi"}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4, **fields}


def words(count):
    return "a word " * (count // 7)


def schema(value):
    return completion(json_schema=value)


def kinds():
    """Returns the path and the body, as JSON or as bytes, of each kind of hostile request."""
    chain = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"\nroot ::= r0'
    deep = '{"a":' * 60 + "1" + "}" * 60
    return [
        completion(samplers="t" * (5 * MIB)),
        completion(samplers="k" * 32, dynatemp_range=5, n_predict=64),
        completion(logit_bias=[[words(800_000), 1]] * 6),
        completion(logit_bias=[[i % 40_000, 1] for i in range(4096)]),
        completion(stop=[words(MIB)] * 4),
        ("/completion", {"prompt": ["a"] * 256, "n_predict": 64, "n_probs": 100}),
        completion(n_probs=100, n_predict=512),
        ("/tokenize", {"content": words(3 * MIB), "with_pieces": True}),
        ("/tokenize", {"content": "a" * (2 * MIB)}),
        ("/tokenize", {"content": ["a"] * 300_000}),
        ("/detokenize", {"tokens": [100] * 500_000}),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}] * 10_000}),
        ("/completion", b"[" * MIB),
        ("/completion", b"[" + b"1," * MIB + b"1]"),
        ("/completion", b"[" + b"{}," * 300_000 + b"{}]"),
        ("/completion", deep.encode()),
        ("/completion", b'{"prompt": "' + b"\\u0000" * 200_000 + b'"}'),
        completion(prompt=words(8 * MIB)),
        completion(prompt=[100] * 400_000),
        completion(prompt=words(6000), n_predict=1),
        completion(prompt=["a"] * 256),
        completion(extra="a" * (20 * MIB)),
        completion(grammar=chain),
        completion(grammar="root ::= ((\"a\"{1,1000}){1,1000}){1,1000}"),
        completion(grammar="root ::= " + "\"a\" | " * 20_000 + "\"b\""),
        completion(grammar="root ::= [^x]*", n_predict=16),
        schema({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}),
        schema({"enum": [str(i) for i in range(50_000)]}),
        schema({"anyOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(5000)]}),
        chat(messages=[{"role": "user", "content": "a"}] * 16_000),
        chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(3000)]),
        chat(chat_template_kwargs={f"k{i}": [i] * 100 for i in range(1000)}),
        chat(n=4, top_logprobs=20, logprobs=True, max_tokens=64),
        ("/v1/messages", {"messages": [{"role": "user", "content": words(MIB)}], "max_tokens": 1}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 5000}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "keep_alive": 18446744073709549568}),
        ("/infill", {"input_prefix": words(MIB), "input_suffix": words(MIB)}),
        ("/lora-adapters", [{"id": 0, "scale": 1e300}]),
        ("/models/unload", {"model": "x"}),
        ("/slots/0?action=erase", {}),
    ]


def as_bytes(body):
    return body if isinstance(body, bytes) else json.dumps(body).encode()


class Load:
    def __init__(self, arguments):
        self.arguments = arguments
        self.address = "127.0.0.1"
        self.faults = []
        self.times = []
        self.lock = threading.Lock()
        # Hostile clients are processes of their own, so that the interpreter lock does not slow the
        # honest ones.
        self.stop = FORK.Event()
        self.reports = FORK.SimpleQueue()
        self.statuses = collections.Counter()

    def start(self):
        def limits():
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            bytes = self.arguments.memory * MIB
            resource.setrlimit(resource.RLIMIT_AS, (bytes, bytes))

        flags = ["serve", "--port", "0", "-c", "2048", "--parallel", "4", "--api-key", "honest,hostile",
                 "--admin-key", "admin"]
        if self.arguments.request_memory:
            flags += ["--request-memory", str(self.arguments.request_memory)]
        if self.arguments.model:
            flags += ["-m", self.arguments.model]
        self.server = subprocess.Popen([self.arguments.program, *flags], stderr=subprocess.PIPE, text=True,
                                       preexec_fn=limits)
        self.said = []
        for line in self.server.stderr:
            self.said.append(line)
            if " served at " in line:
                self.port = int(line.rsplit(":", 1)[1].strip().strip("/"))
                break
        else:
            sys.exit("the server did not start:\n" + "".join(self.said))
        threading.Thread(target=lambda: self.said.extend(self.server.stderr), daemon=True).start()

    def memory(self):
        """Returns MiB of address space and of memory in use, at most so far."""
        try:
            with open(f"/proc/{self.server.pid}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
        except OSError:
            return 0, 0
        return tuple(int(fields.get(name, "0").split()[0]) // 1024 for name in ("VmPeak", "VmHWM"))

    def connect(self, timeout=PATIENCE):
        return socket.create_connection(("127.0.0.1", self.port), timeout, (self.address, 0))

    def send(self, path, body, key, timeout=PATIENCE):
        """Sends a request and returns its status, 0 if the connection ended, and the answer."""
        head = (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Api-Key: {key}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n")
        with self.connect(timeout) as stream:
            try:
                stream.sendall(head.encode())
                stream.sendall(body)
            except OSError:
                pass  # A server that has seen enough may close.
            answer = stream.recv(1 << 16)
            while part := stream.recv(1 << 16):
                answer = (answer + part)[:1 << 16]
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0, answer

    def honest(self, count):
        body = as_bytes(HONEST)
        for _ in range(count):
            start = time.monotonic()
            answer = b""
            try:
                status, answer = self.send("/completion", body, "honest")
            except OSError as error:
                status = repr(error)
            with self.lock:
                self.times.append(time.monotonic() - start)
                if status != 200:
                    self.faults.append(f"an honest request: {status} {answer.partition(END)[2][:200]}")

    def honest_times(self, count):
        """Has the honest clients ask so often each, and returns the times of their answers, sorted."""
        self.times = []
        clients = [threading.Thread(target=self.honest, args=(count,)) for _ in range(self.arguments.clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return sorted(self.times)

    def be_elsewhere(self):
        """Gives this process another address and the lowest priority, as if it ran elsewhere."""
        self.address = "127.0.0.2"
        os.nice(19)

    def hostile(self, seed, count):
        self.be_elsewhere()
        random_numbers = random.Random(seed)
        for _ in range(count):
            if self.stop.is_set():
                return
            path, body = random_numbers.choice(self.kinds)
            try:
                # Some leave before they have an answer.
                patience = 0.5 if random_numbers.random() < 0.3 else PATIENCE
                status, _ = self.send(path, body, "hostile", patience)
            except OSError as error:
                status = type(error).__name__
            self.reports.put(status)

    def open_connection(self, random_numbers):
        key = "X-Api-Key: hostile\r\n"
        post = f"POST /completion HTTP/1.1\r\nHost: localhost\r\n{key}"
        stream = json.dumps({"prompt": "a", "n_predict": -1, "stream": True, "n_probs": 100, "ignore_eos": True})
        parts = [
            "",
            "G",
            "GET / HTTP/1.1\r\nX: " + "a" * 60_000,
            post + "Content-Length: 1000000\r\n\r\n" + " " * 900_000,
            post + "Content-Length: 100\r\n\r\n{",
            post + "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
            post + f"Content-Length: {len(stream)}\r\n\r\n{stream}",
            "\x16\x03\x01\x02\x00",
            "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
        connection = self.connect()
        if random_numbers.random() < 0.1:
            # Ends with a reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            connection.settimeout(2)
            connection.sendall(random_numbers.choice(parts).encode("latin-1"))
        except OSError:
            pass
        return connection

    def connections(self, seed, count):
        self.be_elsewhere()
        random_numbers = random.Random(seed)
        held = collections.deque()
        for _ in range(count):
            if self.stop.is_set():
                break
            try:
                held.append(self.open_connection(random_numbers))
                self.reports.put("connections")
            except OSError as error:
                self.reports.put("connection " + type(error).__name__)
            if len(held) > 150:
                held.popleft().close()
        while not self.stop.is_set():
            time.sleep(0.1)
        for connection in held:
            connection.close()

    def read_reports(self):
        while not self.reports.empty():
            self.statuses[self.reports.get()] += 1

    def run(self):
        arguments = self.arguments
        self.start()
        quiet = self.honest_times(4)
        print(f"quiet: median {quiet[len(quiet) // 2]:.2f} s, longest {quiet[-1]:.2f} s, "
              f"address space and memory {self.memory()} MiB", flush=True)
        self.kinds = [(path, as_bytes(body)) for path, body in kinds()]
        if arguments.kinds:
            self.kinds = [self.kinds[int(number)] for number in arguments.kinds.split(",")]
        count = max(1, arguments.requests // SENDERS)
        senders = [FORK.Process(target=self.hostile, args=(arguments.seed + i, count), daemon=True)
                   for i in range(SENDERS)]
        count = arguments.connections // 2
        holders = [FORK.Process(target=self.connections, args=(1000 + i, count), daemon=True)
                   for i in range(2)]
        for process in senders + holders:
            process.start()
        loud = []
        while any(process.is_alive() for process in senders) and self.server.poll() is None:
            times = self.honest_times(1)
            loud += times
            self.read_reports()
            done = sum(count for status, count in self.statuses.items() if "connection" not in str(status))
            print(f"\r{done} hostile requests, {len(loud)} honest ones, longest of the last {times[-1]:.2f} s ",
                  end="", file=sys.stderr, flush=True)
        self.stop.set()
        while any(process.is_alive() for process in senders + holders):
            # Their reports would fill the pipe.
            self.read_reports()
            time.sleep(0.1)
        self.read_reports()
        print(file=sys.stderr)
        loud.sort()
        print(f"beside {dict(self.statuses)}:")
        print(f"  {len(loud)} honest requests, median {loud[len(loud) // 2]:.2f} s, longest {loud[-1]:.2f} s, "
              f"address space and memory {self.memory()} MiB")
        if self.server.poll() is not None:
            self.faults.append(f"the server ended with {self.server.returncode}")
        elif loud[-1] > 5 * quiet[-1]:
            self.faults.append(f"an honest request took {loud[-1] / quiet[-1]:.1f} times the longest quiet time")
        self.server.send_signal(signal.SIGTERM)
        try:
            self.server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.faults.append("SIGTERM does not end it")
            self.server.kill()
        panics = [line for line in self.said if "panicked" in line]
        if panics or self.faults:
            counted = collections.Counter(self.faults + panics)
            sys.exit("".join(f"{count} times: {fault}\n" for fault, count in counted.most_common(20))
                     + "".join(self.said[-10:]))
        print("every honest request was answered in time")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--memory", type=int, default=1024)
    parser.add_argument("--request-memory", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help="only these kinds of requests, as numbers from 0: 3,5,8")
    Load(parser.parse_args()).run()


if __name__ == "__main__":
    main()
