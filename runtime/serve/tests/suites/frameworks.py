"""Frameworks for agents and structured answers talk to `samite serve` through its APIs.

Usage: frameworks.py PROGRAM [NAME...]. Needs the packages openai-agents, pydantic-ai-slim[openai,anthropic],
instructor and anthropic, smolagents[openai], litellm and inspect-ai; with names (agents, pydantic_ai,
instructor, smolagents, litellm, inspect_ai), only those of the named. No environment can hold all of them:
instructor takes older packages.
"""

import asyncio
import inspect
import json
import os
import sys
import tempfile
import traceback
from typing import Literal

import serving
from serving import KEY

os.environ.update(serving.QUIET)

from pydantic import BaseModel, ConfigDict, Field  # noqa: E402

ASK = "Once upon a time"
LONG = 1024
# Clients keep connections, which belong to a loop.
LOOP = asyncio.new_event_loop()
asyncio.set_event_loop(LOOP)


class Mood(BaseModel):
    """A mood."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]
    n: int = Field(ge=1, le=9)


def with_agents(base):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base + "/v1", api_key=KEY, max_retries=0)
    models = {
        "chat": agents.OpenAIChatCompletionsModel("story", client),
        "responses": agents.OpenAIResponsesModel("story", client),
    }

    @agents.function_tool
    def pick(n: Literal[1, 2, 3]) -> str:
        """Picks a number."""
        picked.append(n)
        return f"It is {n}."

    picked = []
    once = agents.ModelSettings(max_tokens=LONG, tool_choice="pick", parallel_tool_calls=False)
    for kind, model in models.items():
        # The framework takes a cut response for a failure.
        limit = 12 if kind == "chat" else LONG
        short = agents.ModelSettings(max_tokens=limit, temperature=0, include_usage=True)

        def plain(model=model, short=short):
            agent = agents.Agent("a", instructions="Be brief.", model=model, model_settings=short)
            result = agents.Runner.run_sync(agent, ASK)
            assert result.final_output and 0 < result.context_wrapper.usage.output_tokens <= short.max_tokens, result

        def stream(model=model, short=short):
            async def read():
                agent = agents.Agent("a", model=model, model_settings=short)
                run = agents.Runner.run_streamed(agent, ASK)
                texts = []
                async for event in run.stream_events():
                    if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                        texts.append(event.data.delta)
                assert "".join(texts) == run.final_output != "", (texts, run.final_output)
                assert 0 < run.context_wrapper.usage.output_tokens <= short.max_tokens, run.context_wrapper.usage

            LOOP.run_until_complete(read())

        def structured(model=model):
            settings = agents.ModelSettings(max_tokens=LONG)
            agent = agents.Agent("a", model=model, output_type=Mood, model_settings=settings)
            assert isinstance(agents.Runner.run_sync(agent, ASK).final_output, Mood)

        def tool(model=model):
            # After a call, the framework lets the model decide.
            agent = agents.Agent("a", model=model, tools=[pick], model_settings=once)
            picked.clear()
            result = agents.Runner.run_sync(agent, ASK, max_turns=9)
            assert picked and picked[0] in (1, 2, 3) and len(result.raw_responses) > 1 and result.final_output, result

        def streamed_tool(model=model):
            async def read():
                agent = agents.Agent("a", model=model, tools=[pick], model_settings=once)
                run = agents.Runner.run_streamed(agent, ASK, max_turns=9)
                names = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
                assert names[:2] == ["tool_called", "tool_output"] and run.final_output, names

            picked.clear()
            LOOP.run_until_complete(read())
            assert picked

        def handoff(model=model, short=short):
            other = agents.Agent("other", model=model, model_settings=short)
            settings = agents.ModelSettings(max_tokens=LONG, tool_choice="required", parallel_tool_calls=False)
            agent = agents.Agent("a", model=model, handoffs=[other], model_settings=settings)
            assert agents.Runner.run_sync(agent, ASK).last_agent is other

        def conversation(model=model, short=short):
            agent = agents.Agent("a", model=model, tools=[pick], model_settings=once)
            first = agents.Runner.run_sync(agent, ASK, max_turns=9)
            asked = [*first.to_input_list(), {"role": "user", "content": "And then?"}]
            assert agents.Runner.run_sync(agents.Agent("a", model=model, model_settings=short), asked).final_output

        for case in (plain, stream, structured, tool, streamed_tool, handoff, conversation):
            yield f"{kind}, {case.__name__}", case


def with_pydantic_ai(base):
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.ollama import OllamaModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.ollama import OllamaProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=base + "/v1", api_key=KEY)
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=base, api_key=KEY, max_retries=0))
    models = {
        "chat": OpenAIChatModel("story", provider=openai),
        "responses": OpenAIResponsesModel("story", provider=openai),
        # The framework knows by the names of Anthropic's models which of them take a schema.
        "anthropic": AnthropicModel("story", provider=anthropic, profile={"supports_json_schema_output": True}),
        "ollama": OllamaModel("story", provider=OllamaProvider(base_url=base + "/v1", api_key=KEY)),
    }
    short = {"max_tokens": 12, "temperature": 0}
    long = {"max_tokens": LONG, "parallel_tool_calls": False}
    for kind, model in models.items():

        def plain(model=model):
            result = Agent(model, instructions="Be brief.").run_sync(ASK, model_settings=short)
            assert result.output and result.usage.output_tokens == 12, result.usage

        def stream(model=model):
            async def read():
                async with Agent(model).run_stream(ASK, model_settings=short) as run:
                    texts = [text async for text in run.stream_text(delta=True, debounce_by=None)]
                    assert "".join(texts) == await run.get_output() != "", texts
                    assert run.usage.output_tokens == 12, run.usage

            LOOP.run_until_complete(read())

        def forced_output(model=model):
            result = Agent(model, output_type=ToolOutput(Mood)).run_sync(ASK, model_settings=long)
            assert isinstance(result.output, Mood)

        def native_output(model=model):
            result = Agent(model, output_type=NativeOutput(Mood)).run_sync(ASK, model_settings=long)
            assert isinstance(result.output, Mood)

        def choice_of_outputs(model=model):
            class Word(BaseModel):
                model_config = ConfigDict(extra="forbid")
                word: Literal["yes", "no"]

            result = Agent(model, output_type=[ToolOutput(Mood), ToolOutput(Word)]).run_sync(ASK, model_settings=long)
            assert isinstance(result.output, Mood | Word)

        def streamed_output(model=model):
            async def read():
                async with Agent(model, output_type=ToolOutput(Mood)).run_stream(ASK, model_settings=long) as run:
                    *_, last = [output async for output in run.stream_output(debounce_by=None)]
                    assert isinstance(last, Mood), last

            LOOP.run_until_complete(read())

        def tool(model=model):
            picked = []

            def settings(context):
                first = {"tool_choice": ["pick"]} if context.run_step <= 1 else {"tool_choice": "none"}
                return {**long, **first}

            agent = Agent(model, model_settings=settings)

            @agent.tool_plain
            def pick(n: Literal[1, 2, 3]) -> str:
                """Picks a number."""
                picked.append(n)
                return f"It is {n}."

            result = agent.run_sync(ASK)
            assert len(picked) == 1 and result.output and result.usage.requests == 2, (picked, result.usage)
            after = Agent(model).run_sync("And then?", message_history=result.all_messages(), model_settings=short)
            assert after.output

        def some_tools(model=model):
            called = []

            def settings(context):
                return {**long, "tool_choice": ["b", "c"] if context.run_step <= 1 else "none"}

            agent = Agent(model, model_settings=settings)
            for name in "abc":

                def call(n: Literal[1, 2, 3], name=name) -> str:
                    called.append(name)
                    return f"It is {n}."

                call.__signature__ = inspect.Signature([inspect.Parameter("n", 1, annotation=Literal[1, 2, 3])])
                agent.tool_plain(call, name=name, description="Picks a number.")
            assert agent.run_sync(ASK).output and len(called) == 1 and called[0] in "bc", called

        def probabilities(model=model):
            settings = {**short, "openai_logprobs": True, "openai_top_logprobs": 2}
            result = Agent(model).run_sync(ASK, model_settings=settings)
            (part,) = result.response.parts
            found = (part.provider_details or result.response.provider_details)["logprobs"]
            assert len(found) == 12 and all(len(one["top_logprobs"]) == 2 for one in found), found

        cases = [plain, stream, forced_output, native_output, choice_of_outputs, streamed_output, tool, some_tools]
        if kind in ("chat", "responses"):
            cases.append(probabilities)
        for case in cases:
            yield f"{kind}, {case.__name__}", case

    def prompted_output():
        # The framework asks for `json_object`; what is in it, is the model's decision.
        class Anything(BaseModel):
            """Anything."""

        agent = Agent(models["chat"], output_type=PromptedOutput(Anything))
        assert isinstance(agent.run_sync(ASK, model_settings=long).output, Anything)

    yield "chat, prompted_output", prompted_output


def with_instructor(base):
    import anthropic
    import instructor
    import openai
    from instructor import Mode

    client = openai.OpenAI(base_url=base + "/v1", api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": ASK}]
    asked = {"model": "story", "messages": messages, "response_model": Mood, "max_retries": 1}
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        # The fields have different names.
        limit = {"max_output_tokens": LONG} if mode == Mode.RESPONSES_TOOLS else {"max_tokens": LONG}

        def whole(mode=mode, limit=limit):
            answer, raw = instructor.from_openai(client, mode=mode).create_with_completion(**asked, **limit)
            assert isinstance(answer, Mood) and raw.usage.total_tokens > 0, raw

        yield f"{mode.name}, whole", whole

        def partial(mode=mode, limit=limit):
            *_, last = instructor.from_openai(client, mode=mode).create_partial(**asked, **limit)
            assert last.mood in ("good", "bad") and 1 <= last.n <= 9, last

        if mode != Mode.RESPONSES_TOOLS:
            yield f"{mode.name}, partial", partial

    def anthropic_tools():
        client = anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0)
        wrapped = instructor.from_anthropic(client, mode=Mode.ANTHROPIC_TOOLS)
        answer, raw = wrapped.create_with_completion(**asked, max_tokens=LONG)
        assert isinstance(answer, Mood) and raw.usage.output_tokens > 0, raw

    yield "ANTHROPIC_TOOLS, whole", anthropic_tools

    def one_call():
        # A tool that is named is called exactly once. This model would rather call again than end.
        wrapped = instructor.from_openai(client, mode=Mode.TOOLS)
        assert isinstance(wrapped.create(**asked, max_tokens=LONG, logit_bias={"2": -100}), Mood)

    yield "TOOLS, one call", one_call

    def asynchronous():
        async def read():
            wrapped = instructor.from_openai(openai.AsyncOpenAI(base_url=base + "/v1", api_key=KEY, max_retries=0))
            return await asyncio.gather(*[wrapped.create(**asked, max_tokens=LONG) for _ in range(4)])

        assert all(isinstance(answer, Mood) for answer in LOOP.run_until_complete(read()))

    yield "TOOLS, four at a time", asynchronous


def with_smolagents(base):
    import smolagents

    place = {"model_id": "story", "api_base": base + "/v1", "api_key": KEY}
    model = smolagents.OpenAIModel(**place, max_tokens=LONG, parallel_tool_calls=False)
    plain_model = smolagents.OpenAIModel(**place, max_tokens=12)
    messages = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]

    @smolagents.tool
    def pick(n: int) -> str:
        """Picks a number.

        Args:
            n: The number.
        """
        picked.append(n)
        return f"It is {n}."

    picked = []

    def plain():
        message = plain_model.generate(messages)
        assert message.content and message.token_usage.output_tokens == 12, message

    def stream():
        parts = list(plain_model.generate_stream(messages))
        usage = [part.token_usage for part in parts if part.token_usage]
        assert "".join(part.content or "" for part in parts) and usage[-1].output_tokens == 12, parts

    def structured():
        schema = {"name": "mood", "schema": Mood.model_json_schema(), "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        long_model = smolagents.OpenAIModel(**place, max_tokens=LONG)
        Mood.model_validate_json(long_model.generate(messages, response_format=form).content)

    def call():
        message = model.generate(messages, tools_to_call_from=[pick])
        assert message.tool_calls[0].function.name == "pick", message

    def agent():
        # Every step has to call, and the last one answers without.
        agent = smolagents.ToolCallingAgent([pick], model, verbosity_level=0)
        result = agent.run(ASK, max_steps=3, return_full_result=True)
        steps = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
        assert steps and steps[0].tool_calls and result.token_usage.output_tokens > 0, steps

    def code_agent():
        # Its code is the model's: stories are no Python.
        agent = smolagents.CodeAgent([], model, use_structured_outputs_internally=True, verbosity_level=0)
        assert agent.run(ASK, max_steps=1, return_full_result=True).token_usage.output_tokens > 0

    for case in (plain, stream, structured, call, agent, code_agent):
        yield case.__name__, case


def with_litellm(base):
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    openai = {"api_base": base + "/v1", "api_key": KEY, "num_retries": 0}
    messages = [{"role": "user", "content": ASK}]
    function = {"name": "pick", "description": "Picks", "parameters": Mood.model_json_schema()}
    tool = {"type": "function", "function": function}
    kinds = {
        "openai/story": openai,
        "hosted_vllm/story": openai,
        "anthropic/story": {**openai, "api_base": base},
        "ollama_chat/story": {**openai, "api_base": base},
    }
    for name, place in kinds.items():
        asked = {"model": name, "messages": messages, **place}

        def plain(asked=asked):
            whole = litellm.completion(**asked, max_tokens=12, temperature=0)
            assert whole.choices[0].message.content and whole.usage.completion_tokens == 12, whole
            assert whole.choices[0].finish_reason == "length", whole

        def stream(asked=asked):
            whole = litellm.completion(**asked, max_tokens=12, temperature=0)
            more = {"stream": True, "stream_options": {"include_usage": True}}
            parts = list(litellm.completion(**asked, max_tokens=12, temperature=0, **more))
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert text == whole.choices[0].message.content, (text, whole)
            assert parts[-1].usage.completion_tokens == 12, parts[-1]

        def structured(asked=asked):
            answer = litellm.completion(**asked, max_tokens=LONG, response_format=Mood)
            Mood.model_validate_json(answer.choices[0].message.content)

        def call(asked=asked):
            choice = {"type": "function", "function": {"name": "pick"}}
            more = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": LONG}
            first = litellm.completion(**asked, **more).choices[0]
            call = first.message.tool_calls[0]
            assert first.finish_reason == "tool_calls" and call.function.name == "pick", first
            Mood.model_validate_json(call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
            after = {**asked, "messages": [*messages, first.message, result]}
            assert litellm.completion(**after, tools=[tool], max_tokens=12).choices
            parts = list(litellm.completion(**asked, **more, stream=True))
            joined = litellm.stream_chunk_builder(parts, messages=messages).choices[0].message
            Mood.model_validate_json(joined.tool_calls[0].function.arguments)

        def asynchronous(asked=asked):
            async def read():
                return await asyncio.gather(*[litellm.acompletion(**asked, max_tokens=12) for _ in range(4)])

            assert all(answer.choices[0].message.content for answer in LOOP.run_until_complete(read()))

        cases = [plain, stream, structured, call, asynchronous]
        if name.startswith("ollama"):
            # ollama's API has no tool_choice.
            cases.remove(call)
        for case in cases:
            yield f"{name}, {case.__name__}", case

    def responses():
        asked = {"model": "openai/story", "input": ASK, "max_output_tokens": 12, **openai}
        assert litellm.responses(**asked).output[0].content[0].text
        kinds = [event.type for event in litellm.responses(**asked, stream=True)]
        ends = ("response.completed", "response.incomplete")
        assert "response.output_text.delta" in kinds and kinds[-1] in ends, kinds

    yield "responses", responses

    def embedding():
        answer = litellm.embedding("openai/story", input=["a cat", "a dog"], **openai)
        assert len(answer.data) == 2 and answer.usage.prompt_tokens > 0, answer

    yield "embedding", embedding

    def too_long():
        long = [{"role": "user", "content": "once " * 20000}]
        try:
            litellm.completion(model="openai/story", messages=long, **openai)
        except litellm.ContextWindowExceededError:
            return
        raise AssertionError("a prompt that does not fit was taken")

    yield "a prompt that does not fit", too_long

    def wrong_key():
        try:
            litellm.completion(model="openai/story", messages=messages, **{**openai, "api_key": "wrong"})
        except litellm.AuthenticationError:
            return
        raise AssertionError("a wrong key was taken")

    yield "a wrong key", wrong_key


def with_inspect_ai(base):
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, ResponseSchema
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import ToolFunction, tool
    from inspect_ai.util import json_schema

    # The framework reads where its provider "openai-api/samite" is from the environment.
    os.environ.update(SAMITE_API_KEY=KEY, SAMITE_BASE_URL=base + "/v1")

    @tool
    def pick():
        async def execute(n: int) -> str:
            """Picks a number.

            Args:
                n: The number.
            """
            picked.append(n)
            return f"It is {n}."

        return execute

    # Samples are read when they are needed.
    folder = tempfile.TemporaryDirectory()
    picked = []
    samples = [Sample(input=ASK, target="a"), Sample(input="Hello", target="good")]
    schema = ResponseSchema(name="mood", json_schema=json_schema(Mood))
    for kind, arguments in {"chat": {}, "responses": {"responses_api": True}}.items():

        def evaluated(solver, arguments=arguments, **config):
            task = inspect_ai.Task(samples, solver=solver, scorer=includes(), config=GenerateConfig(**config))
            place = {"model": "openai-api/samite/story", "model_args": arguments, "log_dir": folder.name}
            (log,) = inspect_ai.eval(task, display="none", **place)
            assert log.status == "success" and len(log.samples) == 2, log.error
            assert all(usage.output_tokens > 0 for usage in log.stats.model_usage.values()), log.stats
            return log.samples

        def plain(evaluated=evaluated):
            assert all(sample.output.completion for sample in evaluated([generate()], max_tokens=12, temperature=0))

        def structured(evaluated=evaluated):
            for sample in evaluated([generate()], max_tokens=LONG, response_schema=schema):
                # The framework's schemas have no limits of numbers.
                assert json.loads(sample.output.completion)["mood"] in ("good", "bad"), sample.output

        def call(evaluated=evaluated):
            picked.clear()
            solver = [use_tools(pick(), tool_choice=ToolFunction("pick")), generate(tool_calls="single")]
            for sample in evaluated(solver, max_tokens=LONG, parallel_tool_calls=False):
                assert sample.messages[-1].role == "tool" and sample.messages[-1].error is None, sample.messages
            assert len(picked) == 2

        for case in (plain, structured, call):
            yield f"{kind}, {case.__name__}", case


FRAMEWORKS = {
    "agents": with_agents,
    "pydantic_ai": with_pydantic_ai,
    "instructor": with_instructor,
    "smolagents": with_smolagents,
    "litellm": with_litellm,
    "inspect_ai": with_inspect_ai,
}


def main():
    program, *names = sys.argv[1:]
    passed = failed = 0
    with serving.running(program, "--alias", "story", "--embeddings") as base:
        for framework in names or FRAMEWORKS:
            for name, case in FRAMEWORKS[framework](base):
                try:
                    case()
                    passed += 1
                except Exception:
                    failed += 1
                    print(f"{framework}, {name}:")
                    traceback.print_exc(limit=-3, file=sys.stdout)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


main()
