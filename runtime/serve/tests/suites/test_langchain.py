"""LangChain's standard tests of chat models, with its clients of OpenAI, Anthropic, ollama and llama-server.

Usage: SAMITE=PROGRAM pytest -p no:cacheprovider test_langchain.py. Needs the packages langchain-tests,
langchain-openai, langchain-anthropic, langchain-ollama and langchain-llama-cpp. SAMITE_MODEL may name a model.

The model understands nothing. So a schema allows only the arguments that its question asks for, some texts
have a length, an agent's first call is forced, and a forced call is the only one.
"""

import functools
import operator
import os
from typing import Annotated, Literal

import httpx
import langchain_tests.integration_tests.chat_models as suite
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_llama_cpp import ChatLlama
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel, Field
from serving import KEY
from typing_extensions import TypedDict

UNFORCED = "ollama's API has no tool_choice, so the model would have to decide to call"
# What is not the server's, and why.
EXCLUDED = {
    "test_json_mode": "JSON mode promises JSON, but not which members it has",
    "test_serdes": "compares the client's class with a stored snapshot",
    "test_init_time": "measures the client",
    "TestOllamaAlone.test_standard_params_model_override": "the client names the model that it was made with",
    "TestLlama.test_tool_choice": "the client demands any tool instead of the named one",
    "TestOllama.test_tool_calling": UNFORCED,
    "TestOllama.test_tool_calling_async": UNFORCED,
    "TestOllama.test_tool_calling_with_no_arguments": UNFORCED,
    "TestOllama.test_bind_runnables_as_tools": UNFORCED,
    "TestOllama.test_unicode_tool_call_integration": UNFORCED,
    "TestOllama.test_agent_loop": UNFORCED,
}

Short = Annotated[str, Field(max_length=24)]


class Three(BaseModel):
    input: Literal[3]


@tool(args_schema=Three)
def magic_function(_input: int) -> int:
    """Apply a magic function to an input."""
    return _input + 2


@tool
def unicode_customer(customer_name: Literal["你好 こんにちは"], description: Short) -> str:
    """Tool for creating a customer with Unicode name."""
    return f"Created customer: {customer_name} - {description}"


class Joke(BaseModel):
    """Joke to tell user."""

    model_config = {"extra": "forbid"}
    setup: Short
    punchline: Short


class JokeDict(TypedDict):
    """Joke to tell user."""

    setup: Annotated[str, ..., "question"]
    punchline: Annotated[str, ..., "answer"]


def joke_class(kind):
    def valid(result):
        # The suite does not look at what this returns.
        assert isinstance(result, Joke) if kind == "pydantic" else set(result) <= {"setup", "punchline"}, result
        return True

    return {"pydantic": Joke, "typeddict": JokeDict, "json_schema": Joke.model_json_schema()}[kind], valid


def base():
    # Models are made before there is a server, too, but not asked.
    return os.environ.get("SAMITE_BASE", "http://127.0.0.1:1")


def with_key(request):
    request.headers["Authorization"] = "Bearer " + KEY
    return request


class OpenAI:
    chat_model_class = ChatOpenAI

    @property
    def chat_model_params(self):
        # The client asks for usage only of OpenAI's own server.
        return {"model": "story", "base_url": base() + "/v1", "api_key": KEY, "max_retries": 0, "stream_usage": True}


class Responses(OpenAI):
    @property
    def chat_model_params(self):
        return {**super().chat_model_params, "use_responses_api": True}


class Anthropic:
    chat_model_class = ChatAnthropic
    supports_json_mode = False

    @property
    def chat_model_params(self):
        return {"model": "story", "base_url": base(), "api_key": KEY, "max_retries": 0}


class Ollama:
    chat_model_class = ChatOllama
    has_tool_choice = False
    # The client refuses them itself.
    supports_anthropic_inputs = False
    supported_usage_metadata_details = {"invoke": [], "stream": []}

    @property
    def chat_model_params(self):
        return {"model": "story", "base_url": base(), "client_kwargs": {"headers": {"Authorization": "Bearer " + KEY}}}


class Llama:
    chat_model_class = ChatLlama

    @property
    def chat_model_params(self):
        clients = {"http_client": httpx.Client(auth=with_key), "http_async_client": httpx.AsyncClient(auth=with_key)}
        return {"model": "story", "base_url": base(), "max_retries": 0, **clients}


class Standard(ChatModelIntegrationTests):
    model_override_value = "tale"
    supports_anthropic_inputs = True
    supports_json_mode = True
    supported_usage_metadata_details = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream=False):
        model = self.chat_model_class(**self.chat_model_params)
        prompt = "A prompt that comes twice. " * 20
        model.invoke(prompt)
        answer = functools.reduce(operator.add, model.stream(prompt)) if stream else model.invoke(prompt)
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 20, answer.usage_metadata
        return answer

    @pytest.fixture(autouse=True)
    def for_any_model(self, monkeypatch, request):
        name = request.node.originalname
        if reason := EXCLUDED.get(name) or EXCLUDED.get(f"{type(self).__name__}.{name}"):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
        monkeypatch.setattr(suite, "magic_function", magic_function)
        monkeypatch.setattr(suite, "unicode_customer", unicode_customer)
        monkeypatch.setattr(suite, "_get_joke_class", joke_class)
        kind = self.chat_model_class
        bind_tools = kind.bind_tools

        def bind_one(self, tools, *, tool_choice=None, **more):
            if tool_choice or name == "test_agent_loop":
                more = {"tool_choice": tool_choice or "any", "parallel_tool_calls": False, **more}
            return bind_tools(self, tools, **more)

        if kind is not ChatOllama:
            monkeypatch.setattr(kind, "bind_tools", bind_one)


class Mood(BaseModel):
    """A mood."""

    model_config = {"extra": "forbid"}
    mood: Literal["good", "bad"]
    # Anthropic's client leaves bounds out.
    n: Literal[1, 2, 3]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("client", [OpenAI, Responses, Anthropic, Ollama, Llama])
def test_method(client, method):
    """Each client's ways to a structured answer; the suite tries only the default one."""
    if client is Ollama and method == "function_calling":
        pytest.skip(UNFORCED)
    kind = client()
    model = kind.chat_model_class(**kind.chat_model_params).with_structured_output(Mood, method=method)
    assert isinstance(model.invoke("Once upon a time"), Mood)
    *_, last = model.stream("Once upon a time")
    assert isinstance(last, Mood)


class Alone(ChatModelUnitTests):
    """What needs no server: that the clients can be made as the tests above make them."""

    @pytest.fixture(autouse=True)
    def excluded(self, request):
        name = request.node.originalname
        if reason := EXCLUDED.get(name) or EXCLUDED.get(f"{type(self).__name__}.{name}"):
            pytest.skip(reason)


class TestOpenAI(OpenAI, Standard):
    pass


class TestResponses(Responses, Standard):
    pass


class TestAnthropic(Anthropic, Standard):
    pass


class TestOllama(Ollama, Standard):
    pass


class TestLlama(Llama, Standard):
    pass


class TestOpenAIAlone(OpenAI, Alone):
    pass


class TestResponsesAlone(Responses, Alone):
    pass


class TestAnthropicAlone(Anthropic, Alone):
    pass


class TestOllamaAlone(Ollama, Alone):
    pass


class TestLlamaAlone(Llama, Alone):
    pass
