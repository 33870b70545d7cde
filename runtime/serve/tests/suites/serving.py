"""Starts `samite serve` for the suites.

Usage: serving.py PROGRAM COMMAND... runs a command, with the word BASE in it replaced by the server's address.
"""

import contextlib
import os
import subprocess
import sys
import threading

KEY = "secret"
FLAGS = ["--chat-template", "chatml", "-c", "32768", "--parallel", "4", "--n-predict", "1024", "--temp", "0"]
# The built-in model tells stories in JSON's texts, too; its tokens `"`, ` "` and `}` and the end become likelier.
BIASES = ["-l", "260+5", "-l", "337+5", "-l", "128+5", "-l", "2+6"]
# None of the clients may report home.
QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
    "HF_HUB_OFFLINE": "1",
}


@contextlib.contextmanager
def running(program, *flags):
    """Yields where a server listens; `SAMITE_MODEL` names a file other than the built-in model."""
    model = ["-m", os.environ["SAMITE_MODEL"]] if "SAMITE_MODEL" in os.environ else BIASES
    command = [program, "serve", "--port", "0", "--api-key", KEY, *FLAGS, *model, *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        base, told = None, []
        for line in server.stderr:
            told.append(line)
            if " is served at " in line:
                base = line.split(" is served at ")[1].strip().rstrip("/")
                break
        assert base, "the server did not start: " + "".join(told)
        # A pipe that nobody reads fills up.
        threading.Thread(target=lambda: sys.stderr.writelines(server.stderr), daemon=True).start()
        yield base
        assert server.poll() is None, "the server died"
        server.terminate()
        assert server.wait(timeout=20) == 0, server.returncode
    finally:
        server.kill()
        server.wait()


def main():
    program, *command = sys.argv[1:]
    with running(program, "--alias", "story", "--embeddings") as base:
        done = subprocess.run([base if word == "BASE" else word for word in command], env={**os.environ, **QUIET})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
