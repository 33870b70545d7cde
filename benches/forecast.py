#!/usr/bin/env python3
"""Compares what `samite plan --simulate` foretells with what is measured on this machine, which needs two cores.

    forecast.py measure PART --samite PROGRAM --models FOLDER --out FOLDER
    forecast.py compare --samite PROGRAM --models FOLDER --out FOLDER
    forecast.py nodes --samite PROGRAM --models FOLDER --out FOLDER

Parts, each of which takes one to three minutes on an idle machine: rates, pings, threads, rpc, remote, shaped, mpi.
`rates` (speeds of single operations) and `pings` (the model that is part of the program, over each kind of link) make the
machines' file. The others measure other models, which `samite dev synth` makes (FOLDER/SHAPE.TYPE.gguf); nothing of what they
measure goes into the file. `compare` writes a machines' file for each case to OUT, asks the program, and prints a table. `nodes`
prints what is foretold for 8 to 64 machines of each file in benches/machines.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PROMPT, TOKENS = 128, 24
PROMPT_TEXT = "Once upon a time there was a little girl who had a red ball. " * 12
CORES = ["cpu:cores=0", "cpu:cores=1"]
STORIES = "stories"

# By part: kind of link, model.
CASES = {
    "threads": [("one core", "100m.q4_0"), ("one core", "qwen3-0.6b.q4_0"), ("two threads", "tinyllama-1.1b.q4_0"), ("threads", "100m.q4_0"), ("threads", "100m.f16"), ("threads", "qwen3-0.6b.q4_0"),
                ("threads", "tinyllama-1.1b.q4_0"), ("layers", "tinyllama-1.1b.q4_0"), ("layers", "100m.f16")],
    "rpc": [("rpc", "100m.q4_0"), ("rpc", "100m.f16"), ("rpc", "qwen3-0.6b.q4_0"), ("rpc", "qwen3-0.6b.f16")],
    "remote": [("remote", "100m.q4_0"), ("remote", "100m.f16"), ("remote", "qwen3-0.6b.q4_0"), ("remote", "tinyllama-1.1b.q4_0")],
    "shaped": [("rpc, 2 ms, 50 MB/s", "100m.q4_0"), ("rpc, 2 ms, 50 MB/s", "qwen3-0.6b.q4_0"), ("remote, 5 ms, 20 MB/s", "100m.q4_0"), ("remote, 5 ms, 20 MB/s", "qwen3-0.6b.f16")],
    "mpi": [(f"mpi {kind}", model) for kind in ("openmpi", "mpich") for model in ("100m.q4_0", "qwen3-0.6b.q4_0", "tinyllama-1.1b.q4_0")],
}
PINGS = [("one core", STORIES), ("two threads", STORIES), ("threads", STORIES), ("rpc", STORIES), ("remote", STORIES), ("mpi openmpi", STORIES), ("mpi mpich", STORIES)]


def shape_of(kind):
    """Latency in seconds and bytes per second of a shaped link."""
    found = re.search(r", (\d+) ms, (\d+) MB/s", kind)
    return (int(found[1]) / 1e3, int(found[2]) * 1e6) if found else None


def halves(model, first, second):
    """Half of the layers on each device."""
    half = {"100m": 6, "tinyllama-1.1b": 11}[model.split(".q")[0].split(".f")[0]]
    return f"layers=0-{half - 1}:{first};layers={half}-:{second}"


class Proxy:
    """Passes connections on, later and no faster than told."""

    def __init__(self, port, latency, bandwidth):
        self.target, self.latency, self.bandwidth = port, latency, bandwidth
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.target))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for a, b in ((client, server), (server, client)):
                self.carry(a, b)

    def carry(self, a, b):
        queue, there = [], threading.Condition()

        def take():
            free = 0.0
            while True:
                try:
                    data = a.recv(1 << 16)
                except OSError:
                    data = b""
                # The wire is busy with what came before; then the bytes travel.
                free = max(free, time.perf_counter()) + len(data) / self.bandwidth
                with there:
                    queue.append((free + self.latency, data))
                    there.notify()
                if not data:
                    return

        def give():
            while True:
                with there:
                    while not queue:
                        there.wait()
                    at, data = queue.pop(0)
                wait = at - time.perf_counter()
                if wait > 0:
                    time.sleep(wait)
                try:
                    if not data:
                        b.shutdown(socket.SHUT_WR)
                        return
                    b.sendall(data)
                except OSError:
                    return

        for work in (take, give):
            threading.Thread(target=work, daemon=True).start()


class Server:
    """A server of the second core."""

    def __init__(self, args, kind):
        self.folder = tempfile.mkdtemp()
        env = dict(os.environ, XDG_CONFIG_HOME=self.folder, XDG_CACHE_HOME=self.folder, HOME=self.folder)
        command = ["taskset", "-c", "1", args.samite, f"{kind}-server", "--port", "0", "-t", "1", "--device", "cpu"]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.kind, self.seen = kind, ""
        for line in self.process.stdout:
            self.seen += line
            found = re.search(r"(?:samite://)?127\.0\.0\.1:(\d+)(#\w+)?", line)
            if found:
                self.port, self.key = int(found[1]), found[2] or ""
                break
        else:
            sys.exit(f"the {kind} server does not start:\n{self.seen}")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def flags(self, port):
        if self.kind == "rpc":
            return ["--device", "RPC0", "--rpc", f"127.0.0.1:{port}"]
        token = next(Path(self.folder).rglob("remote-token"))
        return ["--device", "remote0", "--remote", f"samite://127.0.0.1:{port}{self.key}", "--remote-token", str(token)]

    def end(self):
        self.process.terminate()
        self.process.wait()


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, **more)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-800:]}")
    return done


def model_flags(args, model):
    return [] if model == STORIES else ["-m", str(Path(args.models) / f"{model}.gguf")]


def bench(args, model, flags, cores="0", threads="1"):
    tokens = 200 if model == STORIES else TOKENS
    command = ["taskset", "-c", cores, args.samite, "bench", "--json", "--no-peaks", "-t", threads, "-r", "5", "-p", str(PROMPT), "-n", str(tokens)]
    found = json.loads(run(command + model_flags(args, model) + flags).stdout)
    return {("prompt" if row["test"].startswith("pp") else "generation"): row["median"] for row in found["results"]}


def ranks(args, kind, model):
    tokens = "200" if model == STORIES else "48"
    inner = [args.samite, "run", "-sm", "tensor", "--split-anyway", "--communicator", "mpi", "-t", "1", "-c", "512", "--temp", "0", "--ignore-eos", "-n", tokens, "-p", PROMPT_TEXT]
    found = {"generation": []}
    for _ in range(3):
        extra = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "core"] if kind == "openmpi" else ["-bind-to", "core"]
        done = run([f"mpirun.{kind}", *extra, "-np", "2", *inner, *model_flags(args, model)])
        said = re.search(r"prompt: (\d+) tokens.*generation: \d+ tokens, ([\d.]+) tokens/s", done.stdout + done.stderr)
        found["generation"].append(float(said[2]))
        found["before"] = int(said[1])
    found["generation"] = statistics.median(found["generation"])
    found["tokens"] = int(tokens)
    return found


def measured(args, kind, model):
    if kind == "one core":
        return bench(args, model, ["--device", "cpu"])
    if kind == "two threads":
        return bench(args, model, ["--device", "cpu"], "0,1", "2")
    if kind == "threads":
        return bench(args, model, ["--device", ",".join(CORES), "-sm", "tensor", "--split-anyway"], "0,1")
    if kind == "layers":
        return bench(args, model, ["--device", ",".join(CORES), "--place", halves(model, "cpu@0", "cpu@1")], "0,1")
    if kind.startswith("mpi"):
        return ranks(args, kind.split()[1], model)
    server = Server(args, kind.split(",")[0])
    try:
        port = server.port
        if shape_of(kind):
            port = Proxy(port, *shape_of(kind)).port
        return bench(args, model, server.flags(port))
    finally:
        server.end()


def rates(args):
    """Speeds of single operations: one core alone, both at once, one device of two threads."""
    command = [args.samite, "test-ops", "--perf", "--json", "--device", "cpu", "-o", "mul_mat,flash_attn_ext,add"]
    found = {"one": [json.loads(run(["taskset", "-c", "0", *command, "-t", "1"]).stdout)["cases"]]}
    pair = [subprocess.Popen(["taskset", "-c", core, *command, "-t", "1"], stdout=subprocess.PIPE, text=True) for core in "01"]
    found["both"] = [json.loads(each.communicate()[0])["cases"] for each in pair]
    found["two"] = [json.loads(run([*command, "-t", "2"]).stdout)["cases"]]
    # ggml's protocol knows no packed weights: other kernels.
    server = Server(args, "rpc")
    far = [args.samite, "test-ops", "--perf", "--json", *server.flags(server.port), *command[command.index("-o"):]]
    found["plain"] = [json.loads(run(["taskset", "-c", "0", *far, "-t", "1"]).stdout)["cases"]]
    server.end()
    return found


def measure(args):
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.part == "rates":
        found = rates(args)
    else:
        found = []
        for kind, model in PINGS if args.part == "pings" else CASES[args.part]:
            if kind.startswith("mpi") and subprocess.run(["which", f"mpirun.{kind.split()[1]}"], capture_output=True).returncode:
                continue
            found.append([kind, model, measured(args, kind, model)])
            print(found[-1], flush=True)
    # Passes add up: others on the machine take from some of them, so the best of each figure counts.
    path = out / f"{args.part}.json"
    passes = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps(passes + [found]))


def best(path):
    """The best of all passes of a part: the model's figures by kind of link and model."""
    found = {}
    for each in json.loads(path.read_text()) if path.exists() else []:
        for kind, model, figures in each:
            known = found.setdefault((kind, model), figures)
            for what in ("prompt", "generation"):
                if what in figures:
                    known[what] = max(known[what], figures[what])
    return found


