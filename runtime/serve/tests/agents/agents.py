"""Real coding agents work with a scripted model that `samite serve` serves.

Usage: agents.py PROGRAM FOLDER [--keep FOLDER] [--strict] [AGENT ...]. FOLDER has node_modules with the agents of
Node, and venv with aider; agents that are not there are left out:

    npm install --prefix FOLDER @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332 opencode-ai@1.18.33 \
        @mariozechner/pi-coding-agent@0.73.1 @qwen-code/qwen-code@0.24.4
    python3 -m venv FOLDER/venv && FOLDER/venv/bin/pip install aider-chat==0.86.2

Needs Linux, root (for a network without the world), unshare, ip, and the package gguf. --keep stores the traffic, the
logs and the files of each agent. With --strict, an answer that a client sends back must be in the cache to its last
token, and the server must not warn.

Each agent reads files, edits one, runs a command and ends; then it goes on with the conversation. A proxy between it
and the server records what it sends and what it gets.
"""

import argparse
import base64
import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import parrot

MODEL = "parrot"
KEY = "secret"
FILES = {"greeting.txt": "hello old world\n", "rules.txt": "Keep the other words.\n"}
# Agents list files, and the list should stay the same.
EMPTY = "count.txt"
EDITED, COUNTED = "hello new world\n", "3 greeting.txt"
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PATCH = "*** Begin Patch\n*** Update File: greeting.txt\n@@\n-hello old world\n+hello new world\n*** End Patch\n"
TASK = "Replace old by new in greeting.txt, then count its words with a command, and write that to count.txt."
THANKS = "Thank you. What did you do?"
COMMAND = "wc -w greeting.txt > count.txt"
LAST = "Now greeting.txt is new, and count.txt has the number."
# Seconds for an agent.
PATIENCE = 240
# Minimum share of the previous prompt that must be cached.
CACHED = 0.95


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def answers(*turns):
    """A script of one or more calls per turn. The model thinks at times, and ends with a text."""
    script = [{"calls": turn if isinstance(turn, list) else [turn]} for turn in turns]
    script[0] |= {"reasoning": "First I look at what the files have in them.", "content": "I read the files."}
    script[-1] |= {"reasoning": "The edit is done, the count remains to do."}
    return [*script, {"content": LAST}]


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text if isinstance(text, str) else json.dumps(text, indent=1))


class Agent:
    binary = ""
    # Name of the model, by which some agents decide what they send.
    model = MODEL
    # False for agents that send no key.
    has_key = True
    # True if the agent sends no tools, and the script is for all requests.
    has_no_tools = False
    # Tools whose calls it changes before it sends them back.
    changes = ()
    # True if it changes the start of the conversation before it goes on.
    starts_anew = False

    def script(self, work):
        """What the model answers, for an agent that works in this folder."""
        raise NotImplementedError

    def prepare(self, home, base):
        """Writes settings. Returns the environment."""
        raise NotImplementedError

    def arguments(self, task, is_more):
        """Arguments for a task, or for more of the conversation before."""
        raise NotImplementedError


class Codex(Agent):
    binary = "codex"

    def __init__(self, model=MODEL, edit=None, before=(), local=None):
        self.model, self.before, self.local, self.has_key = model, before, local, local is None
        self.edit = edit or call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF\n")

    def script(self, work):
        reads = [call("exec_command", cmd=f"cat {name}") for name in FILES]
        return answers(*self.before, reads, self.edit, call("exec_command", cmd=COMMAND))

    def prepare(self, home, base):
        config = f"""
            model = "{self.model}"
            model_context_window = {parrot.CONTEXT}
            check_for_update_on_startup = false
            {"" if self.local else 'model_provider = "samite"'}
            [analytics]
            enabled = false
            [otel]
            exporter = "none"
            [model_providers.samite]
            name = "samite"
            base_url = "{base}/v1"
            env_key = "SAMITE_KEY"
            wire_api = "responses"
        """
        write(f"{home}/.codex/config.toml", config)
        return {"SAMITE_KEY": KEY, "CODEX_OSS_BASE_URL": f"{base}/v1"}

    def arguments(self, task, is_more):
        local = ["--oss", "--local-provider", self.local] if self.local else []
        resume = ["resume", "--last"] if is_more else []
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", *local, *resume, *flags, "--model", self.model, task]


