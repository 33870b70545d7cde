"""Prints the likeliest tokens of models, behind tokens and behind embeddings in their place, one file a line: greedy.py FILE... on the
library in LLAMA_CPP_LIB_PATH.

With llama.cpp's own library in that folder, the lines should be the same:
    cargo run --release -p samite-llm --example known_models -- models
"""

import ctypes
import math
import os
import sys

import llama_cpp


@llama_cpp.llama_log_callback
def quiet(_level, _text, _data):
    pass


def tokens_of(path):
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        return "no model"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    params.type_k = params.type_v = 0
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        return "no context"
    count = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    tokens = [(3 + i * 37 + i * i * 11) % count for i in range(20)]
    array = (ctypes.c_int32 * len(tokens))(*tokens)
    batch = llama_cpp.llama_batch_get_one(array, len(tokens))
    return write(context, batch), write(context, embeddings(model, len(tokens)))


def embeddings(model, position, count=8):
    """A batch of embeddings in the place of tokens, the same for every library."""
    width = llama_cpp.llama_model_n_embd(model)
    # Where positions have several axes, embeddings have four each.
    batch = llama_cpp.llama_batch_init(4 * count, width, 1)
    batch.n_tokens = count
    for i in range(count * width):
        batch.embd[i] = math.sin(i * 0.37 + i // width)
    for i in range(count):
        for axis in range(4):
            batch.pos[axis * count + i] = position + 11 + i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, i == count - 1
    return batch


def write(context, batch, count=12):
    """The likeliest tokens behind a batch."""
    sampler = llama_cpp.llama_sampler_init_greedy()
    written = []
    for _ in range(count):
        if llama_cpp.llama_decode(context, batch) or not llama_cpp.llama_get_logits_ith(context, -1):
            return "no logits"
        written.append(llama_cpp.llama_sampler_sample(sampler, context, -1))
        array = (ctypes.c_int32 * 1)(written[-1])
        batch = llama_cpp.llama_batch_get_one(array, 1)
    return written


llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
for path in sys.argv[1:]:
    # A library that ends the process ends one of a file's own.
    child = os.fork()
    if child == 0:
        print(os.path.basename(path).removesuffix(".gguf"), tokens_of(path), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(os.path.basename(path).removesuffix(".gguf"), "ended", flush=True)
