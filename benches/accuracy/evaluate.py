#!/usr/bin/env python3
"""Log-likelihoods that lm-evaluation-harness gets from samite's server, beside those of transformers with the same file:

    benches/accuracy/evaluate.py --harness LM_EVAL --samite SAMITE --model MODEL
    benches/accuracy/evaluate.py --harness LM_EVAL --write FOLDER --file NAME

The first form compares with the stored figures. MODEL is the stored one's file in F32, as weights are dequantized by transformers,
too. The second one computes the figures of the model NAME in FOLDER, and needs the packages transformers, torch, accelerate and
gguf in the harness's environment. The harness is used as it comes: it asks for echoed prompts with log-probabilities, and
tokenizes with the server.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "log-likelihoods-by-transformers-5.23.0.json"
TASKS = ["facts", "story"]
# Bounds of differences with every number in F32: of an answer, and of a token in a whole text. 8e-5 and 2e-5 were measured.
MOST, MOST_OF_TOKEN = 1e-3, 2e-4


def harness(program, folder, *flags):
    """Log-likelihoods of all answers, by task, and whether each is the most probable one."""
    command = [program, "run", *flags, "--include_path", ".", "--tasks", ",".join(TASKS), "--output_path", folder]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/hf"}
    run = subprocess.run(
        [*command, "--log_samples"], cwd=HERE / "tasks", env=os.environ | offline, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(run.stderr[-3000:])
    print(run.stdout[run.stdout.find("|Tasks|") :].rstrip())
    found = {}
    for task in TASKS:
        (file,) = Path(folder).rglob(f"samples_{task}_*.jsonl")
        samples = sorted((json.loads(line) for line in file.open()), key=lambda sample: sample["doc_id"])
        answers = [answer[0] for sample in samples for answer in sample["resps"]]
        # A rolling log-likelihood has no flag.
        answers = [answer if isinstance(answer, list) else [answer] for answer in answers]
        found[task] = [[float(value), *(flag == "True" for flag in flags)] for value, *flags in answers]
    return found


def served(options, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [options.samite, "serve", "-m", options.model, "--port", str(port), "-ctk", "f32", "-ctv", "f32", "-c", "8192"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{base}/ready", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit(f"samite serve ended with {server.returncode}")
                time.sleep(0.1)
        text = json.loads((HERE / "tasks/story.jsonl").read_text())["text"]
        request = urllib.request.Request(f"{base}/tokenize", json.dumps({"content": text}).encode())
        tokens = len(json.load(urllib.request.urlopen(request))["tokens"])
        arguments = f"model=samite,base_url={base}/v1/completions,num_concurrent=2,max_length=2048"
        return harness(options.harness, folder, "--model", "local-completions", "--model_args", arguments), tokens
    finally:
        server.terminate()
        server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", required=True)
    parser.add_argument("--samite")
    parser.add_argument("--model")
    parser.add_argument("--write", metavar="FOLDER")
    parser.add_argument("--file", metavar="NAME")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.write:
            arguments = f"pretrained={options.write},gguf_file={options.file},dtype=float32,max_length=2048"
            flags = ["--model", "hf", "--model_args", arguments, "--device", "cpu", "--batch_size", "1"]
            FIGURES.write_text(json.dumps(harness(options.harness, folder, *flags)) + "\n")
            return
        found, tokens = served(options, folder)
    wanted = json.loads(FIGURES.read_text())
    failures = 0
    for task in TASKS:
        assert len(found[task]) == len(wanted[task]) > 0, task
        most = MOST_OF_TOKEN * tokens if task == "story" else MOST
        differences = [abs(one[0] - other[0]) for one, other in zip(found[task], wanted[task])]
        flags = sum(one[1:] != other[1:] for one, other in zip(found[task], wanted[task]))
        is_right = max(differences) <= most and not flags
        failures += not is_right
        print(
            f"{'ok' if is_right else 'FAILED'}: {task}: {len(differences)} log-likelihoods differ by {max(differences):.1e} at most"
            f" ({most:.1e} allowed), {flags} other first choices"
        )
    sys.exit(failures > 0)


main()
