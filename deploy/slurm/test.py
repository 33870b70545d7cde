#!/usr/bin/env python3
"""Runs tensor.sbatch and serve.sbatch in a throw-away Slurm cluster on this machine.

    test.py --samite target/release/samite -m model.gguf [--requests N] [-- --chat-template chatml]

Flags after `--` go to `samite serve`. Needs root and Debian's packages munge, slurmctld, slurmd,
slurm-client, openmpi-bin and libpmix-dev, but no systemd. The cluster has its own key, ports and
temporary folder, listens on the loopback, and is gone afterwards.
"""

import argparse
import http.client
import json
import os
import queue
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from testing import Check, free_port

HERE = Path(__file__).resolve().parent
CLIENTS = 8
SERVERS = 3
# The guard against hangs, in seconds.
GUARD = 120
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


check = Check()


def wait_for(what, holds, log=None):
    begin = time.monotonic()
    while not holds():
        if time.monotonic() - begin > GUARD:
            raise SystemExit(
                f"{what}: not so after {GUARD} s" + (f"\n{log.read_text()[-4000:]}" if log else "")
            )
        time.sleep(0.1)
    return time.monotonic() - begin


class Cluster:
    """One node. Daemons are children of this process, so that their ends are known."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", "spool"):
            (folder / name).mkdir()
        host = socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(
            CONFIG.format(host=host, folder=folder, controller=free_port(), node=free_port())
        )
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)

    def __enter__(self):
        munge = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={self.folder}/munge.key",
        ]
        self.start(
            *munge,
            *(f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "seed", "log")),
        )
        wait_for("munge", (self.folder / "munge.socket").exists)
        self.start("slurmctld", "-D")
        self.start("slurmd", "-D")
        wait_for(
            "an idle node",
            lambda: self.query("sinfo", "-h", "-o", "%T") == "idle",
            self.folder / "slurmd.log",
        )
        return self

    def __exit__(self, *_):
        """Ends jobs that a failed test left, then daemons in the reverse order."""
        self.query("scancel", "--me")
        try:
            wait_for("the end of all jobs", lambda: not self.query("squeue", "-h"))
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def start(self, *command):
        with (self.folder / f"{command[0]}.log").open("w") as log:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            )

    def query(self, *command):
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip() or done.stderr.strip()

    def submit(self, *command, **variables):
        command = [
            "sbatch",
            "--parsable",
            f"--output={self.folder}/%A_%a.log",
            f"--chdir={self.folder}",
            *command,
        ]
        done = subprocess.run(
            command, env={**self.environment, **variables}, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        return done.stdout.strip()

    def states(self, job):
        """Returns the number of tasks by state. Ended ones are forgotten after five minutes."""
        return Counter(
            line.split("=")[1]
            for line in self.query("scontrol", "show", "job", job).split()
            if line.startswith("JobState=")
        )

    def log(self, job, task=None):
        name = f"{job}_{4294967294 if task is None else task}.log"
        path = self.folder / name
        return path.read_text() if path.exists() else ""


class Router:
    """Client that picks a registered server, and another one if that fails before its answer."""

    def __init__(self, folder):
        self.folder, self.retries = folder, 0

    def servers(self):
        return [(path.read_text().strip(), path) for path in self.folder.glob("*-*[0-9]")]

    def ask(self, body):
        begin = time.monotonic()
        while time.monotonic() - begin < GUARD:
            try:
                server, _ = random.choice(self.servers())
                return self.try_one(server, body)
            except (OSError, http.client.HTTPException, IndexError):
                self.retries += 1
                time.sleep(0.05)
        raise SystemExit(f"{self.folder}: no server answered for {GUARD} s")

    def try_one(self, server, body):
        """Returns the text. The connection ends without an answer if the server is killed."""
        connection = http.client.HTTPConnection(server, timeout=GUARD)
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            answer = json.loads(response.read())
            # A server that drains says so with 503.
            if response.status == 503:
                raise ConnectionRefusedError
            return answer["choices"][0]["message"]["content"]
        finally:
            connection.close()

    def is_ready(self, server):
        try:
            connection = http.client.HTTPConnection(server, timeout=5)
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False


def body(number, tokens=12):
    messages = [{"role": "user", "content": f"Once upon a time there were {number % 40} birds."}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def tensor(cluster, samite, model):
    """Compares the text of two MPI processes in Slurm with that of one process."""
    command = ["-m", model, "-p", "Once upon a time", "-n", "40", "--temp", "0", "-t", "1"]
    alone = subprocess.run(
        [samite, "run", *command], capture_output=True, text=True, check=True
    ).stdout
    flags = [*command, "--split-anyway", "--communicator"]
    for communicator in ("auto", "mpi"):
        begin = time.monotonic()
        job = cluster.submit(
            "-n", "2", str(HERE / "tensor.sbatch"), *flags, communicator, SAMITE=samite
        )
        wait_for(
            "the end of tensor.sbatch",
            lambda: cluster.states(job)["COMPLETED"] + cluster.states(job)["FAILED"],
        )
        seconds = time.monotonic() - begin
        log, (state,) = cluster.log(job), cluster.states(job)
        check(
            state == "COMPLETED" and alone.strip() in log,
            f"tensor.sbatch, --communicator {communicator}: {state} after {seconds:.1f} s",
        )
        if check.failed:
            print(f"alone: {alone}\n{log}")


def serve(cluster, samite, model, flags, count):
    servers = cluster.folder / "servers"
    begin = time.monotonic()
    command = [
        str(HERE / "serve.sbatch"),
        "-m",
        model,
        "--parallel",
        "4",
        "-t",
        "1",
        "-c",
        "8192",
        "--context-shift",
        *flags,
    ]
    job = cluster.submit(
        f"--array=0-{SERVERS - 1}", *command, SAMITE=samite, SERVERS=str(servers), SAMITE_HOST="127.0.0.1"
    )
    router = Router(servers)
    ready = lambda: sum(router.is_ready(server) for server, _ in router.servers())
    wait_for("registered servers", lambda: ready() == SERVERS, cluster.folder / "slurmd.log")
    print(
        f"{SERVERS} servers are registered after {time.monotonic() - begin:.1f} s:",
        *sorted(server for server, _ in router.servers()),
    )

    numbers, texts, kept = queue.SimpleQueue(), {}, Counter()
    for number in range(count):
        numbers.put(number)

    def client():
        while not numbers.empty():
            number = numbers.get()
            text = router.ask(body(number))
            kept["done"] += 1
            kept["different"] += texts.setdefault(number % 40, text) != text
            if number == count // 2:
                cluster.query("scancel", "--signal=KILL", "--full", f"{job}_0")

    begin = time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    check(
        kept["done"] == count,
        f"a task killed: {kept['done']} of {count} answers in {seconds:.1f} s, "
        f"{router.retries} retries",
    )
    # Batches decide between two tokens that are almost equally likely.
    check(
        kept["different"] <= count // 100,
        f"{kept['different']} texts differ from the first answer to the same request",
    )
    check(
        ready() == SERVERS - 1,
        f"{ready()} of {SERVERS} servers are left, {len(router.servers())} files",
    )
    for server, path in router.servers():
        if not router.is_ready(server):
            path.unlink()
    for task, flags in ((1, ["--signal=TERM", "--batch"]), (2, [])):
        stop(cluster, router, f"{job}_{task}", flags)
    states = dict(cluster.states(job))
    check(
        states == {"CANCELLED": 2, "COMPLETED": 1} and not router.servers(),
        f"tasks {states}, {len(router.servers())} files",
    )


def stop(cluster, router, task, flags):
    """Stops a server while it computes a long answer."""
    (server,) = (server for server, path in router.servers() if path.name == task.replace("_", "-"))
    answers = []
    long = threading.Thread(target=lambda: answers.append(router.try_one(server, body(0, 4000))))
    long.start()
    time.sleep(0.3)
    begin = time.monotonic()
    cluster.query("scancel", *flags, task)
    long.join()
    wait_for(
        "the end of serve.sbatch",
        lambda: not cluster.states(task)["RUNNING"] + cluster.states(task)["COMPLETING"],
    )
    size = len(answers[0]) if answers else 0
    check(
        size > 4000,
        f"{' '.join(['scancel', *flags])}: ended in {time.monotonic() - begin:.1f} s, "
        f"the answer in flight has {size} characters",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samite", required=True)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    samite, model = str(Path(args.samite).resolve()), str(Path(args.model).resolve())
    with tempfile.TemporaryDirectory() as folder:
        with Cluster(Path(folder)) as cluster:
            tensor(cluster, samite, model)
            serve(cluster, samite, model, args.flags, args.requests)
        left = subprocess.run(
            ["pgrep", "-f", folder], capture_output=True, text=True
        ).stdout.split()
    check(not left, f"{len(left)} processes are left")
    sys.exit(bool(check.failed))


if __name__ == "__main__":
    main()
