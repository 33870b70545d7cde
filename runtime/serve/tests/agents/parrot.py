"""Writes a model that gives scripted answers.

Usage: parrot.py SCRIPT OUT. Needs the package gguf. SCRIPT is a JSON object:

    title    answer to requests without tools, such as those for titles
    always   true if the answers are also for requests without tools
    answers  list of objects with any of reasoning, content and calls, a list of {"name", "arguments"}

The model's next token depends on the last one only. What decides is the chat template: it counts the model's
messages in the conversation and ends the prompt with the token of the answer that comes next.
"""

import json
import sys

import gguf
import numpy

SPECIAL = ["<unk>", "<s>", "</s>"]
END = 2
# Width of the head. Attention over long prompts must be cheap, and does nothing here anyway.
HEAD = 32
CONTEXT = 262144

TEMPLATE = """\
{%- set ns = namespace(step=0) -%}
{%- set scripted = tools or ALWAYS -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{%- if tools -%}
{{- '# Tools\\n\\nFunctions in <tools></tools>; write calls in <tool_call></tool_call>.\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + ('<|step' ~ ([ns.step, LAST] | min) ~ '|>' if scripted else '<|plain|>') -}}
{#- Some clients send one answer as several messages. -#}
{%- if loop.last or messages[loop.index].role != 'assistant' -%}{%- set ns.step = ns.step + 1 -%}{%- endif -%}
{%- if message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{{- '<|step' ~ ([ns.step, LAST] | min) ~ '|>' if scripted else '<|plain|>' -}}
{%- endif -%}
"""


def written(answer):
    """An answer as the model writes it."""
    text = ""
    if "reasoning" in answer:
        text += f"<think>\n{answer['reasoning']}\n</think>\n\n"
    text += answer.get("content", "")
    for call in answer.get("calls", []):
        if text and not text.endswith("\n\n"):
            text += "\n"
        call = f'{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}'
        text += f"<tool_call>\n{call}\n</tool_call>"
    return text


def split(text, texts):
    """Splits a text into pieces that occur nowhere else in all texts. So the tokenizer splits the text like that,
    too, when a client sends it back."""
    pieces, piece = [], ""
    for character in text:
        piece += character
        if len(piece) >= 6 and sum(other.count(piece) for other in texts) == 1:
            pieces.append(piece)
            piece = ""
    if not pieces:
        raise ValueError(f"{text!r} is not unique")
    pieces[-1] += piece
    return pieces


def write(script, path):
    answers = script["answers"]
    starts = [f"<|step{number}|>" for number in range(len(answers))] + ["<|plain|>"]
    # Pairs of letters make prompts shorter.
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [written(answer) for answer in answers] + [script["title"]]
    chains = [split(text, texts) for text in texts]
    pairs = [one + other for one in letters + "▁" for other in letters]
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + ["<|im_start|>", "<|im_end|>"] + pairs
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    kinds += [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * len(pairs)
    follows = []
    for start, pieces in zip(starts, chains):
        before = len(tokens)
        tokens.append(start)
        kinds.append(gguf.TokenType.CONTROL)
        for piece in pieces:
            follows.append((before, len(tokens)))
            before = len(tokens)
            tokens.append(piece)
            kinds.append(gguf.TokenType.USER_DEFINED)
        follows.append((before, END))
    width = (len(follows) + 1 + 31) // 32 * 32
    # Dimension 0 represents every token that nothing follows.
    embedding = numpy.zeros((len(tokens), width), numpy.float32)
    output = numpy.zeros((len(tokens), width), numpy.float32)
    for dimension, (before, after) in enumerate(follows, 1):
        embedding[before, dimension] = 1
        output[after, dimension] = 100
    embedding[~embedding.any(axis=1), 0] = 1
    output[END, 0] = 100

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("parrot")
    writer.add_context_length(CONTEXT)
    writer.add_block_count(1)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_add_space_prefix(False)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_unk_token_id(0)
    template = TEMPLATE.replace("LAST", str(len(answers) - 1))
    writer.add_chat_template(template.replace("ALWAYS", "true" if script.get("always") else "false"))
    zeros = lambda *shape: numpy.zeros(shape, numpy.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", numpy.ones(width, numpy.float32))
    writer.add_tensor("output.weight", output)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", numpy.ones(width, numpy.float32))
    for name in ("attn_q", "attn_k", "attn_v"):
        writer.add_tensor(f"blk.0.{name}.weight", zeros(HEAD, width))
    writer.add_tensor("blk.0.attn_output.weight", zeros(width, HEAD))
    writer.add_tensor("blk.0.ffn_gate.weight", zeros(32, width))
    writer.add_tensor("blk.0.ffn_up.weight", zeros(32, width))
    writer.add_tensor("blk.0.ffn_down.weight", zeros(width, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        write(json.load(file), sys.argv[2])
