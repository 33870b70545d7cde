#!/usr/bin/env python3
"""Serves a model of `samite serve` as a worker of NVIDIA Dynamo.

    worker.py --samite samite [--tokenizer FOLDER] [--kv-events] -- -m model.gguf -c 16384

Starts `samite serve` on the loopback with the flags after `--`, registers the model with Dynamo,
and forwards requests. With --tokenizer, Dynamo applies the chat template and sends tokens; without
it, Dynamo forwards the bodies of OpenAI's API. Needs `ai-dynamo`.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys

import aiohttp
import uvloop
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.engine import RawEngine
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.constants import DisaggregationMode
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown, WorkerUnavailable

log = logging.getLogger("samite")
# Tokens of a block in samite's KV events and in Dynamo's router.
BLOCK = 16
# Seconds between two reads of samite's metrics.
METRICS_INTERVAL = 1.0
# Seconds after which frontends know that a registration is gone. They refuse to change one.
UNREGISTERED_SECONDS = 2
# Seconds that samite may take to exit once no request runs.
EXIT_SECONDS = 10
# Members of an event of POST /completion that the worker reads.
FIELDS = [
    "index",
    "tokens",
    "stop",
    "stop_type",
    "tokens_evaluated",
    "tokens_predicted",
    "timings/cache_n",
]
# Flags of samite that prefill and decode workers need.
TRANSFER_FLAGS = {
    "prefill": ["--kv-transfer", "--kv-transfer-host", "--kv-transfer-key"],
    "decode": ["--kv-transfer-key"],
}
# Loaded before the fork that uses it.
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
METRIC = re.compile(r"^\w+:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
CELLS = re.compile(r'cache_config_info\{block_size="(\d+)",num_gpu_blocks="(\d+)"')


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="worker.py [FLAGS] -- FLAGS OF samite serve"
    )
    parser.add_argument("--samite", default="samite", help="path of samite [default: samite]")
    parser.add_argument("--name", help="name of the model for clients [default: samite's]")
    parser.add_argument(
        "--tokenizer",
        help="Hugging Face folder of the model: config.json, tokenizer.json, tokenizer_config.json",
    )
    parser.add_argument(
        "--tool-call-parser", help="Dynamo's parser of tool calls, with --tokenizer"
    )
    parser.add_argument("--reasoning-parser", help="Dynamo's parser of reasoning, with --tokenizer")
    parser.add_argument(
        "--kv-events",
        action="store_true",
        help="publish KV events; samite must be built with --features kv-events",
    )
    parser.add_argument(
        "--disaggregation-mode",
        choices=["agg", *TRANSFER_FLAGS],
        default="agg",
        help="prefill: compute prompts for decode workers; decode: continue them; agg: do both "
        "[default: agg]",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=30,
        help="seconds to finish requests on SIGTERM [default: 30]",
    )
    parser.add_argument(
        "--start", type=float, default=600, help="seconds to load the model [default: 600]"
    )
    parser.add_argument("--namespace", default=os.environ.get("DYN_NAMESPACE", "dynamo"))
    parser.add_argument("--component", help="[default: prefill or backend]")
    parser.add_argument(
        "--discovery-backend", default=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd")
    )
    parser.add_argument("--request-plane", default=os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    parser.add_argument("--event-plane", default=os.environ.get("DYN_EVENT_PLANE"))
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of samite serve, after --")
    args = parser.parse_args(argv)
    if args.tokenizer and not os.path.isfile(os.path.join(args.tokenizer, "tokenizer.json")):
        parser.error(
            f"--tokenizer {args.tokenizer}: has no tokenizer.json; "
            "name the model's Hugging Face folder, or omit the flag"
        )
    if args.kv_events and not args.tokenizer:
        parser.error("--kv-events: needs --tokenizer, because Dynamo matches tokens with blocks")
    mode = args.disaggregation_mode
    if mode != "agg" and not args.tokenizer:
        parser.error(f"--disaggregation-mode {mode}: needs --tokenizer")
    # samite listens on the loopback, so it cannot know the host for other servers.
    given = {flag.partition("=")[0] for flag in args.flags}
    if missing := [flag for flag in TRANSFER_FLAGS.get(mode, []) if flag not in given]:
        parser.error(f"--disaggregation-mode {mode}: needs {', '.join(missing)} after --")
    args.component = args.component or ("prefill" if mode == "prefill" else "backend")
    return args


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def end_with_parent():
    """Makes the kernel send SIGTERM to this process when its parent dies, even by SIGKILL."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Samite:
    """The part of a worker that does not depend on the kind of requests."""

    def __init__(self, args):
        self.args = args
        self.process = self.client = self.config = self.endpoint = None
        self.tasks = []
        # Task that reads samite's response, by request ID.
        self.readers = {}
        self.snapshots = None
        self.metrics_text = ""
        self.has_failed = self.is_stopping = False
        self.events = f"tcp://127.0.0.1:{free_port()}" if args.kv_events else None

    @classmethod
    async def from_args(cls, args):
        config = WorkerConfig(
            namespace=args.namespace,
            component=args.component,
            model_name=args.tokenizer or args.name or "samite",
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            **cls.CONFIG,
        )
        return cls(args), config

    async def start(self, worker_id):
        port = free_port()
        # The last of equal flags counts. samite need not drain, because the worker does.
        command = [self.args.samite, "serve", *self.args.flags, "--metrics", "--drain=0"]
        command += ["--host=127.0.0.1", f"--port={port}"]
        if self.args.name:
            command += [f"--alias={self.args.name}"]
        if self.events:
            command += [f"--kv-events={self.events}", f"--kv-events-block={BLOCK}"]
        try:
            # In a session of its own, samite does not get Ctrl-C before the worker has drained.
            self.process = await asyncio.create_subprocess_exec(
                *command, start_new_session=True, preexec_fn=end_with_parent
            )
        except OSError as error:
            raise EngineShutdown(
                f"--samite {self.args.samite}: {error.strerror}; name the program's path"
            ) from error
        # samite queues requests itself and limits their time.
        self.client = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1 << 20,
        )
        try:
            await asyncio.wait_for(self.wait_ready(), self.args.start)
        except asyncio.TimeoutError:
            raise EngineShutdown(
                f"samite serve: was not ready after {self.args.start:g} s; raise --start"
            ) from None
        props = await self.get("/props")
        if "model_alias" not in props:
            raise EngineShutdown("samite serve: has several models; name one after --")
        self.metrics_text = await self.get("/metrics")
        block, cells = map(int, CELLS.search(self.metrics_text).groups())
        self.cells = block * cells
        self.tasks = [asyncio.create_task(task) for task in (self.watch(), self.read_metrics())]
        name = self.args.name or props["model_alias"]
        self.config = EngineConfig(
            model=self.args.tokenizer or name,
            served_model_name=name,
            llm=self.registration(props),
        )
        return self.config

    async def wait_ready(self):
        while True:
            if self.process.returncode is not None:
                raise EngineShutdown(
                    f"samite serve: exited with {self.process.returncode} before it was ready; "
                    "check the flags after --"
                )
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self.client.get("/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)

    async def get(self, path):
        async with self.client.get(path) as response:
            if response.status != 200:
                raise EngineShutdown(
                    f"samite serve: GET {path} has status {response.status}; "
                    "set no API keys, which the worker does not send"
                )
            return await (
                response.json() if response.content_type == "application/json" else response.text()
            )

    async def watch(self):
        """Ends the worker when samite exits."""
        code = await self.process.wait()
        if self.is_stopping:
            return
        log.error("samite serve: exited with %s; the worker leaves Dynamo and exits with 1", code)
        self.has_failed = True
        os.kill(os.getpid(), signal.SIGTERM)

    async def read_metrics(self):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                self.metrics_text = await self.get("/metrics")
                self.publish_load()
            await asyncio.sleep(METRICS_INTERVAL)

    def publish_load(self):
        if self.snapshots is None:
            return
        values = {name: float(value) for name, value in METRIC.findall(self.metrics_text)}
        usage, asked = values["kv_cache_usage_perc"], values["prefix_cache_queries_total"]
        self.snapshots.publish(
            0,
            ComponentSnapshot(
                kv_used_blocks=round(usage * self.cells / BLOCK),
                kv_total_blocks=self.cells // BLOCK,
                gpu_cache_usage=usage,
                kv_cache_hit_rate=values["prefix_cache_hits_total"] / asked if asked else None,
                dp_rank=0,
            ),
        )

    def component_metrics_dp_ranks(self):
        return [0]

    def attach_snapshot_publisher(self, publisher):
        self.snapshots = publisher

    async def on_endpoint_ready(self, endpoint):
        self.endpoint = endpoint

    async def register_prometheus(self, metrics):
        metrics.register_prometheus_expfmt_callback(lambda: self.metrics_text)

    async def events_of(self, path, body, context):
        """Yields samite's response, or the events of a stream. `abort` ends samite's request."""
        queue = asyncio.Queue()
        reader = asyncio.create_task(self.read(path, body, queue))
        self.readers[context.id()] = reader
        reader.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            if not reader.cancelled():
                reader.result()
        finally:
            del self.readers[context.id()]
            reader.cancel()

    async def read(self, path, body, queue):
        try:
            async with self.client.post(path, json=body) as response:
                if response.status != 200:
                    raise failure(response.status, await response.text())
                if response.content_type == "application/json":
                    queue.put_nowait(await response.json())
                    return
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise failure(event["error"].get("code", 500), json.dumps(event))
                    queue.put_nowait(event)
        except aiohttp.ClientError as error:
            raise EngineShutdown(f"samite serve: closed the connection: {error}") from error

    async def abort(self, context):
        if reader := self.readers.get(context.id()):
            reader.cancel()

    async def unregister(self):
        """Removes the model's card. Dynamo itself leaves it until its lease expires."""
        endpoint, self.endpoint = self.endpoint, None
        if endpoint:
            try:
                await unregister_model(endpoint)
            except Exception as error:
                # Dynamo raises no narrower type. The rest has to be cleaned up all the same.
                log.warning("the model's card cannot be removed: %s", error)

    async def cleanup(self):
        """Waits for the requests that run, then ends samite."""
        self.is_stopping = True
        deadline = asyncio.get_running_loop().time() + self.args.drain
        while self.readers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await self.unregister()
        for task in self.tasks:
            task.cancel()
        if self.process and self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), EXIT_SECONDS)
            except asyncio.TimeoutError:
                log.error(
                    "samite serve: did not exit %s s after SIGTERM; it is killed", EXIT_SECONDS
                )
                self.process.kill()
                await self.process.wait()
        if self.client:
            await self.client.close()


