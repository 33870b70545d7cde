"""Ray Serve application: replicas that each run `samite serve`, behind a gateway that retries.

    serve run deployment:app flags="-m model.gguf --parallel 8 --kv-unified" max_replicas=4

`Args` has the arguments. README.md has the design.
"""

import asyncio
import ctypes
import hashlib
import json
import os
import re
import shlex
import signal

import aiohttp
import grpc
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

# Seconds for a model to load.
LOADING = 1800
# Headers of a connection rather than of a message, and those that each server sets itself.
OWN_HEADERS = "connection keep-alive te trailer transfer-encoding upgrade date server".split()
STREAMS = ("text/event-stream", "application/x-ndjson")
# Text, reasoning or arguments in an event of any API. Earlier events announce an answer only.
TOKEN = re.compile(
    rb'"(content|text|reasoning_content|reasoning|thinking|delta|arguments|partial_json|response)"'
    rb': ?"[^"]'
)
# Names the replica in answers.
REPLICA_HEADER = "X-Replica"
# Linux: the signal for a process whose parent ended.
PR_SET_PDEATHSIG = 1


class ChildError(Exception):
    """The replica's samite closed a connection early."""


# Errors of a replica that was killed or whose samite ended.
LOST = (RayError, grpc.aio.AioRpcError, ChildError)


class Args(BaseModel):
    """Arguments of `app`."""

    program: str = "samite"
    # Flags of `samite serve` except --host and --port.
    flags: str
    # CPUs and GPUs that Ray reserves for a replica. samite does not read them: limit it with -t.
    cpus: float = 1
    gpus: float = 0
    min_replicas: int = 1
    max_replicas: int = 1
    # Requests per replica, running and waiting. A good value is that of --parallel. A replica
    # refuses more than twice as many, and a conversation then goes to another.
    target_ongoing_requests: int = 4
    upscale_delay_s: float = 30
    downscale_delay_s: float = 600
    # Requests that wait in a gateway for a replica. Further ones get status 503.
    max_queued_requests: int = 1024
    gateways: int = 1
    # Replicas that a request may lose before its client gets an error.
    attempts: int = 5
    # Seconds for the requests of a replica that Ray stops. Also sets --drain.
    drain: int = 60


@serve.deployment
class Samite:
    """Replica with a samite server on a free port of the loopback."""

    async def __init__(self, program, flags):
        self.name = serve.get_replica_context().replica_id.unique_id
        command = [program, "serve", *flags, "--host", "127.0.0.1", "--port", "0"]
        self.child = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, preexec_fn=end_with_parent
        )
        port = await asyncio.wait_for(self.find_port(shlex.join(command)), LOADING)
        self.session = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
        )
        await self.check("/ready")
        self.tasks = [
            asyncio.create_task(self.copy_log()),
            asyncio.create_task(self.end_with_child()),
        ]

    async def find_port(self, command):
        log = []
        async for line in self.child.stderr:
            log.append(line.decode(errors="replace"))
            print(log[-1], end="", flush=True)
            if match := re.search(r" served at \w+://[^/]*:(\d+)", log[-1]):
                return int(match[1])
        code = await self.child.wait()
        raise RuntimeError(
            f"flags: {command} exited with {code}: {''.join(log[-5:]).strip()}; correct flags"
        )

    async def copy_log(self):
        async for line in self.child.stderr:
            print(line.decode(errors="replace"), end="", flush=True)

    async def end_with_child(self):
        code = await self.child.wait()
        print(f"samite serve exited with {code}; Ray starts another replica", flush=True)
        os._exit(1)

    async def check(self, path):
        async with self.session.get(path, timeout=aiohttp.ClientTimeout(10), raise_for_status=True):
            pass

    async def check_health(self):
        await self.check("/health")

    async def forward(self, method, path, headers, body):
        """Yields the status and headers of samite's answer, then its body as it comes."""
        try:
            async with self.session.request(
                method, path, headers=headers, data=body or None, allow_redirects=False
            ) as response:
                yield (
                    response.status,
                    [*without_own(response.headers.items()), (REPLICA_HEADER, self.name)],
                )
                async for chunk in response.content.iter_any():
                    yield chunk
        except aiohttp.ClientError as error:
            # aiohttp's errors cannot be pickled.
            raise ChildError(str(error)) from None

    async def __del__(self):
        """Drains samite. Ray has waited for this replica's requests."""
        for task in self.tasks:
            task.cancel()
        self.child.send_signal(signal.SIGTERM)
        await self.child.wait()
        await self.session.close()