def best_rates(path):
    """The shortest time of each operation."""
    passes = json.loads(path.read_text())
    found = passes[0]
    for each in passes[1:]:
        for of, devices in each.items():
            for known, cases in zip(found[of], devices):
                for a, b in zip(known, cases):
                    a["seconds"] = min(a["seconds"], b["seconds"])
    return found


def device(found, operation):
    """The rates of a device, from speeds of single operations; of several that ran at once, the mean."""
    def seconds(op, start):
        times = [case["seconds"] for cases in found for case in cases if case["op"] == op and case["case"].startswith(start)]
        return statistics.mean(times)

    def case(op, start):
        return next(case for case in found[0] if case["op"] == op and case["case"].startswith(start))

    types = {}
    for dtype in ["f32", "f16", "q4_0", "q8_0"]:
        one, many = f"{dtype} 4096x14336", f"{dtype} 4096x4096, 512"
        types[dtype] = {
            "read": case("mul_mat", one)["bytes"] / seconds("mul_mat", one),
            "products": case("mul_mat", many)["operations"] / 2 / seconds("mul_mat", many),
        }
    attention = "f16 512 keys"
    return {
        "memory": 16e9,
        "results": case("add", "f32 4096x512")["bytes"] / seconds("add", "f32 4096x512"),
        "attention": case("flash_attn_ext", attention)["operations"] / 2 / seconds("flash_attn_ext", attention),
        "operation": operation,
        "types": types,
    }


