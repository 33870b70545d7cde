#!/usr/bin/env python3
"""Installs the chart in a cluster of one node on this machine, and sends requests there.

    cluster.py --kubernetes FOLDER --helm helm --samite target/release/samite -m model.gguf \\
        [--policies kube-router] [--logs FOLDER] [-- --chat-template chatml]

Needs root on Linux with cgroup v1, etcd, containerd, runc, CNI's plugins (/usr/lib/cni), iptables,
openssl and a C compiler. --kubernetes names a folder with kube-apiserver, kube-controller-manager,
kube-scheduler, kubelet and kube-proxy, of 1.30 or newer. samite needs the feature kv-events.
--policies names a program that enforces network policies and takes kube-router's flags; bridges
do not enforce any.

The node runs in namespaces of its own, which no packet leaves, and in its own cgroups. Nothing
stays. There is no DNS: clients use addresses, and send the service's names as Host.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import http.client
import io
import json
import os
import platform
import secrets
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from testing import Check

CHART = Path(__file__).resolve().parent / "samite"
# Names this process when it runs inside the namespaces.
INSIDE = "SAMITE_CLUSTER"
NODE, PODS, SERVICES = "10.245.0.1", "10.244.0.0/24", "10.96.0.0/16"
IMAGE, PAUSE = "registry.example.com/samite:test", "registry.example.com/pause:test"
NAMESPACE, RELEASE = "models", "llm"
NAME = f"{RELEASE}-samite"
CLIENTS = 8
# The guard against hangs, in seconds.
GUARD = 240
# The kubelet sets these for the whole machine, so it gets files in their place.
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
PAUSE_SOURCE = "#include <unistd.h>\nint main(void) { for (;;) pause(); }"


check = Check()


def wait_for(what, holds):
    begin = time.monotonic()
    while not (found := holds()):
        if time.monotonic() - begin > GUARD:
            raise SystemExit(f"{what}: not so after {GUARD} s; --logs keeps the logs")
        time.sleep(0.1)
    return found


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, **options)


# The machine: namespaces and cgroups.


def cgroups():
    """Returns the folder of this process in each hierarchy of cgroup v1, by controller."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return {
        controller.removeprefix("name="): Path("/sys/fs/cgroup", controller.removeprefix("name="))
        / path.strip("/")
        for _, controller, path in lines
        if controller
    }


def outside(arguments):
    """Runs this program in namespaces and cgroups, and removes them."""
    parents = cgroups()
    if not parents:
        raise SystemExit("cgroup v1 is not mounted")
    folders = [parent / f"samite-{os.getpid()}" for parent in parents.values()]
    # So that a SIGTERM, too, ends the node and removes what it made.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        try:
            for cgroup in folders:
                cgroup.mkdir()
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if (cgroup / name).exists():
                        (cgroup / name).write_text((cgroup.parent / name).read_text())

            def join():
                for cgroup in folders:
                    (cgroup / "cgroup.procs").write_text(str(os.getpid()))

            kinds = ["--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup"]
            command = ["unshare", *kinds, "--propagation=private", "--fork", "--kill-child"]
            child = subprocess.run(
                [*command, "--mount-proc", sys.executable, __file__, *arguments],
                env={**os.environ, INSIDE: folder},
                preexec_fn=join,
            )
        finally:
            begin = time.monotonic()
            while (left := remove(folders)) and time.monotonic() - begin < GUARD:
                time.sleep(0.1)
    check(not left and not Path(folder).exists(), "no process, cgroup or file is left")
    return child.returncode or bool(check.failed)


def remove(folders):
    """Removes cgroups. Returns those that still have processes."""
    for folder in folders:
        for path, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)
    return [folder for folder in folders if folder.exists()]


