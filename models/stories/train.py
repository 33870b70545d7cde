"""Trains the small model that samite's README runs: tokenizer (SentencePiece), llama architecture (JAX), GGUF (gguf).

    pip install "jax[cpu]" optax sentencepiece gguf numpy
    python3 train.py out.gguf [steps]

Deterministic for a seed on one kind of machine. Prints training and held-out loss.
"""

import io
import sys
import time

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sentencepiece

from stories import stories

LAYERS, WIDTH, HEADS, KV_HEADS, FF, CONTEXT, VOCAB = 4, 96, 6, 3, 256, 256, 512
HEAD = WIDTH // HEADS
ROPE_BASE, EPS, BATCH = 10000.0, 1e-5, 24


def tokenizer(lines):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def init(key):
    def normal(shape, fan_in):
        nonlocal key
        key, sub = jax.random.split(key)
        return jax.random.normal(sub, shape) / np.sqrt(fan_in)
    layer = lambda: {
        "attn_norm": jnp.ones(WIDTH), "ffn_norm": jnp.ones(WIDTH),
        "attn_q": normal((WIDTH, WIDTH), WIDTH), "attn_k": normal((KV_HEADS * HEAD, WIDTH), WIDTH),
        "attn_v": normal((KV_HEADS * HEAD, WIDTH), WIDTH), "attn_output": normal((WIDTH, WIDTH), WIDTH * 2 * LAYERS),
        "ffn_gate": normal((FF, WIDTH), WIDTH), "ffn_up": normal((FF, WIDTH), WIDTH), "ffn_down": normal((WIDTH, FF), FF * 2 * LAYERS),
    }
    return {"token_embd": normal((VOCAB, WIDTH), WIDTH) * 0.5, "output_norm": jnp.ones(WIDTH), "layers": [layer() for _ in range(LAYERS)]}


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * weight


def rope(x):  # [batch, tokens, heads, HEAD], neighbours are rotated together
    freqs = ROPE_BASE ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angle = jnp.arange(x.shape[1])[:, None] * freqs
    c, s = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)


def logits(params, tokens):
    x = params["token_embd"][tokens]
    n = tokens.shape[1]
    mask = jnp.tril(jnp.ones((n, n), bool))
    for p in params["layers"]:
        h = norm(x, p["attn_norm"])
        q = rope((h @ p["attn_q"].T).reshape(*h.shape[:2], HEADS, HEAD))
        k = rope((h @ p["attn_k"].T).reshape(*h.shape[:2], KV_HEADS, HEAD))
        v = (h @ p["attn_v"].T).reshape(*h.shape[:2], KV_HEADS, HEAD)
        k, v = (jnp.repeat(t, HEADS // KV_HEADS, axis=2) for t in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ p["attn_output"].T
        h = norm(x, p["ffn_norm"])
        x = x + (jax.nn.silu(h @ p["ffn_gate"].T) * (h @ p["ffn_up"].T)) @ p["ffn_down"].T
    return norm(x, params["output_norm"]) @ params["token_embd"].T


def loss(params, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens[:, :-1]), tokens[:, 1:]).mean()


def export(path, params, sp):
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("samite stories")
    w.add_description("A small model that writes short children's stories")
    w.add_license("MIT OR Apache-2.0")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(WIDTH)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FF)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_dimension_count(HEAD)
    w.add_rope_freq_base(ROPE_BASE)
    w.add_layer_norm_rms_eps(EPS)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("llama")
    kind = lambda i: 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
    w.add_token_list([sp.id_to_piece(i).encode() for i in range(VOCAB)])
    w.add_token_scores([float(sp.get_score(i)) for i in range(VOCAB)])
    w.add_token_types([kind(i) for i in range(VOCAB)])
    w.add_bos_token_id(sp.bos_id())
    w.add_eos_token_id(sp.eos_id())
    w.add_unk_token_id(sp.unk_id())
    put = lambda name, value: w.add_tensor(name, np.asarray(value, np.float32))
    put("token_embd.weight", params["token_embd"])
    put("output_norm.weight", params["output_norm"])
    for i, p in enumerate(params["layers"]):
        for name, value in p.items():
            put(f"blk.{i}.{name}.weight", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    path, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 900
    lines = stories(60000, seed=1)
    sp = tokenizer(lines[:8000])
    encode = lambda text: [sp.bos_id()] + sp.encode(text) + [sp.eos_id()]
    stream = np.concatenate([encode(line) for line in lines]).astype(np.int32)
    held_out = np.concatenate([encode(line) for line in stories(300, seed=2)]).astype(np.int32)
    # Every sample starts with a whole story, as every prompt will.
    starts = np.flatnonzero(stream == sp.bos_id())
    starts = starts[starts < len(stream) - CONTEXT - 1]
    print(f"{len(stream)} tokens, {sum(x.size for x in jax.tree.leaves(init(jax.random.key(0))))} parameters")

    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))
    params = init(jax.random.key(1))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    window = lambda data, at: np.stack([data[i:i + CONTEXT + 1] for i in at])
    rng = np.random.default_rng(3)
    begin = time.time()
    for i in range(steps):
        params, state, value = step(params, state, window(stream, rng.choice(starts, BATCH)))
        if i % 200 == 0 or i + 1 == steps:
            at = np.flatnonzero(held_out == sp.bos_id())[:64]
            held = jax.jit(loss)(params, window(held_out, at))
            print(f"step {i:5} loss {value:.4f} held-out {held:.4f} ({time.time() - begin:.0f} s)", flush=True)
    export(path, params, sp)


if __name__ == "__main__":
    main()
