#!/usr/bin/env python3
"""Renders the chart, checks the manifests, and runs the container's command.

    test.py --helm helm [--crds FOLDER]
    test.py --helm helm --samite target/release/samite -m model.gguf [-- --chat-template chatml]

kubernetes-validate (PyPI) has Kubernetes' schemas, so no cluster is needed. --crds names a folder
with the CRDs of InferencePool and HTTPRoute; without it, these two are only rendered. With
--samite, root starts the rendered arguments as the manifest's user with a read-only root and
without capabilities, and asks the probes.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from testing import Check, free_port

CHART = Path(__file__).resolve().parent / "samite"
VERSIONS = ["1.32", "1.37"]
# The guard against hangs, in seconds.
GUARD = 60
# Values by case, and the kinds that the chart makes of them.
ALWAYS = {"Deployment", "Service", "NetworkPolicy"}
CASES = {
    "default": ({}, {*ALWAYS, "PersistentVolumeClaim"}),
    "existing claim": ({"model": {"claim": "models"}, "replicas": 3}, ALWAYS),
    "key": ({"auth": {"key": 'secret: "1"'}}, {*ALWAYS, "PersistentVolumeClaim", "Secret"}),
    "existing secret": ({"auth": {"secret": "keys"}}, {*ALWAYS, "PersistentVolumeClaim"}),
    "events": (
        {"kvEvents": {"enabled": True}, "metrics": {"annotations": False}},
        {*ALWAYS, "PersistentVolumeClaim"},
    ),
    "pool": (
        {"inference": {"enabled": True, "route": {"hostnames": ["llm.example.com"]}}},
        {*ALWAYS, "PersistentVolumeClaim", "InferencePool", "HTTPRoute"},
    ),
    "everything": (
        {
            "image": {"tag": "test"},
            "imagePullSecrets": [{"name": "pull"}],
            "model": {"size": "1Gi", "storageClass": "fast", "accessModes": ["ReadWriteMany"]},
            "replicas": 2,
            "ctxSize": 1048576,
            "cache": {"sizeMiB": None},
            "allowedHosts": ["llm.test"],
            "extraArgs": ["--chat-template", "chatml"],
            "extraEnv": [{"name": "RUST_LOG", "value": "info"}],
            "service": {"type": "LoadBalancer"},
            "nodeSelector": {"kubernetes.io/arch": "amd64"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "c"},
            "networkPolicy": {"from": [{"namespaceSelector": {}}], "egress": [{}]},
        },
        {*ALWAYS, "PersistentVolumeClaim"},
    ),
    "no policy": (
        {"networkPolicy": {"enabled": False}},
        {"Deployment", "Service", "PersistentVolumeClaim"},
    ),
}
# Values that the chart refuses, and the beginning of its reason.
REFUSED = [
    ({"auth": {"key": "a", "secret": "b"}}, "auth.key: "),
    ({"replicas": 2}, "model.accessModes: "),
    ({"inference": {"enabled": True}, "auth": {"key": "a"}}, "auth: "),
    ({"inference": {"enabled": True}, "metrics": {"names": "samite"}}, "metrics.names: "),
]


check = Check()


def helm(program, *command):
    return subprocess.run([program, *command], capture_output=True, text=True)


def render(program, values):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        return helm(
            program, "template", "test", str(CHART), "--namespace", "models", "--values", file.name
        )


def read_crds(folder):
    """Returns schemas by API version and kind."""
    schemas = {}
    for file in sorted(folder.glob("*.yaml")):
        for crd in filter(None, yaml.safe_load_all(file.read_text())):
            for version in crd["spec"]["versions"]:
                name = f"{crd['spec']['group']}/{version['name']}"
                schemas[name, crd["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return schemas


def strict(schema):
    """Returns a schema of a CRD that refuses unknown fields, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: strict(value) for name, value in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)
    return schema


def validate(manifest, crds):
    """Returns what a manifest was checked against."""
    try:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return "Kubernetes " + " and ".join(VERSIONS)
    except kubernetes_validate.SchemaNotFoundError:
        schema = crds.get((manifest["apiVersion"], manifest["kind"]))
    if not schema:
        return "nothing: --crds has no such kind"
    schema = strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(manifest, schema)
    return "its CRD"


def check_cases(program, crds):
    for case, (values, kinds) in CASES.items():
        rendered = render(program, values)
        if rendered.returncode:
            check(False, f"{case}: {rendered.stderr}")
            continue
        manifests = list(filter(None, yaml.safe_load_all(rendered.stdout)))
        try:
            against = {manifest["kind"]: validate(manifest, crds) for manifest in manifests}
            consistent(manifests)
            check(set(against) == kinds, f"{case}: {against}")
        except (
            AssertionError,
            kubernetes_validate.ValidationError,
            jsonschema.ValidationError,
        ) as error:
            check(False, f"{case}: {error}")
    for values, reason in REFUSED:
        rendered = render(program, values)
        check(rendered.returncode != 0 and f"{reason}" in rendered.stderr, f"refused: {values}")


