"""One server for all tests; only it can be reached."""

import os

import pytest
import pytest_asyncio
import pytest_socket

import serving

os.environ.update(serving.QUIET)
# Clients that read a key from the environment would prefer it.
for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "OLLAMA_HOST"):
    os.environ.pop(name, None)


def pytest_configure(config):
    config.option.asyncio_mode = "auto"


def pytest_collection_modifyitems(items):
    # Clients keep connections, which belong to a loop.
    for item in items:
        if pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(autouse=True)
def loopback_only():
    pytest_socket.socket_allow_hosts(["127.0.0.1", "::1"], allow_unix_socket=True)


@pytest.fixture(scope="session", autouse=True)
def server():
    with serving.running(os.environ["SAMITE"], "--alias", "story,tale") as base:
        os.environ["SAMITE_BASE"] = base
        yield base