def toml(devices, links, host, machines, exchange):
    lines = []
    for name, rates in devices.items():
        lines.append(f"[devices.{name}]")
        lines += [f"{key} = {value:.4g}" for key, value in rates.items() if key != "types"]
        for dtype, of in rates["types"].items():
            lines += [f"[devices.{name}.types.{dtype}]"] + [f"{key} = {value:.4g}" for key, value in of.items()]
        lines.append("")
    for name, link in links.items():
        lines += [f"[links.{name}]"] + [f"{key} = {value:.4g}" for key, value in link.items()] + [""]
    lines += ["[host]", f'device = "{host}"', ""]
    for machine in machines:
        lines += ["[[machines]]"] + [f"{key} = {json.dumps(value)}" for key, value in machine.items()] + [""]
    if exchange:
        lines += ["[exchange]"] + [f"{key} = {json.dumps(value)}" for key, value in exchange.items()] + [""]
    return "\n".join(lines)


class Model:
    """Machines' files for the kinds of cases, with what was fitted."""

    def __init__(self, args):
        self.args = args
        self.out = Path(args.out)
        self.rates = best_rates(self.out / "rates.json")
        self.pings = {kind: found for (kind, _), found in best(self.out / "pings.json").items()}
        self.operation = {"one": 0.0, "both": 0.0, "two": 0.0, "plain": 0.0}
        self.message = {}
        # Seconds of an operation: what is left of a token of the small model, divided by their number.
        for of, kind in (("one", "one core"), ("two", "two threads")):
            self.operation[of] = self.fit(kind, lambda value: self.operation.__setitem__(of, value))
        self.operation["both"] = self.operation["plain"] = self.operation["one"]
        for kind in ("threads", "rpc", "remote", "mpi openmpi", "mpi mpich"):
            if kind in self.pings:
                self.message[kind] = self.fit(kind, lambda value: self.message.__setitem__(kind, value))

    def fit(self, kind, put):
        """The value for which a token of the small model takes as long as measured. Time grows evenly with it."""
        times = []
        for value in (0.0, 1e-3):
            put(value)
            times.append(1 / self.foretold(kind, STORIES, self.pings[kind])["generation"])
        goal = 1 / self.pings[kind]["generation"]
        value = max(0.0, (goal - times[0]) / (times[1] - times[0]) * 1e-3)
        put(value)
        return value

    def file(self, kind, model):
        devices = {name: device(self.rates[of], self.operation[of]) for name, of in (("core", "one"), ("core-of-two", "both"), ("two-cores", "two"), ("plain", "plain"))}
        links, machines, exchange, host, flags = {}, [], None, "core", []
        base = kind.split(",")[0]
        # Loopback: what a message takes was fitted; the bytes go through memory.
        link = {"latency": 0.0, "bandwidth": {"rpc": 2e9, "remote": 1e9}.get(base, 5e9), "message": self.message.get(base, 0.0)}
        if shape_of(kind):
            link["latency"], link["bandwidth"] = shape_of(kind)
        if kind == "one core":
            machines = [{"name": "core0", "device": "core"}]
        elif kind == "two threads":
            machines, host = [{"name": "cores", "device": "two-cores"}], "two-cores"
        elif kind == "layers":
            machines, flags = [{"name": "core", "device": "core", "count": 2}], ["--place", halves(model, "core0", "core1")]
        elif kind == "threads" or kind.startswith("mpi"):
            machines, flags = [{"name": "core", "device": "core-of-two", "count": 2}], ["-sm", "tensor"]
            links, exchange = {"memory": link}, {"link": "memory", "algorithm": "direct"}
        else:
            links = {"loopback": link}
            machines = [{"name": "server", "device": "plain" if base == "rpc" else "core", "through": base, "link": "loopback"}]
        return toml(devices, links, host, machines, exchange), flags

    def foretold(self, kind, model, found):
        text, flags = self.file(kind, model)
        path = self.out / (re.sub(r"[^a-z0-9]+", "-", kind) + ".toml")
        path.write_text(text)
        tokens = found.get("tokens", 200 if model == STORIES else TOKENS)
        # `bench` generates in an empty context, `run` behind its prompt.
        answers = {}
        for what, prompt, generated in (("prompt", PROMPT, 0), ("generation", found.get("before", 0), tokens)):
            command = [self.args.samite, "plan", "--json", "--simulate", str(path), "-p", str(prompt), "-n", str(generated)]
            said = json.loads(run(command + model_flags(self.args, model) + flags).stdout)
            answers[what] = said[what]["tokens_per_second"] if said[what] else 0.0
        return answers


