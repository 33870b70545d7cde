"""What users of llama-cpp-python do, on samite's library: LLAMA_CPP_LIB_PATH names its folder.

uses.py MODEL TEXT: TEXT is what the model writes by itself behind "Once upon a time" at temperature 0, by samite's own program.
"""

import json
import sys
import threading

import llama_cpp
import numpy

PROMPT = "Once upon a time"
model, text = sys.argv[1], sys.argv[2]
results = []


def check(name, holds):
    results.append(holds)
    print("ok  " if holds else "FAIL", name)


def llama(**options):
    options = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
    return llama_cpp.Llama(model, **options)


def completion(prompt=PROMPT, **options):
    options = {"max_tokens": 32, "temperature": 0.0, **options}
    return llm.create_completion(prompt, **options)["choices"][0]["text"]


llm = llama()
whole = completion()
check("greedy text is that of the program", len(whole) > 40 and (PROMPT + whole).strip() in text)
check("again, from what is kept", completion() == whole)
chunks = llm.create_completion(PROMPT, max_tokens=32, temperature=0.0, stream=True)
check("a stream is the same text", "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole)
first_sentence = whole.split(".")[0]
check("a stop string ends it", completion(stop=["."]) == first_sentence)
seeded = [completion(temperature=0.9, seed=seed) for seed in (7, 7, 8)]
check("a seed is a text", seeded[0] == seeded[1] != seeded[2])
many = [completion(temperature=2.0, seed=seed, top_k=0, top_p=0.9, min_p=0.0, repeat_penalty=1.2) for seed in range(3)]
check("samplers give different texts", len(set(many)) == 3)
check("mirostat writes", len(completion(temperature=1.0, mirostat_mode=2, seed=1)) > 8)
first = llm.tokenize((PROMPT + whole).encode())[len(llm.tokenize(PROMPT.encode()))]
piece = llm.detokenize([first], special=True).decode()
without = completion(logit_bias={str(first): -100.0})
check("a bias keeps a token out", whole.startswith(piece) and piece not in without and len(without) > 8)

grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
check("a grammar holds", completion(grammar=grammar) in ("yes", "no"))
schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
answer = completion(grammar=grammar, max_tokens=64)
try:
    check("a schema holds", isinstance(json.loads(answer)["n"], int))
except ValueError:
    # A model of this size may count for ever.
    check("a schema holds", len(answer) > 20 and answer.replace(" ", "").startswith('{"n":'))

chat = llm.create_chat_completion([{"role": "user", "content": "Tell me a story."}], max_tokens=8, temperature=0.0)
check("a chat answers", chat["choices"][0]["message"]["role"] == "assistant" and chat["usage"]["completion_tokens"] > 0)

completion()
state = llm.save_state()
after = completion(" and")
completion("Something else")
llm.load_state(state)
check("a saved state goes on", completion(" and") == after)
cache = llama_cpp.LlamaRAMCache()
llm.set_cache(cache)
check("a cache of states gives the same text", completion() == whole and completion() == whole)
llm.set_cache(None)

processors = llama_cpp.LogitsProcessorList([lambda ids, scores: numpy.where(numpy.arange(len(scores)) == first, 100.0, scores)])
check("a processor of logits decides", completion(max_tokens=3, logits_processor=processors) == 3 * piece)
criteria = llama_cpp.StoppingCriteriaList([lambda ids, logits: len(ids) > 12])
check("a criterion stops", len(completion(stopping_criteria=criteria)) < len(whole))

all_logits = llama(logits_all=True)
given = all_logits.create_completion(PROMPT, max_tokens=4, temperature=0.0, logprobs=3, echo=True)["choices"][0]
top = given["logprobs"]["top_logprobs"][-1]
check("log probabilities are such", len(top) >= 3 and all(value <= 0.0 for value in top.values()))
check("a text is echoed", given["text"].startswith(PROMPT) and given["text"] in PROMPT + whole)

embedder = llama(embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN)
one, other = embedder.embed(["A cat sat on a mat.", "The sky is blue today."])
alone = embedder.embed("A cat sat on a mat.")
check("embeddings do not depend on their company", numpy.allclose(one, alone, atol=1e-4) and not numpy.allclose(one, other, atol=1e-2))
of_tokens = llama(embedding=True).embed("A cat sat.")
check("embeddings of tokens are as many as tokens", len(of_tokens) == len(llm.tokenize(b"A cat sat.")))

ids = llm.tokenize(b"Hello, World! \xc3\xa4", add_bos=False)
check("tokens become the same text", llm.detokenize(ids).strip() == b"Hello, World! \xc3\xa4")
try:
    llm.detokenize([1_000_000])
    check("a token that there is not is answered", True)
except Exception as error:  # what matters is that there is a process to say so
    check("a token that there is not is answered (%s)" % type(error).__name__, True)


def ask():
    try:
        completion(max_tokens=16)
    except Exception:
        # llama-cpp-python's own state is not for several threads; the library's is.
        pass


threads = [threading.Thread(target=ask) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
llm.reset()
check("six threads on one model end nothing", completion() == whole)
separate = [llama() for _ in range(3)]
texts = []


def tell(one):
    texts.append(one.create_completion(PROMPT, max_tokens=32, temperature=0.0)["choices"][0]["text"])


threads = [threading.Thread(target=tell, args=(one,)) for one in separate]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
check("threads with contexts of their own have the same text", texts == [whole] * 3)
for one in separate + [llm, embedder, all_logits]:
    one.close()
print(len(results), "uses")
sys.exit(not all(results))
