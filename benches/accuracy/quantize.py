#!/usr/bin/env python3
"""Compares quantized files with llama.cpp's byte by byte, with and without an importance matrix.

    benches/accuracy/quantize.py --samite target/release/samite --model smollm2-f32.gguf --llama LLAMA_CPP_BIN --write FILE

Same bytes have the same perplexity. Where bytes differ, the perplexities may differ by 0.5 %.
Without --llama, checksums of llama.cpp's files come from a file (--figures), and bytes must be the
same. The importance matrix is synthetic: the last bits of a measured one depend on the instruction
set.
"""

import argparse
import json
import struct
import sys
import tempfile
import zlib
from pathlib import Path

from kl import HERE, run

MIXTURES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q3_K_M Q4_K_M Q5_K_M Q6_K IQ4_XS".split()
MOST = 0.005


def tensors(samite, file):
    return json.loads(run([samite, "inspect", "--json", file])[0])["tensors"]


def checksum(samite, file):
    """CRC-32 of all tensors' types and bytes, in the order of names."""
    crc = 0
    with open(file, "rb") as opened:
        for tensor in sorted(tensors(samite, file), key=lambda tensor: tensor["name"]):
            opened.seek(tensor["offset"])
            crc = zlib.crc32(opened.read(tensor["bytes"]), zlib.crc32(f"{tensor['name']} {tensor['dtype']}".encode(), crc))
    return crc


def importance_matrix(samite, model, file):
    """Writes a matrix in llama.cpp's `.dat` format: a mean square per column of each tensor, from 0.5 to 16."""
    layers = [t for t in tensors(samite, model) if t["name"].startswith("blk.") and len(t["shape"]) == 2]
    with open(file, "wb") as out:
        out.write(struct.pack("<i", len(layers)))
        for layer, tensor in enumerate(layers):
            name, columns = tensor["name"].encode(), tensor["shape"][0]
            hashes = [(layer * 977 + column) * 2654435761 % 2**32 for column in range(columns)]
            values = [2.0 ** (hashed / 2**32 * 5 - 1) for hashed in hashes]
            out.write(struct.pack(f"<i{len(name)}sii{columns}f", len(name), name, 1, columns, *values))


def perplexity(samite, file):
    command = [samite, "perplexity", "--json", "--device", "cpu", "-m", file, "-f", HERE / "text.txt", "-c", "256"]
    return json.loads(run(command)[0])["perplexity"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samite", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file with real weights in F32")
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--figures", type=Path, default=HERE / "quantized-by-llama.cpp-0.8.0.json")
    parser.add_argument("--write", type=Path, help="write llama.cpp's checksums to this file")
    parser.add_argument("--types", nargs="+", default=MIXTURES)
    options = parser.parse_args()
    figures = {} if options.llama else json.loads(options.figures.read_text())[options.model.stem]
    samite, failures = options.samite, 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        matrix = folder / "imatrix.dat"
        importance_matrix(samite, options.model, matrix)
        for mixture in options.types:
            for way, flags in {"without": [], "with a matrix": ["--imatrix", matrix]}.items():
                key, ours, theirs = f"{mixture}, {way}", folder / "ours.gguf", folder / "theirs.gguf"
                run([samite, "quantize", *flags, options.model, ours, mixture])
                if options.llama:
                    run([options.llama / "llama-quantize", *flags, options.model, theirs, mixture])
                    figures[key] = checksum(samite, theirs)
                if checksum(samite, ours) == figures[key]:
                    print(f"{key}: the same bytes", flush=True)
                elif options.llama:
                    both = [perplexity(samite, file) for file in (ours, theirs)]
                    failures += abs(both[0] / both[1] - 1) > MOST
                    print(f"{key}: other bytes, perplexity {both[0]:.4f}, of llama.cpp's file {both[1]:.4f}", flush=True)
                else:
                    failures += 1
                    print(f"{key}: other bytes than llama.cpp's", flush=True)
    if options.write:
        kept = json.loads(options.write.read_text()) if options.write.exists() else {}
        options.write.write_text(json.dumps(kept | {options.model.stem: figures}, indent=1) + "\n")
    sys.exit(f"{failures} differ from llama.cpp's" if failures else 0)


if __name__ == "__main__":
    main()
