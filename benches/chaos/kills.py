"""Kills `samite remote-server` or its client at random moments, again and again: a text comes out as it does here, or one line that says what happened.

Usage: kills.py PROGRAM [--rounds N] [--seed N] [--tokens N] [--model FILE]

In each round, a client writes a text on the server's CPU device while one of the two is killed (SIGKILL) at a random moment, and started again: a server at once,
at the same port, a client when the round is over. A client that was not killed must end with the same text, or with an exit code other than 0 and one line on
standard error; one that was killed must write the text when it is started again. Whoever takes longer than two minutes hangs, and whoever is ended by another signal,
or panics, has crashed; both count as failures. Needs Linux and Python's own library only.
"""

import argparse
import collections
import random
import signal
import subprocess
import sys
import tempfile
import time

PATIENCE = 120


class Rounds:
    def __init__(self, arguments, folder):
        self.arguments = arguments
        self.folder = folder
        self.port = "0"
        self.address = None
        self.server = None
        self.random = random.Random(arguments.seed)
        self.counts = collections.Counter()
        self.lines = collections.Counter()
        self.failures = []

    def start_server(self):
        for _ in range(50):
            self.server = subprocess.Popen(
                [self.arguments.program, "remote-server", "--device", "cpu", "-t", "1", "--port", self.port, "--sessions", "256",
                 "--sessions-per-token", "256", "--key", f"{self.folder}/key", "--tokens", f"{self.folder}/tokens", "--store", f"{self.folder}/store"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for line in self.server.stdout:
                if line.startswith("listening at "):
                    self.address = line.removeprefix("listening at ").strip()
                    self.port = self.address.split("#")[0].rsplit(":", 1)[1]
                    return
            self.server.wait()
            time.sleep(0.1)
        sys.exit("the server does not start")

    def start_client(self, device):
        arguments = self.arguments
        command = [arguments.program, "run", "-p", "Once upon a time", "--temp", "0", "-t", "1", "-n", str(arguments.tokens), "--device", device]
        if arguments.model:
            command += ["-m", arguments.model]
        if device != "cpu":
            command += ["--remote", self.address, "--remote-token", f"{self.folder}/tokens"]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, client):
        """What became of a client: its exit code, text and lines of errors; None if it hangs."""
        try:
            text, errors = client.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            client.kill()
            client.communicate()
            return None
        lines = [line for line in errors.splitlines() if line.startswith("error")]
        return client.returncode, text, lines, errors

    def fail(self, number, what):
        self.counts["failure"] += 1
        self.failures.append(f"round {number}: {what}")
        print(self.failures[-1], flush=True)

    def judge(self, number, end, expected, name):
        """Judges a client that was not killed."""
        if end is None:
            return self.fail(number, f"{name} hangs")
        code, text, lines, errors = end
        if code < 0 or code >= 100 or "panicked" in errors:
            return self.fail(number, f"{name} crashed ({code}): {errors[-400:]}")
        if code == 0 and text == expected:
            self.counts[f"{name}: the same text"] += 1
        elif code == 0:
            self.fail(number, f"{name} writes another text: {text!r}")
        elif len(lines) != 1:
            self.fail(number, f"{name} ends with {len(lines)} lines: {errors[-400:]}")
        else:
            self.counts[f"{name}: one line"] += 1
            self.lines[lines[0].replace(self.port, "PORT")] += 1

    def play(self):
        arguments = self.arguments
        self.start_server()
        expected = self.finish(self.start_client("cpu"))[1]
        start = time.monotonic()
        code, text, _, errors = self.finish(self.start_client("remote0"))
        longest = time.monotonic() - start
        assert code == 0 and text == expected and len(text) > 20, errors
        for number in range(arguments.rounds):
            client = self.start_client("remote0")
            time.sleep(self.random.uniform(0, 1.1 * longest))
            kills_server = self.random.random() < 0.7
            victim = self.server if kills_server else client
            victim.send_signal(signal.SIGKILL)
            if kills_server:
                self.server.wait()
                self.start_server()
                self.judge(number, self.finish(client), expected, "server killed")
            else:
                end = self.finish(client)
                if end is not None and end[0] == -signal.SIGKILL:
                    self.counts["client killed"] += 1
                    self.judge(number, self.finish(self.start_client("remote0")), expected, "client started again")
                else:
                    self.judge(number, end, expected, "client done before it was killed")
            if self.server.poll() is not None:
                self.fail(number, f"the server ended by itself ({self.server.returncode})")
                self.start_server()
            if (number + 1) % 50 == 0:
                print(number + 1, dict(self.counts), flush=True)
        self.server.kill()
        for line, count in self.lines.most_common():
            print(f"{count:5} {line}")
        print(f"{arguments.rounds} rounds:", dict(self.counts))
        return bool(self.failures)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(Rounds(arguments, folder).play())


if __name__ == "__main__":
    main()
