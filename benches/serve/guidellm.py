#!/usr/bin/env python3
"""The load of a tool that is not ours: GuideLLM (PyPI) asks samite serve, and another server, in turns.

    guidellm.py --guidellm VENV/bin/guidellm --samite target/release/samite --other PATH/llama-server -m model.gguf [--clients 8,32] [--rounds 3]

Prompts and lengths of answers are those of load.py; GuideLLM sends and measures. Each round starts one server, has GuideLLM send its requests with so many
clients at a time, ends it, and does the same with the other one. Told are medians over the rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from load import Server, medians, requests_of


def measure(program, port, model, clients, prompts, folder):
    """What GuideLLM says: tokens per second, milliseconds to the first token and between tokens."""
    told = os.path.join(folder, "told.json")
    command = [
        program,
        "run",
        *["--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model={model},request_format=/v1/completions"],
        *["--profile", f"kind=concurrent,streams={clients}"],
        *["--constraint", f"kind=max_requests,count={prompts[1]}"],
        *["--data", f"kind=json_file,path={prompts[0]}"],
        *["--output", f"kind=json,path={told}", "--disable-console"],
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"GuideLLM: {done.stderr[-1000:]}")
    with open(told) as file:
        [benchmark] = json.load(file)["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if totals["successful"] != totals["total"]:
        sys.exit(f"not all requests were answered: {totals}")
    return {
        "tokens_per_second": metrics["output_token_count"]["successful"]["total_sum"] / benchmark["duration"],
        "first_token": metrics["time_to_first_token_ms"]["successful"]["median"],
        "between_tokens": metrics["inter_token_latency_ms"]["successful"]["median"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", required=True, help="the program guidellm")
    parser.add_argument("--samite", required=True, help="the program samite")
    parser.add_argument("--other", help="the program llama-server; without it, samite alone")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("-c", "--context", type=int, default=32768, help="tokens of all requests together")
    parser.add_argument("--clients", default="8,32")
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    programs = {"samite": [args.samite, "serve", "--kv-unified"]}
    if args.other:
        programs["llama-server"] = [args.other, "--kv-unified"]
    model = os.path.basename(args.model)
    with tempfile.TemporaryDirectory() as folder:
        for clients in map(int, args.clients.split(",")):
            prompts = os.path.join(folder, "prompts.jsonl")
            sent = [one for client in range(clients) for one in requests_of(client, args.requests, 1)]
            with open(prompts, "w") as file:
                for prompt, count in sent:
                    file.write(json.dumps({"prompt": prompt, "output_tokens_count": count}) + "\n")
            flags = ["-m", args.model, "-c", str(args.context), "--parallel", str(clients), "-t", str(args.threads), "-fa", "on"]
            measured = {name: [] for name in programs}
            for _ in range(args.rounds):
                for name, program in programs.items():
                    server = Server(program, flags)
                    try:
                        measured[name].append(measure(args.guidellm, server.port, model, clients, (prompts, len(sent)), folder))
                    finally:
                        server.end()
            for name, results in measured.items():
                row = medians(results)
                print(
                    f"{clients:3} clients  {name:13} {row['tokens_per_second']:8.1f} tokens/s  first token {row['first_token']:8.0f} ms"
                    f"  between tokens {row['between_tokens']:6.1f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