def failure(status, text):
    """Returns the exception for an error of samite, with its message."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text
    if status in (429, 503):
        return WorkerUnavailable(message)
    return InvalidArgument(message) if 400 <= status < 500 else Unknown(message)


class TokenEngine(Samite, LLMEngine):
    """Takes tokens from Dynamo and returns tokens."""

    CONFIG = {"model_input": ModelInput.Tokens}

    def registration(self, props):
        return LlmRegistration(
            context_length=props["default_generation_settings"]["n_ctx"],
            kv_cache_block_size=BLOCK,
            total_kv_blocks=self.cells // BLOCK,
            max_num_seqs=props["total_slots"],
        )

    async def kv_event_sources(self):
        return [ZmqSource(endpoint=self.events)] if self.events else []

    async def generate(self, request, context):
        async for event in self.events_of("/completion", completion_of(request), context):
            yield chunk_of(event)


class PrefillEngine(TokenEngine):
    """Computes prompts, whose KV caches samite offers to decode workers."""

    CONFIG = TokenEngine.CONFIG | {"disaggregation_mode": DisaggregationMode.PREFILL}

    async def on_endpoint_ready(self, endpoint):
        await super().on_endpoint_ready(endpoint)
        # Dynamo removes the endpoint first and the model's card last. Between these, the model is
        # unavailable if this is the last prefill worker. Dynamo's `Worker` hides the loop's method.
        loop = asyncio.get_running_loop()
        type(loop).add_signal_handler(
            loop, signal.SIGTERM, lambda: self.tasks.append(asyncio.create_task(self.leave()))
        )

    async def leave(self):
        await self.unregister()
        os.kill(os.getpid(), signal.SIGINT)

    async def is_quiescent(self):
        return not self.readers

    async def generate(self, request, context):
        try:
            async for event in self.events_of("/completion", prefill_of(request), context):
                yield chunk_of(event) | handoff(event.get("kv_transfer_params"))
        except (EngineShutdown, Unknown, WorkerUnavailable) as error:
            log.warning("%s; a decode worker computes the prompt", error)
            yield {"token_ids": [], "index": 0} | handoff(None)


def handoff(offer):
    """Returns the members of a chunk that Dynamo passes on to a decode worker."""
    # Dynamo would take any other reason as the end of the answer.
    return {"finish_reason": "length", "disaggregated_params": {"kv_transfer_params": offer}}


class DecodeEngine(TokenEngine):
    """Continues prompts of prefill workers. Without a KV cache to fetch, it computes the prompt."""

    # Dynamo's own registration of a decode worker makes the model unavailable without prefill
    # workers. This one gets no requests until `health_check_payload` has replaced it.
    CONFIG = TokenEngine.CONFIG | {"endpoint_types": "embeddings", "enable_local_indexer": False}

    async def health_check_payload(self):
        # Dynamo calls this once, after the registration and before the first request. It would
        # ignore an error.
        try:
            await self.register()
        except Exception as error:
            log.error("the model cannot be registered: %s", error)
            self.has_failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def register(self):
        llm, config = self.config.llm, ModelRuntimeConfig()
        config.context_length = llm.context_length
        config.total_kv_blocks = llm.total_kv_blocks
        config.max_num_seqs = llm.max_num_seqs
        config.tool_call_parser = self.args.tool_call_parser
        config.reasoning_parser = self.args.reasoning_parser
        config.enable_local_indexer = False
        await unregister_model(self.endpoint)
        await asyncio.sleep(UNREGISTERED_SECONDS)
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            self.endpoint,
            self.config.model,
            self.config.served_model_name,
            worker_type=WorkerType.Decode,
            # Dynamo demands a list. This worker itself satisfies it.
            needs=[[WorkerType.Decode]],
            kv_cache_block_size=BLOCK,
            runtime_config=config,
        )

    async def generate(self, request, context):
        body, prefilled = completion_of(request), request.get("prefill_result") or {}
        offer = (prefilled.get("disaggregated_params") or {}).get("kv_transfer_params")
        if offer:
            body["kv_transfer_params"] = offer
        async for event in self.events_of("/completion", body, context):
            chunk = chunk_of(event)
            if offer and event["stop"]:
                # What is fetched is no hit. The prefill worker knows the hits.
                usage = chunk["completion_usage"]
                usage["prompt_tokens_details"] = prefilled.get("prompt_tokens_details")
                del chunk["engine_data"]
            yield chunk


def refuse(name, value):
    """Raises an error for a field that samite or the worker would ignore."""
    if value is not None:
        raise InvalidArgument(f"{name}: is not supported by this worker; omit it")


def completion_of(request):
    """Returns the body of samite's POST /completion.

    Dynamo's frontend handles stop strings and stop tokens, and cancels the request.
    """
    sampling = request.get("sampling_options") or {}
    stop = request.get("stop_conditions") or {}
    output = request.get("output_options") or {}
    refuse("max_thinking_tokens", stop.get("max_thinking_tokens"))
    refuse("prompt_logprobs", output.get("prompt_logprobs"))
    # Dynamo ends the stream of all choices with the first that is complete.
    refuse("n", sampling.get("n") if sampling.get("n") != 1 else None)
    options = {
        **sampling,
        **{name: stop.get(name) for name in ("max_tokens", "min_tokens", "ignore_eos")},
        "cache_salt": (request.get("routing") or {}).get("cache_salt"),
    }
    body = {
        name: value
        for name, value in options.items()
        if value is not None and name != "guided_decoding"
    }
    body |= {
        "prompt": request["token_ids"],
        "stream": True,
        "return_tokens": True,
        "response_fields": FIELDS,
    }
    if output.get("logprobs") is not None:
        # samite computes probabilities for one candidate at least.
        body |= {
            "n_probs": max(1, output["logprobs"]),
            "response_fields": [*FIELDS, "completion_probabilities"],
        }
    return body | constraint_of(sampling.get("guided_decoding") or {})


def prefill_of(request):
    """Returns the body of samite's POST /completion for the prompt only."""
    # What a decode worker refuses is refused here already.
    body = completion_of(request)
    kept = ("prompt", "cache_salt", "return_tokens", "response_fields")
    return {name: body[name] for name in kept if name in body} | {
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }


