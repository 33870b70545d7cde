"""Megabytes per second of tokenizing, beside another libllama, one thread.

    beside_llama.py FOLDER_WITH_SAMITES_LIBLLAMA FOLDER_WITH_THE_OTHER VOCABULARY.gguf ... -- TEXT.txt ...

Both libraries are driven through llama-cpp-python, each in a process of its own, in turns. Prints the medians of three, and whether the tokens are the same."""

import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time

ROUNDS = 3


def measure(vocabulary, texts):
    """Seconds and a digest of the tokens for each text, by the library that LLAMA_CPP_LIB_PATH names."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_load_model_from_file(vocabulary.encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    found = []
    for path in texts:
        text = open(path, "rb").read()
        tokens = (llama_cpp.llama_token * len(text))()
        begin = time.perf_counter()
        count = llama_cpp.llama_tokenize(vocab, text, len(text), tokens, len(text), False, False)
        seconds = time.perf_counter() - begin
        found.append((seconds, hashlib.sha256(bytes(memoryview(tokens)[: max(count, 0)])).hexdigest()))
    print(json.dumps(found))


def main():
    arguments = sys.argv[1:]
    if arguments[0] == "--measure":
        return measure(arguments[1], arguments[2:])
    libraries, rest = arguments[:2], arguments[2:]
    vocabularies, texts = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    print(f"{'vocabulary':24} {'text':12} {'MB/s':>7} {'other':>7} {'ratio':>6}  tokens")
    for vocabulary in vocabularies:
        runs = [[], []]
        for _ in range(ROUNDS):
            for run, library in zip(runs, libraries):
                command = [sys.executable, __file__, "--measure", vocabulary, *texts]
                environment = dict(os.environ, LLAMA_CPP_LIB_PATH=library)
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                run.append(json.loads(done.stdout) if done.returncode == 0 else None)
        for number, text in enumerate(texts):
            rates, tokens = [], []
            for run in runs:
                done = [found[number] for found in run if found]
                size = os.path.getsize(text) / 1e6
                rates.append(statistics.median(size / seconds for seconds, _ in done) if done else float("nan"))
                tokens.append({digest for _, digest in done})
            same = "same" if tokens[0] == tokens[1] else "differ"
            name = os.path.basename(vocabulary).removeprefix("ggml-vocab-").removesuffix(".gguf")
            print(f"{name:24} {os.path.basename(text):12} {rates[0]:7.1f} {rates[1]:7.1f} {rates[0] / rates[1]:6.1f}  {same}", flush=True)


main()