def compare(args):
    model = Model(args)
    print("fitted: seconds of an operation " + ", ".join(f"{k} {v * 1e6:.2f} us" for k, v in model.operation.items()))
    print("fitted: an end of a message " + ", ".join(f"{k} {v * 1e6:.1f} us" for k, v in model.message.items()))
    print("\n| case | model | | measured, tokens/s | simulated | error |\n|---|---|---|---|---|---|")
    errors = []
    for part in CASES:
        for (kind, name), found in best(Path(args.out) / f"{part}.json").items():
            foretold = model.foretold(kind, name, found)
            for what in ("prompt", "generation"):
                if what in found:
                    error = foretold[what] / found[what] - 1
                    errors.append(abs(error))
                    print(f"| {kind} | {name} | {what} | {found[what]:.1f} | {foretold[what]:.1f} | {error:+.1%} |")
    print(f"\n{len(errors)} figures: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def nodes(args):
    """Tables for many machines. Headers of models are enough."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    ways = [
        ("layers", lambda n: ["-ts", ",".join("1" * n), "-ub", "128", "--copies", "4"], None),
        ("tensors, direct", lambda n: ["-sm", "tensor"], "direct"),
        ("tensors, doubling", lambda n: ["-sm", "tensor"], "doubling"),
        ("tensors, ring", lambda n: ["-sm", "tensor"], "ring"),
    ]
    for file in sorted((Path(__file__).parent / "machines").glob("*.toml")):
        print(f"\n{file.name}: tokens/s of the prompt / of generation; GiB of the fullest node\n")
        print("| model | split | 8 nodes | 16 | 32 | 64 |\n|---|---|---|---|---|---|")
        for shape in ("llama3-8b", "qwen3-30b-a3b", "llama3-70b"):
            header = out / f"{shape}.gguf"
            run([args.samite, "synth", "--shape", shape, "--type", "q4_0", "--header", str(header)])
            for name, flags, algorithm in ways:
                cells = []
                for n in (8, 16, 32, 64):
                    text = file.read_text().replace("count = 8", f"count = {n}")
                    if algorithm:
                        text = re.sub('algorithm = ".*"', f'algorithm = "{algorithm}"', text)
                    path = out / "nodes.toml"
                    path.write_text(text)
                    command = [args.samite, "plan", "--json", "-m", str(header), "--simulate", str(path), "-p", "2048", "-n", "128"]
                    done = subprocess.run(command + flags(n), capture_output=True, text=True, timeout=600)
                    if done.returncode:
                        cells.append(done.stderr.strip().splitlines()[-1][:60])
                        continue
                    said = json.loads(done.stdout)
                    sums = {}
                    for row in said["memory"]:
                        node = row["memory"].removesuffix("-packed")
                        sums[node] = sums.get(node, 0) + row["weights"] + row["kv"] + row["compute"]
                    most = max(bytes for node, bytes in sums.items() if node.startswith("node"))
                    cells.append(f"{said['prompt']['tokens_per_second']:.0f} / {said['generation']['tokens_per_second']:.1f}; {most / 2**30:.1f}")
                print(f"| {shape} | {name} | " + " | ".join(cells) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "compare", "nodes"])
    parser.add_argument("part", nargs="?", choices=["rates", "pings", *CASES])
    parser.add_argument("--samite", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    {"measure": measure, "compare": compare, "nodes": nodes}[args.what](args)


main()
