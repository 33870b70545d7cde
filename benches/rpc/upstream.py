"""samite and upstream's programs over ggml's RPC protocol, both ways, and how fast either server is.

    upstream.py SAMITE LLAMA_CPP_BIN MODEL [--pairs 7] [--only programs|ops|conformance|models|speed] [--op NAME] [--alone]

LLAMA_CPP_BIN has ggml-rpc-server, llama-bench, llama-completion, llama-server and test-backend-ops, with -DGGML_RPC=ON and -DLLAMA_BUILD_TESTS=ON, from
the source in the sdist of llama-cpp-python 0.3.36 (`pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36`). MODEL is a GGUF file.

    programs     llama-bench, llama-completion and llama-server run on `samite rpc-server`; llama-completion writes what it writes without a server
    ops          test-backend-ops compares every operation of either server with its own CPU backend (servers.c tells it of the server; needs cc)
    conformance  `samite dev test-ops` goes through ggml-rpc-server, and `samite run` writes what it writes on its CPU
    models       tiny models of every architecture write through ggml-rpc-server what they write on samite's CPU
    speed        llama-bench on both servers in turn, one thread each: medians, and the ratio samite / upstream of each pair
"""

import argparse
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

PROMPT = "Once upon a time"

# Names of tests that `test-backend-ops --list-ops` leaves out.
MORE = """ADD_ADD ADD_RMS_NORM CONV_1D_DW GELU_MUL L2_NORM_BATCH MOE_REDUCE MUL_MAT_HADAMARD MUL_MAT_ID_FUSION MUL_MAT_ID_W4A4 MUL_MAT_ID_W4A8 MUL_MAT_W4A4
MUL_MAT_W4A8 NORM_MUL_ADD NORM_SCALE RELU_SQR RMS_NORM_MUL_ADD RMS_NORM_MUL_ROPE RMS_NORM_SCALE ROPE_SET_ROWS SIGMOID_MUL SILU_MUL SOFTCAP SOFTPLUS_MUL
TOPK_MOE TOPK_QSA""".split()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A server on the loopback, which must still be there at the end."""

    def __init__(self, command, port, log=subprocess.DEVNULL, may_end=False):
        self.place = f"127.0.0.1:{port}"
        self.may_end = may_end
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        sys.exit(f"{command[0]} does not listen")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is not None and not self.may_end:
            sys.exit(f"the server ended by itself: {self.process.returncode}")
        self.process.kill()
        self.process.wait()


class Both:
    def __init__(self, arguments):
        self.samite = arguments.samite
        self.folder = pathlib.Path(arguments.llama_cpp_bin)
        self.model = arguments.model
        self.pairs = arguments.pairs
        self.op = arguments.op
        self.is_alone = arguments.alone

    def program(self, name):
        return str(self.folder / name)

    def ours(self, log=subprocess.DEVNULL):
        port = free_port()
        return Server([self.samite, "rpc-server", "--protocol", "7", "--device", "cpu", "-t", "1", "--port", str(port)], port, log)

    def theirs(self, log=subprocess.DEVNULL):
        port = free_port()
        # What it cannot compute ends it.
        return Server([self.program("ggml-rpc-server"), "-d", "CPU", "-t", "1", "-p", str(port)], port, log, may_end=True)

    def run(self, command, environment=None, timeout=3600):
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, errors="replace",
                              env={**os.environ, **(environment or {})})
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return done.stdout

    def bench(self, place, flags=("-p", "128", "-n", "64")):
        out = self.run([self.program("llama-bench"), "-m", self.model, "--rpc", place, "-dev", "RPC0", "-ngl", "99", "-t", "1", "-r", "1", "-o", "json", *flags])
        return {f"{row['n_prompt']}+{row['n_gen']}": row["avg_ts"] for row in json.loads(out)}

    def completion(self, flags):
        return self.run([self.program("llama-completion"), "-m", self.model, "-p", PROMPT, "-n", "48", "--temp", "0", "-t", "1", "-no-cnv", *flags])

    def programs(self):
        alone = self.completion(["-ngl", "0"])
        with self.ours() as server:
            for flash in ["0", "1"]:
                print("llama-bench -fa", flash, self.bench(server.place, ["-p", "16", "-n", "8", "-fa", flash]))
            text = self.completion(["--rpc", server.place, "-dev", "RPC0", "-ngl", "99"])
            print("llama-completion:", "the same text" if text == alone else f"ANOTHER TEXT: {text!r} instead of {alone!r}")
            port = free_port()
            command = [self.program("llama-server"), "-m", self.model, "--rpc", server.place, "-dev", "RPC0", "-ngl", "99", "-t", "1", "--port", str(port), "--no-webui"]
            with Server(command, port):
                body = json.dumps({"prompt": PROMPT, "n_predict": 32, "temperature": 0}).encode()
                for _ in range(600):
                    try:
                        with urllib.request.urlopen(f"http://127.0.0.1:{port}/completion", body, timeout=120) as answer:
                            print("llama-server:", len(json.load(answer)["content"]), "characters")
                            break
                    except urllib.error.HTTPError as error:
                        if error.code != 503:
                            raise
                        time.sleep(0.1)

    def ops(self):
        names = self.run([self.program("test-backend-ops"), "--list-ops"]).split("(")[-1]
        names = [name for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", names) if name != "GGML"] + MORE
        if self.op:
            names = [name for name in names if re.fullmatch(self.op, name)]
        passed, without, tests = 0, 0, 0
        with tempfile.TemporaryDirectory() as folder:
            library = f"{folder}/servers.so"
            self.run(["cc", "-shared", "-fPIC", "-o", library, str(pathlib.Path(__file__).with_name("servers.c"))])
            print(f"{'operation':28} {'samite rpc-server':34} ggml-rpc-server")
            for name in names:
                fine, ours, log = self.op_on(self.ours, name, library)
                theirs = "" if self.is_alone else self.op_on(self.theirs, name, library)[1]
                print(f"{name:28} {ours:34} {theirs}", flush=True)
                for line in log:
                    print(f"    {line[:200]}", flush=True)
                tests += fine
                if ours.endswith("OK"):
                    passed += 1
                if ours == "no tests":
                    without += 1
        print(f"test-backend-ops: all tests of {passed} names pass, {without} have none, {len(names) - passed - without} do not; {tests} tests pass")

    def op_on(self, serve, name, library):
        """Tests of one operation on a server of its own, in a program of its own: a server that refuses something ends that program."""
        with tempfile.TemporaryFile("w+") as log, serve(log) as server:
            environment = {**os.environ, "LD_PRELOAD": library, "GGML_RPC_SERVER": server.place}
            command = [self.program("test-backend-ops"), "test", "-b", "RPC0", "-o", name]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, stdin=subprocess.DEVNULL)
            lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()]
            # A test is named with its parameters: "SUM(type=f32,ne=[33,1,1,1]): OK"; the line of a failure begins with the error.
            failed = [line for line in lines if line.endswith("): FAIL")]
            fine = sum(line.endswith("): OK") for line in lines)
            log.seek(0)
            reasons = [line for line in log if "is closed" in line] + failed[:3]
            if done.returncode == 0:
                return fine, f"{fine} OK" if fine else "no tests", []
            if failed:
                return fine, f"{fine} OK, {len(failed)} fail", reasons
            return fine, f"{fine} OK, then the connection ends", reasons

    def conformance(self):
        with self.theirs() as server:
            done = subprocess.run([self.samite, "test-ops", "--device", "RPC0", "--rpc", server.place], capture_output=True, text=True)
            failed = [line.strip() for line in done.stdout.splitlines() if line.startswith("FAILED")]
            print(f"samite dev test-ops: exit code {done.returncode}, {len(failed)} fail", *(line[:200] for line in failed[:12]), sep="\n  ")
            print(*(line for line in done.stdout.splitlines() if line.startswith(("RPC0", "all"))), sep="\n")
            write = [self.samite, "run", "-m", self.model, "-p", PROMPT, "-n", "48", "--temp", "0", "-t", "1"]
            here = self.run([*write, "--device", "cpu"])
            there = self.run([*write, "--rpc", server.place, "--device", "RPC0,cpu"])
            print("samite run:", "the same text" if here == there else f"ANOTHER TEXT: {there!r} instead of {here!r}")

    def models(self):
        """A tiny model of every architecture says through ggml-rpc-server what it says on the CPU."""
        lines = pathlib.Path(__file__).parents[2].joinpath("docs/models.md").read_text().split("Of llama.cpp's architectures")[0].splitlines()
        rows = [line for line in lines if line.startswith("| ") and "`, `" in line]
        same, other = 0, []
        with tempfile.TemporaryDirectory() as folder, self.theirs() as server:
            for row in rows:
                kind, names = row.split("|")[1:3]
                for name in re.findall(r"`([^`]+)`", names):
                    model = f"{folder}/{name}.gguf"
                    self.run([self.samite, "synth", model, "--arch", name, "--type", "f32"])
                    try:
                        is_same = self.says_the_same(kind, model, server.place)
                    except SystemExit as error:
                        is_same, _ = False, print(error)
                    same += is_same
                    other += [] if is_same else [name]
                    os.remove(model)
        print(f"models: {same} of {same + len(other)} architectures say the same through ggml-rpc-server", *other)

    def says_the_same(self, kind, model, place):
        here, there = ["--device", "cpu"], ["--rpc", place, "--device", "RPC0,cpu"]
        if "Encoders" in kind:
            numbers = [[float(word) for word in self.run([self.samite, "embed", "-m", model, "-t", "1", *where, PROMPT]).split()] for where in (here, there)]
            # ggml's table behind GELU has 16 bits.
            error = sum((a - b) ** 2 for a, b in zip(*numbers, strict=True)) / sum(a * a for a in numbers[0])
            return error < 1e-5
        if "Diffusion" in kind:
            texts = [self.run([self.samite, "logits", "-m", model, "-p", PROMPT, "-t", "1", *where]) for where in (here, there)]
            # The likeliest tokens of each place, without their logits.
            return re.sub(r"[0-9.]+ *%? +[0-9.-]+", "", texts[0]) == re.sub(r"[0-9.]+ *%? +[0-9.-]+", "", texts[1])
        texts = [self.run([self.samite, "run", "-m", model, "-p", PROMPT, "-n", "24", "--temp", "0", "-t", "1", *where]) for where in (here, there)]
        return texts[0] == texts[1]

    def speed(self):
        figures = {}
        with self.ours() as ours, self.theirs() as theirs:
            for server in [ours, theirs]:
                self.bench(server.place, ["-p", "16", "-n", "4"])
            for pair in range(self.pairs):
                order = [("samite", ours), ("upstream", theirs)]
                for name, server in order if pair % 2 == 0 else order[::-1]:
                    for row, speed in self.bench(server.place).items():
                        figures.setdefault(row, {}).setdefault(name, []).append(speed)
        for row, speeds in figures.items():
            mine, others = speeds["samite"], speeds["upstream"]
            ratios = [a / b for a, b in zip(mine, others)]
            print(f"{row}: samite {statistics.median(mine):.1f}, upstream {statistics.median(others):.1f} tokens/s; "
                  f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {len(ratios)} pairs")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samite")
    parser.add_argument("llama_cpp_bin")
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--op", help="only operations whose name this regular expression matches")
    parser.add_argument("--alone", action="store_true", help="operations on samite's server only")
    parser.add_argument("--only", choices=["programs", "ops", "conformance", "models", "speed"])
    arguments = parser.parse_args()
    both = Both(arguments)
    for name in [arguments.only] if arguments.only else ["programs", "ops", "conformance", "models", "speed"]:
        getattr(both, name)()


if __name__ == "__main__":
    main()
