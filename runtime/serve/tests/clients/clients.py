"""Real clients talk to `samite serve` with the model that is part of the program.

Usage: clients.py PROGRAM [FOLDER]. Needs the packages openai, anthropic, ollama, langchain-openai,
llm, pyzmq and msgspec. FOLDER has node_modules with the clients of Node, which are tried, too.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import anthropic
import msgspec
import ollama
import openai
import zmq

KEY = "secret"
TOOL = {
    "name": "pick",
    "description": "Picks a number",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"type": "string", "enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Once upon a time"}]


def with_openai(base):
    client = openai.OpenAI(base_url=base + "/v1", api_key=KEY, max_retries=0)
    assert client.models.list().data[0].object == "model"
    whole = client.chat.completions.create(model="x", messages=ASK, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens == 12
    assert "".join(token.token for token in whole.choices[0].logprobs.content) == text
    stream = client.chat.completions.create(
        model="x", messages=ASK, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    parts, usage = [], None
    for chunk in stream:
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(parts) == text and usage.completion_tokens == 12
    # The usual loop.
    plain = client.chat.completions.create(model="x", messages=ASK, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in plain) == text
    completion = client.completions.create(model="x", prompt="Once upon a time", max_tokens=8, n=2, seed=1)
    assert len(completion.choices) == 2
    shaped = client.chat.completions.create(
        model="x",
        messages=ASK,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA, "strict": True}},
    )
    assert json.loads(shaped.choices[0].message.content)["mood"] in ("good", "bad")
    tools = [{"type": "function", "function": TOOL}]
    called = client.chat.completions.create(model="x", messages=ASK, max_tokens=256, tools=tools, tool_choice="required", parallel_tool_calls=False)
    call = called.choices[0].message.tool_calls[0]
    assert called.choices[0].finish_reason == "tool_calls" and 1 <= json.loads(call.function.arguments)["n"] <= 9
    stream = client.chat.completions.create(
        model="x", messages=ASK, max_tokens=256, tools=tools, tool_choice="required", parallel_tool_calls=False, stream=True
    )
    parts = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or []]
    assert "".join(part.function.name or "" for part in parts) == "pick"
    assert 1 <= json.loads("".join(part.function.arguments or "" for part in parts))["n"] <= 9
    again = ASK + [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    assert client.chat.completions.create(model="x", messages=again, max_tokens=4, tools=tools).choices
    response = client.responses.create(model="x", input="Once upon a time", max_output_tokens=12, temperature=0)
    assert response.output_text == text
    with client.responses.stream(model="x", input="Once upon a time", max_output_tokens=12, temperature=0) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    vectors = client.embeddings.create(model="x", input=["a cat", "a dog"])
    assert len(vectors.data) == 2 and abs(sum(x * x for x in vectors.data[0].embedding) - 1) < 1e-3
    for wrong, error in [
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "once " * 20000}]}, openai.BadRequestError),
    ]:
        try:
            client.chat.completions.create(**{"model": "x", "messages": ASK, **wrong})
            raise AssertionError(f"{wrong} was taken")
        except error:
            pass
    try:
        openai.OpenAI(base_url=base + "/v1", api_key="wrong", max_retries=0).models.list()
        raise AssertionError("a wrong key was taken")
    except openai.AuthenticationError:
        pass
    return text


def with_anthropic(base, text):
    client = anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0)
    whole = client.messages.create(model="x", max_tokens=12, messages=ASK, extra_body={"temperature": 0})
    assert whole.content[0].text == text and whole.stop_reason == "max_tokens"
    with client.messages.stream(model="x", max_tokens=12, messages=ASK, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == 12
    assert client.messages.count_tokens(model="x", messages=ASK).input_tokens > 3
    events = client.messages.create(model="x", max_tokens=12, messages=ASK, extra_body={"temperature": 0}, stream=True)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == text
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    with client.messages.stream(model="x", max_tokens=256, messages=ASK, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
        called = stream.get_final_message()
    block = next(block for block in called.content if block.type == "tool_use")
    assert called.stop_reason == "tool_use" and 1 <= block.input["n"] <= 9
    again = ASK + [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "7"}]},
    ]
    assert client.messages.create(model="x", max_tokens=4, messages=again, tools=[tool]).content
    try:
        client.messages.create(model="x", max_tokens=-5, messages=ASK)
        raise AssertionError("max_tokens -5 was taken")
    except anthropic.BadRequestError:
        pass


def with_ollama(base, text):
    client = ollama.Client(host=base, headers={"Authorization": "Bearer " + KEY})
    name = client.list().models[0].model
    assert "completion" in client.show(name).capabilities
    options = {"num_predict": 12, "temperature": 0}
    whole = client.chat(model=name, messages=ASK, options=options)
    assert whole.message.content == text and whole.eval_count == 12 and whole.done_reason == "length"
    parts = client.chat(model=name, messages=ASK, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == text
    assert client.generate(model=name, prompt="Once upon a time", options=options).response == text
    shaped = client.chat(model=name, messages=ASK, format=SCHEMA, options={"num_predict": 64})
    assert json.loads(shaped.message.content)["mood"] in ("good", "bad")
    # Whether it calls is the model's decision.
    tools = [{"type": "function", "function": TOOL}]
    calls = [{"function": {"name": "pick", "arguments": {"n": 7}}}]
    after = ASK + [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "tool_name": "pick", "content": "7"}]
    for asked in (ASK, after):
        assert client.chat(model=name, messages=asked, tools=tools, options=options).done
        parts = list(client.chat(model=name, messages=asked, tools=tools, options=options, stream=True))
        assert parts[-1].done and parts[-1].eval_count <= 12
    assert len(client.embed(model=name, input=["a", "b"]).embeddings) == 2
    assert len(client.embed(model=name, input="a long text " * 5000).embeddings) == 1
    try:
        client.chat(model="not-there", messages=ASK)
        raise AssertionError("a model that is not there answered")
    except ollama.ResponseError as error:
        assert error.status_code == 404
    try:
        client.chat(model=name, messages=ASK, options={"top_p": 7})
        raise AssertionError("top_p 7 was taken")
    except ollama.ResponseError as error:
        assert error.status_code == 400


def with_langchain(base, text):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Mood(BaseModel):
        """A mood."""

        # A model that tells stories would write further members for ever.
        model_config = {"extra": "forbid"}
        mood: str = Field(pattern="^(good|bad)$")

    model = ChatOpenAI(model="x", base_url=base + "/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=12)
    ask = [HumanMessage("Once upon a time")]
    assert model.invoke(ask).content == text
    parts = list(model.stream(ask, stream_usage=True))
    usage = [part.usage_metadata for part in parts if part.usage_metadata]
    assert "".join(part.content for part in parts) == text and usage[-1]["output_tokens"] == 12
    long = model.model_copy(update={"max_tokens": 256})
    called = long.bind_tools([{"type": "function", "function": TOOL}], tool_choice="pick", parallel_tool_calls=False).invoke(ask)
    parts = long.bind_tools([{"type": "function", "function": TOOL}], tool_choice="pick", parallel_tool_calls=False).stream(ask)
    joined = functools.reduce(lambda whole, part: whole + part, parts)
    assert 1 <= joined.tool_calls[0]["args"]["n"] <= 9, joined
    call = called.tool_calls[0]
    assert call["name"] == "pick" and 1 <= call["args"]["n"] <= 9, called
    after = model.bind_tools([{"type": "function", "function": TOOL}]).invoke([*ask, called, ToolMessage("7", tool_call_id=call["id"])])
    assert after.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")
    for method in ("json_schema", "function_calling"):
        shaped = long.with_structured_output(Mood, method=method).invoke(ask)
        assert shaped.mood in ("good", "bad"), shaped
    assert len(model.batch([ask] * 6)) == 6
    try:
        model.bind(temperature=-1).invoke(ask)
        raise AssertionError("temperature -1 was taken")
    except openai.BadRequestError as error:
        assert "temperature" in str(error)


def with_llm(base, text):
    import llm
    from llm.default_plugins.openai_models import Chat

    model = Chat("x", model_name="x", api_base=base + "/v1", supports_tools=True, supports_schema=True)
    model.key = KEY
    options = {"temperature": 0, "max_tokens": 12}
    assert model.prompt("Once upon a time", stream=False, **options).text() == text
    assert "".join(model.prompt("Once upon a time", stream=True, **options)) == text
    shaped = model.prompt("Once upon a time", schema=SCHEMA, stream=False, max_tokens=64)
    assert json.loads(shaped.text())["mood"] in ("good", "bad")
    try:
        model.prompt("Once upon a time", stream=False, temperature=0, max_tokens=-5).text()
        raise AssertionError("max_tokens -5 was taken")
    except Exception as error:
        assert "max_tokens" in str(error), error


def with_node(base, folder, text):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clients.mjs")
    environment = {**os.environ, "BASE": base, "KEY": KEY, "TEXT": text}
    subprocess.run(["node", script], cwd=folder, env=environment, check=True, timeout=120)


class Blocks:
    """What a router learns of a server's cache from its events over ZeroMQ."""

    def __init__(self, publisher, replay):
        context = zmq.Context.instance()
        self.subscriber = context.socket(zmq.SUB)
        self.subscriber.connect(publisher)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.asker = context.socket(zmq.DEALER)
        self.asker.connect(replay)
        self.texts, self.next = {}, 0

    def take(self, number, payload):
        assert number == self.next, (number, self.next)
        self.next += 1
        time_of, events, rank = msgspec.msgpack.decode(payload)
        assert abs(time_of - time.time()) < 60 and rank == 0
        for event in events:
            match event:
                case {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": parent,
                    "token_ids": tokens,
                    "block_size": 8,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                }:
                    before = self.texts[parent] if parent is not None else []
                    for at, number in enumerate(hashes):
                        assert number not in self.texts
                        before = before + tokens[8 * at : 8 * at + 8]
                        self.texts[number] = before
                case {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}:
                    for number in hashes:
                        del self.texts[number]
                case {"type": "AllBlocksCleared"}:
                    self.texts.clear()
                case other:
                    raise AssertionError(other)

    def listen(self):
        while self.subscriber.poll(500):
            topic, number, payload = self.subscriber.recv_multipart()
            assert topic == b"kv@pod@m", topic
            number = int.from_bytes(number, "big")
            # What was asked for again has come before.
            if number >= self.next:
                self.take(number, payload)

    def catch_up(self):
        self.asker.send_multipart([b"", self.next.to_bytes(8, "big")])
        while self.asker.poll(5000):
            empty, topic, number, payload = self.asker.recv_multipart()
            number = int.from_bytes(number, "big", signed=True)
            if number == -1:
                assert empty == topic == payload == b""
                return
            assert topic == b"kv@pod@m", topic
            self.take(number, payload)
        raise AssertionError("nobody answers")

    def known(self, tokens):
        """How many tokens of a text are in whole blocks of the cache."""
        known = list(self.texts.values())
        return max((len(text) for text in known if tokens[: len(text)] == text), default=0)