class CodexCode(Codex):
    """Codex with a model that writes programs which call tools."""

    def script(self, work):
        def run(command):
            source = f"const result = await tools.exec_command({{cmd: {json.dumps(command)}}}); text(result.output);"
            return call("exec", input=source)

        reads = [run(f"cat {name}") for name in FILES]
        return answers(reads, run(f"apply_patch <<'EOF'\n{PATCH}EOF\n"), run(COMMAND))


class ClaudeCode(Agent):
    binary = "claude"
    # It adds an argument.
    changes = ("Edit",)

    def __init__(self, before=()):
        self.before = before

    def script(self, work):
        reads = [call("Read", file_path=f"{work}/{name}") for name in FILES]
        edit = call("Edit", file_path=f"{work}/greeting.txt", old_string="old", new_string="new")
        return answers(*self.before, reads, edit, call("Bash", command=COMMAND, description="Count words"))

    def prepare(self, home, base):
        return {
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(parrot.CONTEXT),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
        }

    def arguments(self, task, is_more):
        return [*(["--continue"] if is_more else []), "-p", task, "--allowedTools", "Read,Edit,Bash"]


class OpenCode(Agent):
    binary = "opencode"

    def __init__(self, package="@ai-sdk/openai-compatible"):
        self.package = package

    def script(self, work):
        reads = [call("read", filePath=f"{work}/{name}") for name in FILES]
        edit = call("edit", filePath=f"{work}/greeting.txt", oldString="old", newString="new")
        return answers(reads, edit, call("bash", command=COMMAND))

    def prepare(self, home, base):
        limit = {"context": parrot.CONTEXT, "output": 8192}
        provider = {
            "npm": self.package,
            "name": "samite",
            "options": {"baseURL": f"{base}/v1", "apiKey": KEY},
            "models": {MODEL: {"name": MODEL, "tool_call": True, "reasoning": True, "limit": limit}},
        }
        config = {
            "autoupdate": False,
            "share": "disabled",
            "model": f"samite/{MODEL}",
            "small_model": f"samite/{MODEL}",
            "permission": "allow",
            "provider": {"samite": provider},
        }
        write(f"{home}/.config/opencode/opencode.json", config)
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}

    def arguments(self, task, is_more):
        return ["run", *(["--continue"] if is_more else []), task]


class Pi(Agent):
    binary = "pi"

    def __init__(self, api="openai-completions"):
        self.api = api

    def script(self, work):
        reads = [call("read", path=name) for name in FILES]
        edit = call("edit", path="greeting.txt", edits=[{"oldText": "old", "newText": "new"}])
        return answers(reads, edit, call("bash", command=COMMAND))

    def prepare(self, home, base):
        model = {"id": MODEL, "reasoning": True, "contextWindow": parrot.CONTEXT, "maxTokens": 8192}
        base = base if self.api == "anthropic-messages" else f"{base}/v1"
        provider = {"baseUrl": base, "api": self.api, "apiKey": "SAMITE_KEY", "models": [model]}
        write(f"{home}/.pi/agent/models.json", {"providers": {"samite": provider}})
        return {"SAMITE_KEY": KEY, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}

    def arguments(self, task, is_more):
        return [*(["--continue"] if is_more else []), "--provider", "samite", "--model", MODEL, "-p", task]


