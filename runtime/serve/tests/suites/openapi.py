"""Sends generated requests to the server, and compares its answers with its OpenAPI description.

Usage: SAMITE=PROGRAM openapi.py [--count N] [--bounds]. Needs the package schemathesis, which loads this file
as its hooks. A seed decides all requests.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

import schemathesis
import serving

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
]
# The longest text of a request.
TOKENS = 8
LIMITS = {"n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"}
FLAGS = ["--n-predict", str(TOKENS), "-c", "2048", "--embeddings", "--metrics"]
# The description has these two: the server was started without a feature, or is full.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "501", "503"]

[checks.negative_data_rejection]
expected-statuses = ["4xx", "501", "503"]
"""


def names(value):
    """Yields the names of the schemas that a value refers to."""
    if isinstance(value, list):
        for one in value:
            yield from names(one)
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rsplit("/", 1)[1]
        yield from names(list(value.values()))


def reached(value, schemas):
    """Returns the names of the schemas that a value refers to, and of those that they refer to."""
    found, new = set(), set(names(value))
    while new:
        found |= new
        new = {name for known in new & schemas.keys() for name in names(schemas[known])} - found
    return found


def merged(value, schemas, is_closed):
    """Merges `allOf`. Closes objects, so that members without a description are failures."""
    if isinstance(value, list):
        return [merged(one, schemas, is_closed) for one in value]
    if not isinstance(value, dict):
        return value
    value = dict(value)
    for base in value.pop("allOf", []):
        base = merged(schemas[base["$ref"].rsplit("/", 1)[1]], schemas, is_closed)
        value["properties"] = base["properties"] | value.get("properties", {})
        value["required"] = base.get("required", []) + value.get("required", [])
    value = {name: merged(one, schemas, is_closed) for name, one in value.items()}
    if is_closed and value.get("type") == "object" and "properties" in value:
        value["additionalProperties"] = False
    return value


def prepared(described):
    """Returns a description that is stricter with answers, and the number of operations."""
    components = described["components"]
    items = components["pathItems"].values()
    requests = [operation.get("requestBody") for item in items for operation in item.values()]
    open_schemas = reached(requests, components["schemas"])
    components["schemas"] = {
        name: merged(schema, components["schemas"], name not in open_schemas)
        for name, schema in components["schemas"].items()
    }
    paths = described["paths"].values()
    return described, sum(len(components["pathItems"][name]) for name in names(list(paths)))


def short(value):
    """Limits the texts that a request asks for."""
    if isinstance(value, list):
        return [short(one) for one in value]
    if not isinstance(value, dict):
        return value

    def is_long(name, one):
        return name in LIMITS and type(one) in (int, float) and (one == -1 or TOKENS < one < 2**31)

    return {name: TOKENS if is_long(name, one) else short(one) for name, one in value.items()}


@schemathesis.hook
def before_call(_context, case, _kwargs):
    case.body = short(case.body)
    body = case.body
    if not isinstance(body, dict):
        return
    # Each field is sent with the same values of others. These would hide it: no tool has this name, and a
    # request of ollama's without a text only loads the model.
    if body.get("tool_choice") in ({"type": "", "name": ""}, {"type": "function", "function": {"name": ""}}):
        del body["tool_choice"]
    if case.path == "/api/chat" and body.get("messages") in (None, []):
        body["messages"] = [{"role": "user", "content": "a"}]
    if case.path == "/api/generate" and body.get("prompt") in (None, ""):
        body["prompt"] = "a"


@schemathesis.hook
def filter_failure(_context, failure, case, _response):
    # A missing body is no violation where it is optional.
    return not (failure.code == "ST201" and isinstance(case.body, schemathesis.core.NotSet))


@schemathesis.hook
def after_call(_context, case, response):
    with open(os.environ["STATUSES"], "a") as file:
        print(case.method, case.path, response.status_code, file=file)


@schemathesis.deserializer("application/x-ndjson")
def lines(_context, response):
    return [json.loads(line) for line in response.content.splitlines()]


def check(base, count, bounds, folder):
    request = urllib.request.Request(f"{base}/openapi.json", headers={"X-Api-Key": serving.KEY})
    with urllib.request.urlopen(request) as response:
        description, operations = prepared(json.load(response))
    (folder / "openapi.json").write_text(json.dumps(description))
    (folder / "schemathesis.toml").write_text(CONFIG)
    statuses = folder / "statuses"
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", base]
    command += ["-H", f"X-Api-Key: {serving.KEY}", "--generation-with-security-parameters", "false"]
    command += ["--phases", "coverage,fuzzing" if bounds else "fuzzing", "--checks", ",".join(CHECKS)]
    command += ["--max-examples", str(-(-count // operations)), "--seed", "1", "--generation-database", "none"]
    command += ["--continue-on-failure", "--no-shrink", "--warnings", "off", "--no-color", "--request-timeout", "60"]
    hooks = {"SCHEMATHESIS_HOOKS": "openapi", "PYTHONPATH": str(pathlib.Path(__file__).parent.resolve())}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **hooks, "STATUSES": str(statuses)})
    counts = collections.Counter(line.rsplit(" ", 1)[1] for line in statuses.read_text().splitlines())
    each = ", ".join(f"{number} with status {status}" for status, number in sorted(counts.items()))
    print(f"{counts.total()} requests: {each}")
    return done.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="number of random requests, about")
    parser.add_argument("--bounds", action="store_true", help="also send the bounds of each field")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving.running(os.environ["SAMITE"], *FLAGS) as base:
        code = check(base, options.count, options.bounds, pathlib.Path(folder))
    sys.exit(code)


if __name__ == "__main__":
    main()