def gbnf_string(text):
    """Returns a text as a string of samite's grammars."""
    for character, escape in [
        ("\\", r"\\"),
        ('"', r"\""),
        ("\n", r"\n"),
        ("\r", r"\r"),
        ("\t", r"\t"),
    ]:
        text = text.replace(character, escape)
    return f'"{text}"'


def constraint_of(guided):
    """Returns samite's fields for a constraint of the answer's form."""
    guided = {
        name: value for name, value in guided.items() if value is not None and name != "backend"
    }
    if not guided:
        return {}
    if guided.keys() == {"json"}:
        schema = guided["json"]
        return {"json_schema": json.loads(schema) if isinstance(schema, str) else schema}
    if guided.keys() == {"grammar"}:
        return {"grammar": guided["grammar"]}
    if guided.keys() == {"choice"}:
        return {"grammar": "root ::= " + " | ".join(map(gbnf_string, guided["choice"]))}
    raise InvalidArgument(
        f"guided decoding by {', '.join(guided)}: is not supported; "
        "use a JSON schema, a grammar or choices"
    )


def chunk_of(event):
    """Returns Dynamo's chunk for an event of samite's POST /completion."""
    chunk = {"token_ids": event["tokens"], "index": event["index"]}
    if found := event.get("completion_probabilities"):
        chunk["log_probs"] = [token["logprob"] for token in found]
        chunk["top_logprobs"] = [
            [
                {
                    "rank": rank,
                    "token_id": top["id"],
                    "token": top["token"],
                    "bytes": top["bytes"],
                    "logprob": top["logprob"],
                }
                for rank, top in enumerate(token["top_logprobs"], 1)
            ]
            for token in found
        ]
    if event["stop"]:
        prompt, written = event["tokens_evaluated"], event["tokens_predicted"]
        cached = event["timings/cache_n"]
        chunk["finish_reason"] = "length" if event["stop_type"] == "limit" else "stop"
        chunk["completion_usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        # The router compares it with what it expected.
        hit = {"prompt_tokens": prompt, "reused_tokens": cached}
        chunk["engine_data"] = {"kv_cache_hit": hit}
    return chunk


class TextEngine(Samite, RawEngine):
    """Takes bodies of OpenAI's API and returns the events of samite's response."""

    CONFIG = {"model_input": ModelInput.Text}

    def registration(self, _props):
        return None

    async def generate(self, request, context):
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        # Dynamo's frontend joins the events for clients that want one answer.
        body = (
            request
            if request.get("stream")
            else {**request, "stream": True, "stream_options": {"include_usage": True}}
        )
        if salt := (request.get("nvext") or {}).get("cache_salt"):
            body = {**body, "cache_salt": salt}
        async for event in self.events_of(path, body, context):
            yield event


async def run(args):
    engines = {"agg": TokenEngine, "prefill": PrefillEngine, "decode": DecodeEngine}
    kind = engines[args.disaggregation_mode] if args.tokenizer else TextEngine
    engine, config = await kind.from_args(args)
    try:
        await Worker(engine, config).run()
    except Exception as error:
        # Dynamo raises no narrower type, and its message is complete.
        sys.exit(f"worker.py: {error}")
    return engine.has_failed


if __name__ == "__main__":
    # Dynamo handles it. asyncio would end the worker before it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(uvloop.run(run(parse_args(sys.argv[1:]))))