def prepare(folder):
    """Makes this process's namespaces a node."""
    # cgroups() reads the names; their paths are those of the new cgroup namespace.
    controllers = cgroups()
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys/fs/cgroup")
    for name, path in controllers.items():
        path.mkdir()
        option = f"none,name={name}" if name == "systemd" else name
        run("mount", "-t", "cgroup", "-o", option, "cgroup", path)
    for target in ("/run", "/var/log"):
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", target)
    for name, value in SYSCTLS.items():
        file = folder / name.replace("/", ".")
        file.write_text(f"{value}\n")
        run("mount", "--bind", file, Path("/proc/sys") / name)
    for name in ("ipv4/ip_forward", "bridge/bridge-nf-call-iptables"):
        Path("/proc/sys/net", name).write_text("1")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "node", "type", "bridge")
    run("ip", "address", "add", f"{NODE}/24", "dev", "node")
    run("ip", "link", "set", "node", "up")
    # Addresses of services need a route before they are replaced.
    run("ip", "route", "add", "default", "dev", "node")


# Images.


def layer(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, source in files.items():
            entry = tar.gettarinfo(source.resolve(), name.lstrip("/"))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755
            with source.open("rb") as file:
                tar.addfile(entry, file)
    return buffer.getvalue()


def write_image(path, name, files, entry):
    """Writes an image with one layer, as `docker save` does."""
    content = layer(files)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    config = {
        "architecture": machine,
        "os": "linux",
        "config": {"Entrypoint": [entry]},
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"],
        },
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": content,
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(path, "w") as tar:
        for part, data in parts.items():
            entry = tarfile.TarInfo(part)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def libraries(program):
    """Returns the dynamic libraries of a program, and their loader."""
    lines = run("ldd", program, capture_output=True, text=True).stdout.splitlines()
    words = (word for line in lines for word in line.split())
    return {word: Path(word) for word in words if word.startswith("/")}


# The cluster.


class Cluster:
    def __init__(self, folder, args):
        self.folder, self.args, self.token = folder, args, secrets.token_hex(16)
        self.helm_environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KUBECONFIG": str(self.kubeconfig()),
        }
        self.processes = {}

    def kubeconfig(self):
        path = self.folder / "kubeconfig"
        cluster = {"server": f"https://{NODE}:6443", "insecure-skip-tls-verify": True}
        context = {"cluster": "test", "user": "test"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config))
        return path

    def begin(self, program, *flags):
        """Starts a program of the node, which ends with the namespaces."""
        own = self.args.kubernetes / program
        command = [str(own) if own.exists() else program, *map(str, flags)]
        logs = self.args.logs or self.folder
        with (logs / f"{Path(program).name}.log").open("w") as log:
            self.processes[program] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def api(self, method, path, body=None, kind="application/json"):
        """Returns the status and the JSON of an answer of the API server."""
        for program, process in self.processes.items():
            if process.poll() is not None:
                raise SystemExit(f"{program} exited with {process.returncode}; see --logs")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(NODE, 6443, timeout=GUARD, context=context)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        try:
            connection.request(method, path, body and json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
            return response.status, json.loads(content) if content[:1] == b"{" else {}
        except OSError:
            return 0, {}
        finally:
            connection.close()

    def create(self, path, body):
        status, answer = self.api("POST", path, body)
        if status not in (200, 201):
            raise SystemExit(f"{path}: {status}: {answer}")
        return answer

    def items(self, path):
        status, answer = self.api("GET", path)
        if status != 200:
            raise SystemExit(f"{path}: {status}: {answer}")
        return answer["items"] or []

    def start(self):
        folder = self.folder
        run("openssl", "genrsa", "-out", folder / "accounts", "2048", capture_output=True)
        (folder / "tokens").write_text(f"{self.token},admin,1,system:masters\n")
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        self.begin(
            "etcd",
            "--data-dir=/run/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
        )
        self.begin(
            "kube-apiserver",
            f"--etcd-servers={client}",
            f"--advertise-address={NODE}",
            f"--bind-address={NODE}",
            f"--cert-dir={folder}/certificates",
            f"--service-cluster-ip-range={SERVICES}",
            "--service-account-issuer=https://test",
            f"--service-account-key-file={folder}/accounts",
            f"--service-account-signing-key-file={folder}/accounts",
            f"--token-auth-file={folder}/tokens",
            "--authorization-mode=RBAC",
        )
        wait_for("kube-apiserver", lambda: self.api("GET", "/readyz")[0] == 200)
        shared = f"--kubeconfig={folder}/kubeconfig"
        self.begin(
            "kube-controller-manager",
            shared,
            f"--service-account-private-key-file={folder}/accounts",
            f"--root-ca-file={folder}/certificates/apiserver.crt",
        )
        self.begin("kube-scheduler", shared)
        self.start_containerd()
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "resolvConf": "",
            "volumePluginDir": f"{folder}/plugins",
            # The disk of the machine is not the cluster's to clean.
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
        }
        (folder / "kubelet.json").write_text(json.dumps(kubelet))
        self.begin(
            "kubelet",
            shared,
            f"--config={folder}/kubelet.json",
            f"--root-dir={folder}/kubelet",
            f"--cert-dir={folder}/kubelet-certificates",
            "--hostname-override=node",
            f"--node-ip={NODE}",
        )
        self.begin(
            "kube-proxy",
            shared,
            "--hostname-override=node",
            f"--cluster-cidr={PODS}",
            # These are the machine's.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        )
        wait_for("a node that is ready", lambda: any(map(is_ready, self.items("/api/v1/nodes"))))
        if self.args.policies:
            self.begin(
                self.args.policies,
                shared,
                "--hostname-override=node",
                "--run-router=false",
                "--run-service-proxy=false",
                f"--service-cluster-ip-range={SERVICES}",
            )
        return self.api("GET", "/version")[1]["gitVersion"]

    def start_containerd(self):
        folder = self.folder
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": PODS}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                        "dataDir": f"{folder}/addresses",
                    },
                }
            ],
        }
        (folder / "cni").mkdir()
        (folder / "cni/pods.conflist").write_text(json.dumps(network))
        (folder / "containerd.toml").write_text(f"""
version = 2
root = "{folder}/containerd"
state = "/run/containerd/state"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
disable_apparmor = true
# For root without CAP_SYS_RESOURCE.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
""")
        self.begin("containerd", "--config", folder / "containerd.toml")
        wait_for("containerd", Path("/run/containerd/containerd.sock").is_socket)
        pause = folder / "pause"
        run("cc", "-static", "-x", "c", "-o", pause, "-", input=PAUSE_SOURCE.encode())
        program = self.args.samite.resolve()
        images = {
            PAUSE: ({"/pause": pause}, "/pause"),
            IMAGE: ({"/samite": program, **libraries(program)}, "/samite"),
        }
        for name, (files, entry) in images.items():
            archive = folder / "image.tar"
            write_image(archive, name, files, entry)
            run("ctr", "--namespace", "k8s.io", "images", "import", archive, capture_output=True)
            archive.unlink()

    def helm(self, *command, values=None):
        if values is not None:
            file = self.folder / "values.json"
            file.write_text(json.dumps(values))
            command = (*command, "--values", file)
        done = subprocess.run(
            [self.args.helm, *map(str, command), "--namespace", NAMESPACE],
            env=self.helm_environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(done.stdout, done.stderr)
        return done.returncode == 0

    def pods(self):
        """Returns the chart's pods, also those that end."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        return self.items(f"{path}?labelSelector=app.kubernetes.io/name%3Dsamite")

    def ready(self):
        return [pod for pod in self.pods() if is_ready(pod) and not is_ending(pod)]

    def endpoints(self, service):
        """Returns the ready addresses of a service, with ports."""
        slices = self.items(
            f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
            f"?labelSelector=kubernetes.io/service-name%3D{service}"
        )
        return {
            (address, port["port"])
            for part in slices
            for endpoint in part["endpoints"] or []
            if endpoint["conditions"]["ready"]
            for address in endpoint["addresses"]
            for port in part["ports"]
        }

    def address(self):
        path = f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}"
        return self.api("GET", path)[1]["spec"]["clusterIP"]


def is_ready(item):
    conditions = item.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def is_ending(item):
    return "deletionTimestamp" in item["metadata"]


def restarts(pod):
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))


def name(pod):
    return pod["metadata"]["name"]


def process_of(pod, program):
    """Returns the process of a pod's container."""
    unit = f"pod{pod['metadata']['uid']}"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            first = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
            if first == program and unit in (folder / "cgroup").read_text():
                return int(folder.name)
        except OSError:
            continue
    raise SystemExit(f"{name(pod)} has no process {program}")


# Requests.


def get(address, path, **headers):
    # Short, because the first packet can go to a pod that has just ended.
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def chat(number, is_stream):
    return {
        "messages": [{"role": "user", "content": f"Tell me story {number} of a dog."}],
        "max_tokens": 48,
        "ignore_eos": True,
        "stream": is_stream,
    }


def server_of(connection):
    """Returns the address to which the kernel translated the one of the service."""
    wanted = {f"sport={connection.sock.getsockname()[1]}", f"dst={connection.host}", "dport=80"}
    with open("/proc/net/nf_conntrack") as table:
        for line in table:
            words = line.split()
            if wanted <= set(words):
                return [word for word in words if word.startswith("src=")][1][4:]
    return None


@dataclasses.dataclass
class Request:
    number: int
    began: float = 0
    ended: float = 0
    # The pod's address.
    server: str | None = None
    # On a connection that had a request before.
    is_later: bool = False
    # Connections that no server took, so that another try is safe.
    refused: int = 0
    error: str | None = None
    # Sent on a kept connection when the server had begun to end. The sleep of preStop is no help
    # there, because it only keeps new connections away.
    is_late: bool = False


class Load:
    """Sends requests from clients, half of which keep their connections.

    A client that keeps its connection looks whether the server closed it, as pools of HTTP clients
    do, and nothing is sent twice. Runs until `count` requests are answered and `wait` returned.
    """

    def __init__(self, address, count, wait):
        self.address = address
        self.requests, self.lock, self.is_over = [], threading.Lock(), False
        threads = [threading.Thread(target=self.client, args=[it]) for it in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            # The action begins with requests in flight.
            wait_for("requests", lambda: len(self.requests) >= count // 5)
            self.result = wait()
            last = len(self.requests)
            wait_for("requests", lambda: len(self.requests) >= max(count, last + count // 5))
        finally:
            self.is_over = True
            for thread in threads:
                thread.join()
        # Those that found no server when all was over do not count.
        self.requests = [request for request in self.requests if request.server]
        self.lost = [request for request in self.requests if request.error]
        self.late = [request for request in self.lost if request.is_late]
        self.refused = sum(request.refused for request in self.requests)

    def client(self, index):
        connection = None
        while not self.is_over:
            with self.lock:
                request = Request(len(self.requests))
                self.requests.append(request)
            connection = self.send(request, connection)
            if index % 2 and connection:
                connection.close()
                connection = None

    def send(self, request, connection):
        """Sends a request. Returns the connection if it can have another."""
        is_open = connection and connection.sock
        # A closed connection is readable.
        if is_open and select.select([connection.sock], [], [], 0)[0]:
            connection.close()
            is_open = False
        request.is_later = bool(is_open)
        request.began = time.monotonic()
        while not is_open and not self.is_over:
            request.began = time.monotonic()
            connection = http.client.HTTPConnection(self.address, timeout=GUARD)
            try:
                connection.connect()
                connection.server, is_open = server_of(connection), True
            except OSError:
                request.refused += 1
                time.sleep(0.02)
        if not is_open:
            return None
        request.server = connection.server
        is_stream = request.number % 4 < 2
        body = json.dumps(chat(request.number, is_stream))
        headers = {"Content-Type": "application/json", "Host": NAME}
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != 200:
                request.error = f"status {response.status}: {text[:200]}"
                request.is_late = request.is_later and "about to end" in text
            elif '"finish_reason":"length"' not in text or is_stream and "[DONE]" not in text:
                request.error = f"not complete: {text[-200:]}"
        except (OSError, http.client.HTTPException) as error:
            request.error = repr(error)
            request.is_late = request.is_later and isinstance(error, ConnectionError)
            connection.close()
        request.ended = time.monotonic()
        return connection if connection.sock else None

    def figures(self):
        servers = Counter(request.server for request in self.requests)
        times = sorted(request.ended - request.began for request in self.requests)
        for request in self.lost[:5]:
            kept = "kept" if request.is_later else "new"
            seconds = request.ended - request.began
            print(f"{kept} connection to {request.server}, {seconds:.3f} s: {request.error}")
        return (
            f"{len(self.requests)} requests to {len(servers)} pods, {len(self.lost)} lost "
            f"({len(self.late)} on kept connections at a server's end), {self.refused} connections "
            f"refused, longest {times[-1]:.2f} s"
        )


# The checks.


def values(args, **more):
    return {
        "image": {"repository": IMAGE.split(":")[0], "tag": "test"},
        "replicas": 2,
        "model": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]},
        "parallel": 4,
        "ctxSize": 2048,
        "drain": 60,
        "cache": {"sizeMiB": 64},
        # The default is more than this machine has.
        "resources": {
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "limits": {"memory": "2Gi"},
        },
        "extraArgs": ["-t", "1", *args.flags],
        **more,
    }


def upgrade(cluster, **more):
    """Upgrades the release, and waits until the pods of before are gone."""
    before = {name(pod) for pod in cluster.pods()}
    done = cluster.helm(
        "upgrade", RELEASE, CHART, "--wait", "--timeout", f"{GUARD}s",
        values=values(cluster.args, **more),
    )  # fmt: skip
    wait_for("an upgrade", lambda: not before & {name(pod) for pod in cluster.pods()})
    wait_for("two ready pods", lambda: len(cluster.ready()) == 2)
    return done


def install(cluster):
    models = cluster.folder / "models"
    models.mkdir()
    shutil.copy(cluster.args.model, models / "model.gguf")
    (models / "model.gguf").chmod(0o644)
    volume = {
        "metadata": {"name": "models"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadOnlyMany"],
            "hostPath": {"path": str(models), "type": "Directory"},
        },
    }
    cluster.create("/api/v1/persistentvolumes", volume)
    begin = time.monotonic()
    done = cluster.helm(
        "install", RELEASE, CHART, "--create-namespace", "--wait", "--timeout", f"{GUARD}s",
        values=values(cluster.args),
    )  # fmt: skip
    pods = cluster.ready()
    check(
        done and len(pods) == 2,
        f"helm install: {len(pods)} pods are ready after {time.monotonic() - begin:.1f} s",
    )
    if len(pods) != 2:
        raise SystemExit(json.dumps(cluster.pods(), indent=1)[:20000])
    for pod in pods:
        is_confined(pod)
    address = cluster.address()
    wait_for("the service", lambda: get(address, "/ready") == 200)
    # Clients of the namespace and of others, and those that look for the whole name.
    domain = f"{NAME}.{NAMESPACE}"
    names = [address, NAME, domain, f"{domain}.svc", f"{domain}.svc.cluster.local"]
    statuses = {host: get(address, "/v1/models", Host=host) for host in names}
    check(set(statuses.values()) == {200}, f"clients reach the service as: {statuses}")
    status = get(address, "/v1/models", Host="example.com")
    check(status == 403, f"a foreign name is refused: {status}")


def is_confined(pod):
    process = process_of(pod, "/samite")
    root = Path(f"/proc/{process}")
    status = dict(
        line.split(":\t", 1) for line in (root / "status").read_text().splitlines() if ":\t" in line
    )
    mounts = [line.split() for line in (root / "mountinfo").read_text().splitlines()]
    options = {mount[4]: mount[5].split(",")[0] for mount in mounts}
    check(
        status["Uid"].split() == ["65532"] * 4
        and int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
        and (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        and (options["/"], options["/models"], options["/tmp"]) == ("ro", "ro", "rw")
        and not any("serviceaccount" in path for path in options),
        f"{name(pod)}: user {status['Uid'].split()[0]}, capabilities {status['CapBnd']}, "
        f"seccomp {status['Seccomp']}, root {options['/']}, models {options['/models']}, no token",
    )


def delete(cluster):
    """Deletes a pod under load."""
    pod = cluster.ready()[0]

    def replaced():
        cluster.api("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name(pod)}")
        gone = lambda: name(pod) not in map(name, cluster.pods())
        wait_for("a deleted pod", lambda: gone() and len(cluster.ready()) == 2)

    load = Load(cluster.address(), 1000, replaced)
    servers = {request.server for request in load.requests}
    check(
        load.lost == load.late and not load.refused and len(servers) == 3,
        f"a pod deleted and replaced: {load.figures()}",
    )


def kill(cluster):
    """Kills a pod's process under load."""
    pod = cluster.ready()[0]
    server = pod["status"]["podIP"]

    def restarted():
        process = process_of(pod, "/samite")
        begin = time.monotonic()
        os.kill(process, signal.SIGKILL)
        wait_for("its end", lambda: not Path(f"/proc/{process}").exists())
        end = time.monotonic()
        same = lambda: [each for each in cluster.ready() if name(each) == name(pod)]
        wait_for("a restart", lambda: any(restarts(each) == 1 for each in same()))
        return begin, end

    load = Load(cluster.address(), 500, restarted)
    begin, end = load.result
    flight = [
        request
        for request in load.requests
        if request.server == server and request.began < end and begin < request.ended
    ]
    check(
        all(request in flight for request in load.lost),
        f"a process killed: {load.figures()}; {len(flight)} were in flight there",
    )


def roll(cluster):
    """Upgrades the release under load."""
    load = Load(cluster.address(), 1000, lambda: upgrade(cluster, ctxSize=4096))
    new = [pod["spec"]["containers"][0]["args"] for pod in cluster.ready()]
    check(
        load.result and load.lost == load.late and not load.refused,
        f"helm upgrade: {load.figures()}",
    )
    check(all("--ctx-size=4096" in args for args in new), "both pods have the new value")


def keys(cluster):
    done = upgrade(cluster, auth={"key": "secret"})
    address, bearer = cluster.address(), {"Authorization": "Bearer secret"}
    statuses = [
        get(address, "/v1/models"),
        get(address, "/v1/models", Authorization="Bearer wrong"),
        get(address, "/metrics"),
        get(address, "/v1/models", **bearer),
        get(address, "/metrics", **bearer),
        get(address, "/v1/models", Host="example.com", **bearer),
    ]
    check(
        done and statuses == [401, 401, 401, 200, 200, 200],
        f"with a key: {statuses}",
    )
    # Another key must restart the pods.
    done = upgrade(cluster, auth={"key": "other"})
    status = get(address, "/v1/models", **bearer)
    check(done and status == 401, f"the key before: {status}")
    calm = [pod for pod in cluster.ready() if restarts(pod) == 0]
    check(len(calm) == 2, f"with a key, the probes of {len(calm)} pods succeed")


def events(cluster):
    done = upgrade(cluster, kvEvents={"enabled": True})
    addresses = {pod["status"]["podIP"] for pod in cluster.ready()}
    wanted = {(address, 5557) for address in addresses}
    found = wait_for("endpoints", lambda: cluster.endpoints(f"{NAME}-kv-events") == wanted)
    greetings = []
    for address in addresses:
        with socket.create_connection((address, 5557), timeout=10) as connection:
            greetings.append(connection.recv(10))
    # The signature of ZeroMQ's protocol.
    check(
        done and found and all(it[:1] == b"\xff" and it[9:] == b"\x7f" for it in greetings),
        f"KV cache events: the service has {len(addresses)} pods, which answer as publishers",
    )
    for pod in cluster.ready():
        process = process_of(pod, "/samite")
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
        topic = f"--kv-events-topic=kv@{pod['status']['podIP']}@model"
        check(topic in arguments, f"{name(pod)} has its address in {topic}")


def client(cluster, namespace):
    """Starts a pod that does nothing. Returns its process."""
    if namespace != NAMESPACE:
        cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for("an account", lambda: cluster.api("GET", accounts)[0] == 200)
    container = {"name": "client", "image": PAUSE, "imagePullPolicy": "Never"}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    path = f"/api/v1/namespaces/{namespace}/pods"
    cluster.create(path, {"metadata": {"name": "client"}, "spec": spec})
    pod = wait_for(
        "a client",
        lambda: [pod for pod in cluster.items(path) if name(pod) == "client" and is_ready(pod)],
    )
    return process_of(pod[0], "/pause")


def reaches(process, address, port):
    """Returns whether a connection from a process's network succeeds."""
    program = f"import socket; socket.create_connection(({address!r}, {port}), timeout=3)"
    command = ["nsenter", f"--net=/proc/{process}/ns/net", sys.executable, "-c", program]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def policies(cluster):
    near, far = client(cluster, NAMESPACE), client(cluster, "elsewhere")
    pods, service = cluster.ready(), cluster.address()
    targets = [(service, 80)]
    targets += [(pod["status"]["podIP"], port) for pod in pods for port in (8080, 5557)]
    check(
        all(reaches(near, *target) for target in targets),
        "a pod of the namespace reaches the service and the ports of both pods",
    )
    if not cluster.args.policies:
        print("network policies are not enforced: --policies is not given")
        return
    wait_for("the policy", lambda: not any(reaches(far, *target) for target in targets))
    check(True, "a pod of another namespace reaches none of them")
    own = process_of(pods[0], "/samite")
    # Other servers are not tried: kube-router lets connections out that a rule for ingress allows.
    check(
        reaches(near, NODE, 6443) and not reaches(own, NODE, 6443),
        "a server cannot open connections to the node, which another pod can",
    )
    label = {"kubernetes.io/metadata.name": "elsewhere"}
    rule = {"from": [{"namespaceSelector": {"matchLabels": label}}]}
    kv = {"enabled": True}
    done = cluster.helm(
        "upgrade", RELEASE, CHART, "--wait", values=values(
            cluster.args, networkPolicy=rule, kvEvents=kv
        ),
    )  # fmt: skip
    wait_for("the policy", lambda: all(reaches(far, *target) for target in targets))
    refused = wait_for("the policy", lambda: not any(reaches(near, *target) for target in targets))
    check(
        done and refused, "networkPolicy.from: the other namespace reaches them, its own does not"
    )


def scale(cluster):
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}/scale"
    kind = "application/merge-patch+json"
    cluster.api("PATCH", path, {"spec": {"replicas": 0}}, kind)
    wait_for("no pods", lambda: not cluster.pods())
    wait_for("no endpoints", lambda: not cluster.endpoints(NAME))
    wait_for("a service without pods", lambda: get(cluster.address(), "/ready") == 0)
    cluster.api("PATCH", path, {"spec": {"replicas": 2}}, kind)
    wait_for("two pods", lambda: len(cluster.ready()) == 2)
    answered = wait_for("an answer", lambda: get(cluster.address(), "/ready") == 200)
    check(answered, "scaled to no pods and back")


def uninstall(cluster):
    done = cluster.helm("uninstall", RELEASE, "--wait", "--timeout", f"{GUARD}s")
    wait_for("no pods", lambda: not cluster.pods())
    kinds = [
        "/apis/apps/v1/namespaces/{}/deployments",
        "/api/v1/namespaces/{}/services",
        "/api/v1/namespaces/{}/secrets",
        "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    ]
    left = [name(item) for kind in kinds for item in cluster.items(kind.format(NAMESPACE))]
    claims = cluster.items(f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims")
    check(
        done and not left and [claim["status"]["phase"] for claim in claims] == ["Bound"],
        f"helm uninstall: left are {left} and {len(claims)} claim, as its annotation says",
    )


def inside(args):
    folder = Path(os.environ[INSIDE])
    prepare(folder)
    cluster = Cluster(folder, args)
    begin = time.monotonic()
    version = cluster.start()
    print(f"Kubernetes {version} is ready after {time.monotonic() - begin:.1f} s", flush=True)
    for part in (install, delete, kill, roll, keys, events, policies, scale, uninstall):
        part(cluster)
    return bool(check.failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kubernetes", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--helm", required=True)
    parser.add_argument("--samite", type=Path, required=True)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--policies", metavar="PROGRAM")
    parser.add_argument("--logs", type=Path, metavar="FOLDER")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    sys.exit(inside(args) if INSIDE in os.environ else outside(sys.argv[1:]))


if __name__ == "__main__":
    main()