def with_zeromq(program):
    ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    events = ["--kv-events", ports[0], "--kv-events-replay", ports[1], "--kv-events-topic", "kv@pod@m", "--kv-events-block", "8"]
    flags = ["serve", "--port", "0", "--api-key", KEY, "-c", "1024", "--parallel", "2", "--cached-prefixes", "2", *events]
    with running(program, flags) as (server, base):

        def ask(path, body):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
            request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
            return json.load(urllib.request.urlopen(request, timeout=60))

        def complete(prompt, **more):
            return ask("/completion", {"prompt": prompt, "n_predict": 12, "temperature": 0, "return_tokens": True, **more})

        def tokens_of(text):
            return ask("/tokenize", {"content": text, "add_special": True})["tokens"]

        blocks = Blocks(*ports)
        prompts = [" ".join(f"{word} {number}" for number in range(20)) for word in ("cat", "dog", "tree")]
        for number, prompt in enumerate([prompts[0], prompts[0] + " again", prompts[1], prompts[2], prompts[0]]):
            expected = blocks.known(tokens_of(prompt))
            answer = complete(prompt)
            cached = answer["timings"]["cache_n"]
            # A whole prompt is computed but for its last token, at most.
            assert min(expected, len(tokens_of(prompt)) - 1) <= cached < expected + 8, (number, expected, cached)
            blocks.catch_up() if number % 2 == 0 else blocks.listen()
            written = tokens_of(prompt) + answer["tokens"][:-1]
            assert blocks.known(written) == len(written) // 8 * 8
        assert len(blocks.texts) > 8
        server.terminate()
        assert server.wait(timeout=20) == 0
        blocks.listen()
        assert not blocks.texts, "the end clears all"


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def running(program, flags):
    """A server, and where it is."""
    server = subprocess.Popen([program, *flags], stderr=subprocess.PIPE, text=True)
    try:
        base = None
        for line in server.stderr:
            if " is served at " in line:
                base = line.split(" is served at ")[1].strip().rstrip("/")
                break
        assert base, "the server did not start"
        yield server, base
    finally:
        server.kill()


def main():
    program = sys.argv[1]
    flags = ["serve", "--port", "0", "--api-key", KEY, "--embeddings", "-c", "2048", "--parallel", "4", "--chat-template", "chatml"]
    with_zeromq(program)
    with running(program, flags) as (server, base):
        text = with_openai(base)
        with_anthropic(base, text)
        with_ollama(base, text)
        with_langchain(base, text)
        with_llm(base, text)
        if len(sys.argv) > 2:
            with_node(base, sys.argv[2], text)
        assert json.load(urllib.request.urlopen(base + "/health"))["status"] == "ok"
        server.terminate()
        start = time.time()
        assert server.wait(timeout=20) == 0, server.returncode
        print(f"openai {openai.__version__}, anthropic {anthropic.__version__}, ollama, LangChain, llm and pyzmq are served; the end took {time.time() - start:.1f} s")


main()