class QwenCode(Agent):
    binary = "qwen"
    # It tells the date only at first.
    starts_anew = True

    def __init__(self, api="openai"):
        self.api = api

    def script(self, work):
        reads = [call("read_file", file_path=f"{work}/{name}") for name in FILES]
        edit = call("edit", file_path=f"{work}/greeting.txt", old_string="old", new_string="new")
        return answers(reads, edit, call("run_shell_command", command=COMMAND, is_background=False))

    def prepare(self, home, base):
        settings = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
        }
        write(f"{home}/.qwen/settings.json", settings)
        if self.api == "anthropic":
            return {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_MODEL": MODEL}
        return {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}

    def arguments(self, task, is_more):
        more = ["--continue"] if is_more else []
        return [*more, "--auth-type", self.api, "-m", MODEL, "--yolo", "-p", task]


class Aider(Agent):
    binary = "aider"
    has_no_tools = True

    def script(self, work):
        search = f"<<<<<<< SEARCH\n{FILES['greeting.txt']}=======\n{EDITED}>>>>>>> REPLACE"
        text = f"{LAST}\n\ngreeting.txt\n```\n{search}\n```\n"
        return [{"reasoning": "The word is in the only line.", "content": text}]

    def prepare(self, home, base):
        return {"OPENAI_API_BASE": f"{base}/v1", "OPENAI_API_KEY": KEY}

    def arguments(self, task, is_more):
        more = ["--restore-chat-history"] if is_more else []
        flags = ["--no-git", "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--yes-always"]
        # A model has no means to run a command, so that is a test, which follows an edit.
        flags += ["--no-show-model-warnings", "--edit-format", "diff", "--test-cmd", COMMAND, "--auto-test"]
        return [*more, "--model", f"openai/{MODEL}", *flags, "--message", task, "greeting.txt"]


AGENTS = {
    "codex": Codex(),
    "codex-lmstudio": Codex(local="lmstudio"),
    "claude-code": ClaudeCode(),
    "opencode": OpenCode(),
    "opencode-responses": OpenCode("@ai-sdk/openai"),
    "opencode-anthropic": OpenCode("@ai-sdk/anthropic"),
    "pi": Pi(),
    "pi-responses": Pi("openai-responses"),
    "pi-anthropic": Pi("anthropic-messages"),
    "qwen-code": QwenCode(),
    "qwen-code-responses": QwenCode("openai-responses"),
    "qwen-code-anthropic": QwenCode("anthropic"),
    "aider": Aider(),
    "codex-ollama": Codex(local="ollama"),
    # For models of these names, Codex has tools that take a text instead of JSON.
    "codex-custom": Codex("gpt-5.5", edit=call("apply_patch", input=PATCH)),
    "codex-code": CodexCode("gpt-6-sol"),
    "codex-picture": Codex(before=[call("view_image", path="picture.png")]),
    # Loads tools that are not in the first prompt.
    "claude-code-search": ClaudeCode([call("ToolSearch", query="select:WebFetch,NotebookEdit", max_results=2)]),
    "claude-code-picture": ClaudeCode([call("Read", file_path="picture.png")]),
}


class Proxy(http.server.ThreadingHTTPServer):
    """Passes on all requests and answers, and records them."""

    daemon_threads = True

    def __init__(self, port, path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.port, self.path, self.records, self.lock = port, path, [], threading.Lock()

    def record(self, record):
        with self.lock, open(self.path, "a") as file:
            self.records.append(record)
            file.write(json.dumps(record) + "\n")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def received(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def pass_on(self):
        body = self.received()
        own = ("host", "connection", "transfer-encoding", "content-length", "accept-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in own}
        record = {"method": self.command, "path": self.path, "headers": headers, "time": time.time()}
        record |= {"body": body.decode(errors="replace"), "status": None}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        answered = b""
        try:
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            record["status"] = answer.status
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            has_body = self.command != "HEAD" and answer.status not in (204, 304)
            if has_body:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            # Parts go on as they come, so that the agent reads a stream.
            while has_body and (part := answer.read1(65536)):
                answered += part
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            if has_body:
                self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            # Some agents leave once they know the status.
            record["is_left"] = self.close_connection = True
        except (OSError, http.client.HTTPException) as error:
            record["error"] = repr(error)
            self.close_connection = True
        finally:
            connection.close()
            record |= {"answer": answered.decode(errors="replace"), "seconds": time.time() - record["time"]}
            self.server.record(record)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = pass_on


@contextlib.contextmanager
def serving(program, agent, folder):
    """A server, and its port."""
    log = f"{folder}/server.log"
    flags = ["-m", f"{folder}/model.gguf", "-a", agent.model, "--port", "0", "-c", str(parrot.CONTEXT), "-v"]
    key = ["--api-key", KEY] if agent.has_key else []
    with open(log, "w") as file:
        server = subprocess.Popen([program, "serve", *flags, *key], stdout=file, stderr=file)
    try:
        for _ in range(300):
            with open(log) as file:
                found = re.search(r" is served at http://[^\s:]+:(\d+)", file.read())
            if found or server.poll() is not None:
                break
            time.sleep(0.1)
        assert found, f"the server did not start: see {log}"
        yield int(found[1])
    finally:
        server.terminate()
        server.wait(timeout=30)


def events(answer):
    """The JSON of an answer, or of all events of a stream."""
    lines = [line[5:] for line in answer.splitlines() if line.startswith("data:")]
    for line in lines or [answer]:
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict):
                yield told


def has_tools(body):
    """Whether a request has tools, in its own list or in an item of its input."""
    items = body.get("input")
    items = items if isinstance(items, list) else []
    return bool(body.get("tools")) or any(item.get("type") == "additional_tools" for item in items)


def usages(records):
    """Numbers of tokens of all answers to requests with tools: of the prompt, of its cached part, of the answer."""
    for record in records:
        try:
            body = json.loads(record["body"])
        except ValueError:
            continue
        if record["status"] != 200 or "count_tokens" in record["path"] or not has_tools(body):
            continue
        used = None
        for event in events(record["answer"]):
            told = event.get("response") or event.get("message") or event
            told = told if isinstance(told, dict) else {}
            match told.get("usage"):
                case {"cache_read_input_tokens": cached, "input_tokens": more, "output_tokens": answer}:
                    used = (more + cached, cached, answer)
                case {"prompt_tokens": prompt, "completion_tokens": answer, "prompt_tokens_details": details}:
                    used = (prompt, details["cached_tokens"], answer)
                case {"input_tokens": prompt, "output_tokens": answer, "input_tokens_details": details}:
                    used = (prompt, details["cached_tokens"], answer)
        if used:
            yield used


def failures(records):
    """Requests that failed."""
    for record in records:
        asked = f"{record['method']} {record['path']}"
        if record["status"] is None or record["status"] >= 400 or "error" in record:
            yield f"{asked} got {record['status']}: {record.get('error') or record['answer'][:300]}"
        for event in events(record["answer"]):
            if record["status"] == 200 and (event.get("type") == "error" or event.get("error")):
                yield f"{asked} got an error in its stream: {json.dumps(event)[:300]}"


def judge(work, statuses, outputs, records, used, turns):
    """What is wrong."""

    def content(name):
        with contextlib.suppress(OSError), open(f"{work}/{name}") as file:
            return file.read()

    if any(statuses):
        yield f"the exit codes are {statuses}"
    if content("greeting.txt") != EDITED:
        yield f"greeting.txt is {content('greeting.txt')!r}"
    if (content("count.txt") or "").strip() != COUNTED:
        yield f"count.txt is {content('count.txt')!r}"
    for output in outputs:
        # Lines may be wrapped.
        if LAST not in " ".join(output.split()):
            yield f"the last answer is not in the output {output[-100:]!r}"
    # Agents repeat what fails.
    yield from dict.fromkeys(failures(records))
    if len(used) != turns:
        yield f"{len(used)} requests with tools instead of {turns}"
    for (before, _, _), (prompt, cached, _) in zip(used, used[1:]):
        if cached < CACHED * before:
            yield f"{cached} tokens of {prompt} are cached, the prompt before had {before}"


def doubts(agent, script, used, log):
    """What is wrong for strict judges."""
    for number, (said, (before, _, answer), (_, cached, _)) in enumerate(zip(script, used, used[1:]), 1):
        is_changed = any(called["name"] in agent.changes for called in said.get("calls", ()))
        is_changed |= agent.starts_anew and number == len(script)
        # All but the last token of an answer were input of the model.
        if cached < before + answer - 1 and not is_changed:
            yield f"of answer {number}, {max(cached - before, 0)} tokens of {answer} are cached"
    with open(log) as file:
        yield from dict.fromkeys(line.strip() for line in file if line.startswith("warning"))


def work_in(folder, name, program, binary, is_strict):
    """Lets an agent work, in a network of its own."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    agent = AGENTS[name]
    home, work = f"{folder}/home", f"{folder}/work"
    os.makedirs(home)
    for file, text in FILES.items():
        write(f"{work}/{file}", text)
    write(f"{work}/{EMPTY}", "")
    with open(f"{work}/picture.png", "wb") as file:
        file.write(base64.b64decode(PICTURE))
    script = {"title": "Words of a greeting", "always": agent.has_no_tools, "answers": agent.script(work)}
    parrot.write(script, f"{folder}/model.gguf")
    start = time.time()
    with serving(program, agent, folder) as port:
        proxy = Proxy(port, f"{folder}/traffic.jsonl")
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        environment = agent.prepare(home, f"http://127.0.0.1:{proxy.server_port}")
        path = os.pathsep.join([os.path.dirname(shutil.which("node") or "/usr/bin/node"), "/usr/bin", "/bin"])
        environment = {"HOME": home, "PATH": path, "TERM": "dumb", "LANG": "C.UTF-8", "NO_COLOR": "1"} | environment
        statuses, outputs = [], []
        for number, task in enumerate([TASK, THANKS]):
            command = [binary, *agent.arguments(task, number > 0)]
            logs = [f"{folder}/{number}-{name}.log" for name in ("output", "errors")]
            with open(logs[0], "w") as output, open(logs[1], "w") as errors:
                pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
                try:
                    done = subprocess.run(command, cwd=work, env=environment, timeout=PATIENCE, **pipes)
                    statuses.append(done.returncode)
                except subprocess.TimeoutExpired:
                    statuses.append(f"none after {PATIENCE} s")
            with open(logs[0]) as output:
                outputs.append(output.read())
    used = list(usages(proxy.records))
    turns = 0 if agent.has_no_tools else len(script["answers"]) + 1
    wrong = list(judge(work, statuses, outputs, proxy.records, used, turns))
    doubtful = list(doubts(agent, script["answers"], used, f"{folder}/server.log"))
    wrong += doubtful if is_strict else []
    verdict = "bad: " + "; ".join(wrong) if wrong else "good"
    if doubtful and not is_strict:
        verdict += f" ({'; '.join(doubtful)})"
    told = ", ".join(f"{cached} of {prompt}" for prompt, cached, _ in used)
    print(f"{name}: {verdict}; {time.time() - start:.0f} s, {len(proxy.records)} requests, cached {told}", flush=True)
    return not wrong


def binary_of(name, folder):
    binary = AGENTS[name].binary
    places = (f"{folder}/node_modules/.bin/{binary}", f"{folder}/venv/bin/{binary}")
    return next((place for place in places if os.path.exists(place)), None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("folder")
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--keep", metavar="FOLDER")
    parser.add_argument("--strict", action="store_true")
    # The program calls itself with this one, inside a network.
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    wanted = parser.parse_intermixed_args()
    program, folder = os.path.abspath(wanted.program), os.path.abspath(wanted.folder)
    if unknown := set(wanted.agents) - set(AGENTS):
        parser.error(f"no such agent: {', '.join(sorted(unknown))}")
    if wanted.inside:
        name = wanted.agents[0]
        is_good = work_in(wanted.inside, name, program, binary_of(name, folder), wanted.strict)
        sys.exit(0 if is_good else 1)
    results = {}
    with tempfile.TemporaryDirectory(prefix="agents-") as temporary:
        for name in wanted.agents or AGENTS:
            if binary_of(name, folder) is None:
                print(f"{name}: left out, as it is not in {folder}", flush=True)
                if wanted.agents:
                    results[name] = False
                continue
            place = os.path.join(os.path.abspath(wanted.keep) if wanted.keep else temporary, name)
            shutil.rmtree(place, ignore_errors=True)
            os.makedirs(place)
            # Nothing but loopback, and no process outlives the agent.
            alone = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
            again = [sys.executable, os.path.abspath(__file__), program, folder, name, "--inside", place]
            again += ["--strict"] if wanted.strict else []
            results[name] = subprocess.run([*alone, *again]).returncode == 0
    failed = [name for name, is_good in results.items() if not is_good]
    bad = f", bad: {', '.join(failed)}" if failed else ""
    print(f"{len(results) - len(failed)} of {len(results)} agents are good{bad}")
    sys.exit(1 if failed or not results else 0)


if __name__ == "__main__":
    main()