@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
class Gateway:
    """Sends requests to replicas, and again if a replica is lost before the first token."""

    def __init__(self, replicas, attempts):
        self.replicas = replicas.options(method_name="forward", stream=True)
        self.attempts = attempts

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [
            (name, value)
            for name, value in without_own(request.headers.items())
            if name not in ("host", "content-length")
        ]
        replicas = self.replicas.options(session_id=conversation(body)) if body else self.replicas
        for attempt in range(self.attempts):
            answer = replicas.remote(request.method, path, headers, body)
            try:
                return await begin(answer)
            except (BackPressureError, DeploymentUnavailableError) as reason:
                return failure(
                    503,
                    f"no replica is free: {reason}; retry later, or set max_replicas higher",
                    {"Retry-After": "1"},
                )
            except LOST as reason:
                print(
                    f"{path}: attempt {attempt + 1} lost its replica: {type(reason).__name__}",
                    flush=True,
                )
                await asyncio.sleep(0.1 * 2**attempt)
            except asyncio.CancelledError:
                answer.cancel()
                raise
        return failure(
            502,
            f"{self.attempts} replicas were lost; read the replicas' logs for samite's reason",
        )


async def begin(answer):
    """Returns the response once it has a token or is complete.

    Until then, the client notices no lost replica.
    """
    status, headers = await anext(answer)
    kind = next((value for name, value in headers if name.lower() == "content-type"), "")
    is_stream, held = kind.startswith(STREAMS), b""
    async for chunk in answer:
        held += chunk
        if is_stream and TOKEN.search(held):
            break
    response = StreamingResponse(continued(held, answer, kind), status)
    # Ray adds the request's own.
    headers = [(name.lower(), value) for name, value in headers if name.lower() != "x-request-id"]
    response.raw_headers = [(name.encode(), value.encode()) for name, value in headers]
    return response


async def continued(held, answer, kind):
    try:
        yield held
        async for chunk in answer:
            yield chunk
    except LOST:
        event = json.dumps(error(500, "the replica was lost; send the request again"))
        yield (f"data: {event}\n\n" if kind.startswith(STREAMS[0]) else f"{event}\n").encode()
    finally:
        # Without effect on a complete answer. Otherwise the client left.
        answer.cancel()


def failure(status, message, headers=None):
    return JSONResponse(error(status, message), status, headers)


def error(status, message):
    return {"error": {"message": message, "type": "server_error", "code": status}}


def conversation(body):
    """Returns a key of the messages up to the first of a user, which all turns share."""
    try:
        fields = json.loads(body)
        messages = fields.get("messages") or fields.get("input") or fields.get("prompt")
    except (ValueError, AttributeError):
        return ""
    if isinstance(messages, list):
        users = (
            at
            for at, message in enumerate(messages)
            if isinstance(message, dict) and message.get("role") == "user"
        )
        messages = messages[: next(users, 0) + 1]
    elif isinstance(messages, str):
        messages = messages[:1024]
    first = [fields.get(name) for name in ("model", "system", "instructions", "tools")] + [messages]
    return hashlib.sha256(json.dumps(first).encode()).hexdigest() if messages else ""


def without_own(headers):
    return [(name, value) for name, value in headers if name.lower() not in OWN_HEADERS]


def end_with_parent():
    """Ends samite when its replica is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def app(args: Args) -> serve.Application:
    replicas = Samite.options(
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=args.max_replicas,
            target_ongoing_requests=args.target_ongoing_requests,
            upscale_delay_s=args.upscale_delay_s,
            downscale_delay_s=args.downscale_delay_s,
        ),
        max_ongoing_requests=2 * args.target_ongoing_requests,
        max_queued_requests=args.max_queued_requests,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=args.drain + 10,
        request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
    )
    flags = [*shlex.split(args.flags), "--drain", str(args.drain)]
    gateways = Gateway.options(
        num_replicas=args.gateways, graceful_shutdown_timeout_s=args.drain + 10
    )
    return gateways.bind(replicas.bind(args.program, flags), args.attempts)