def consistent(manifests):
    """Checks what schemas cannot: names that one manifest has of another."""
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    (deployment,) = (manifest for manifest in manifests if manifest["kind"] == "Deployment")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector") or {}
        labels = selector.get("matchLabels", selector)
        assert labels.items() <= pod["metadata"]["labels"].items(), (
            f"{manifest['kind']}: selector {labels} matches no pod"
        )
        if manifest["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports, (
                f"Service: {spec['ports']}"
            )
        if manifest["kind"] == "NetworkPolicy":
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == ports, (
                f"NetworkPolicy: {spec}"
            )
        if manifest["kind"] == "HTTPRoute":
            (backend,) = spec["rules"][0]["backendRefs"]
            assert (backend["kind"], backend["name"]) in names, f"HTTPRoute: {backend}"


# A root like a container's: this machine's libraries, the model, and two writable folders.
CONTAINER = """
set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
cd "$1"
mkdir -p usr lib lib64 bin etc models cache tmp proc dev
for name in usr lib lib64 bin; do [ ! -e /$name ] || mount --rbind -o ro /$name $name; done
mount -t proc proc proc
mount --rbind /dev dev
touch models/model.gguf samite
mount --bind "$2" samite
mount --bind "$3" models/model.gguf
mount -t tmpfs -o mode=1777 tmpfs cache
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -o remount,ro .
shift 3
exec unshare --root=. --wd=/ env -i "PATH=/bin" HOME=/tmp setpriv --reuid=65532 --regid=65532 \
    --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all /samite "$@"
"""


def run(program, samite, model, flags):
    """Starts the rendered command in such a root, and sends what Kubernetes sends."""
    rendered = render(program, {"extraArgs": ["-t", "1", *flags], "parallel": 2, "ctxSize": 2048})
    manifests = yaml.safe_load_all(rendered.stdout)
    (pod,) = (
        manifest["spec"]["template"]["spec"]
        for manifest in manifests
        if manifest and manifest["kind"] == "Deployment"
    )
    (container,) = pod["containers"]
    port = free_port()
    own = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=8080": f"--port={port}"}
    arguments = [own.get(argument, argument) for argument in container["args"]]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "unshare",
            "--mount",
            "--propagation=private",
            "sh",
            "-c",
            CONTAINER,
            "sh",
            folder,
            samite,
            model,
            *arguments,
        ]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            begin = time.monotonic()
            while get(port, container["startupProbe"]["httpGet"]["path"]) != 200:
                if server.poll() is not None or time.monotonic() - begin > GUARD:
                    server.kill()
                    raise SystemExit(
                        f"the container's command did not start: {server.stderr.read()}"
                    )
                time.sleep(0.1)
            status = Path(f"/proc/{server.pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            alone = fields["Uid"].split() == ["65532"] * 4 and int(fields["CapEff"], 16) == 0
            check(
                alone,
                f"ready after {time.monotonic() - begin:.1f} s as user {fields['Uid'].split()[0]} "
                f"with capabilities {fields['CapEff']}",
            )
            check(
                get(port, container["livenessProbe"]["httpGet"]["path"]) == 200,
                "the liveness probe succeeds",
            )
            check(get(port, "/metrics") == 200, "Prometheus reads /metrics")
            check(
                get(port, "/ready", "test-samite.models.svc") == 200,
                "a client of the service is answered",
            )
            check(get(port, "/v1/models", "example.com") == 403, "a foreign name is refused")
            body = {
                "messages": [{"role": "user", "content": "Once upon a time"}],
                "max_tokens": 300,
                "ignore_eos": True,
            }
            check(stop_during(port, body, server), "after SIGTERM, a stream in flight is finished")
            code = server.wait(pod["terminationGracePeriodSeconds"])
            check(code == 0, f"after SIGTERM, samite exited with {code}")
        finally:
            server.kill()
            server.wait()


def get(port, path, host="127.0.0.1"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def stop_during(port, body, server):
    """Stops the server at a stream's first event. Returns whether the stream is complete."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "stream": True}),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    response.readline()
    os.kill(server.pid, signal.SIGTERM)
    events = response.read()
    return b'"finish_reason":"length"' in events and b"[DONE]" in events


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--helm", required=True)
    parser.add_argument("--crds", type=Path, metavar="FOLDER")
    parser.add_argument("--samite")
    parser.add_argument("-m", "--model")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    lint = helm(args.helm, "lint", "--strict", str(CHART))
    check(lint.returncode == 0, f"helm lint --strict: {lint.stdout.strip().splitlines()[-1]}")
    check_cases(args.helm, read_crds(args.crds) if args.crds else {})
    if args.samite:
        run(
            args.helm, str(Path(args.samite).resolve()), str(Path(args.model).resolve()), args.flags
        )
    sys.exit(bool(check.failed))


if __name__ == "__main__":
    main()
