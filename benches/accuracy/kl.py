#!/usr/bin/env python3
"""Mean KL divergence of quantized models to their F32 logits, beside llama.cpp's for the same files.

    benches/accuracy/kl.py --samite target/release/samite --model smollm2.gguf --llama LLAMA_CPP_BIN

The model is dequantized to F32 once, and quantized from there to each type (`--pure`). llama.cpp's figures come from
llama-perplexity in LLAMA_CPP_BIN, with and without its packed weights, of which the better one counts; --write keeps them in a
file. Without --llama they come from such a file (--figures). A divergence above 1.02 times llama.cpp's, or fewer equal top tokens
than llama.cpp has, by more than the standard error of the difference, is an error: each rounding moves some tokens by chance.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEXTS = [HERE / "text.txt"]
TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS".split()
# Those that llama.cpp packs on x86-64.
PACKED = ["Q4_0", "IQ4_NL", "MXFP4", "Q2_K", "Q4_K", "as is"]
MOST = 1.02
# Name and flags of samite.
PATHS = {
    "packed": [],
    "as in the file": ["--no-repack"],
    "one column": ["-ub", "1"],
    "one column, as in the file": ["-ub", "1", "--no-repack"],
}


def run(command, **environment):
    command = [str(word) for word in command]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}")
    return result.stdout, result.stderr


def of_llama(command):
    """Mean divergence and share of equal top tokens in llama-perplexity's report."""
    try:
        text = "".join(run(command))
    except RuntimeError as error:
        # Its products by AMX end the program on some machines.
        print(error, file=sys.stderr)
        return math.inf, 0.0
    mean = re.search(r"Mean\s+KLD:\s+(\S+)", text)
    same = re.search(r"Same top p:\s+(\S+)", text)
    return float(mean.group(1)), float(same.group(1)) / 100


class Judge:
    def __init__(self, options):
        self.options = options
        self.folder = options.folder or Path(tempfile.mkdtemp())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = options.model.stem
        self.text = self.folder / "text.txt"
        self.text.write_bytes(b"\n".join(text.read_bytes() for text in options.text))
        self.common = ["-c", options.context, "-t", options.threads]
        self.chunks = ["--chunks", options.chunks] if options.chunks else []
        self.full = self.folder / f"{self.name}-f32.gguf"
        if not self.full.exists():
            run([options.samite, "quantize", options.model, self.full, "F32", "--allow-requantize"])
        key = zlib.crc32(f"{options.context} {options.chunks} {options.llama}".encode() + self.text.read_bytes())
        self.base = self.folder / f"{self.name}-{key:08x}.base"
        if self.base.exists():
            return
        program = [options.llama / "llama-perplexity", "-b", options.context] if options.llama else [options.samite, "perplexity", "--device", "cpu"]
        run([*program, "-m", self.full, "-f", self.text, "--kl-divergence-base", self.base, *self.common, *self.chunks])

    def file(self, dtype):
        if dtype == "as is":
            return self.options.model
        file = self.folder / f"{self.name}-{dtype}.gguf"
        if not file.exists():
            run([self.options.samite, "quantize", self.full, file, dtype, "--pure"])
        return file

    def compare(self, file):
        return ["-m", file, "--kl-divergence", "--kl-divergence-base", self.base, *self.common]

    def llama(self, dtype):
        command = [self.options.llama / "llama-perplexity", "-b", self.options.context, *self.compare(self.file(dtype))]
        both = [of_llama([*command, *flags]) for flags in ([[], ["--no-repack"]] if dtype in PACKED else [[]])]
        both = [figures for figures in both if figures[1]]
        if not both:
            sys.exit(f"{command[0]} measured nothing for {dtype}")
        # Its two ways differ in equal top tokens by chance, up to 1.6 % on 889 tokens.
        return {"mean": min(mean for mean, _ in both), "same_top": sum(same for _, same in both) / len(both)}

    def samite(self, dtype, flags, environment):
        command = [self.options.samite, "perplexity", "--json", *self.compare(self.file(dtype)), *flags]
        report = json.loads(run(command, **environment)[0])
        return report["kl_divergence"], report["same_top"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samite", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--figures", type=Path, help="file with llama.cpp's figures")
    parser.add_argument("--write", type=Path, help="write llama.cpp's figures to this file, beside those that it has")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file with real weights")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--context", default="256")
    parser.add_argument("--chunks", help="only the first ones")
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))))
    parser.add_argument("--types", nargs="+", default=TYPES, help="`as is` is the file itself")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS))
    parser.add_argument("--levels", nargs="*", default=[""], help="instruction sets (SAMITE_CPU_ISA); the machine's own by default")
    parser.add_argument("--device", help="measure this device instead of the CPU")
    parser.add_argument("--folder", type=Path, help="where models are kept")
    options = parser.parse_args()

    judge = Judge(options)
    figures = json.loads(options.figures.read_text()).get(judge.name, {}) if options.figures else {}
    failures = 0
    print("| type | path | KL | llama.cpp | ratio | same top | llama.cpp |\n|---|---|---|---|---|---|---|", flush=True)
    for dtype in options.types:
        if options.llama:
            figures[dtype] = judge.llama(dtype)
        peer = figures.get(dtype)
        for level in options.levels:
            for path in options.paths:
                flags = PATHS[path] + ["--device", options.device or "cpu"]
                divergence, top = judge.samite(dtype, flags, {"SAMITE_CPU_ISA": level} if level else {})
                mean, same = divergence["mean"], top["share"]
                where = ", ".join(filter(None, [options.device, level, path]))
                if not peer:
                    print(f"| {dtype} | {where} | {mean:.6f} | | | {same:.4f} | |", flush=True)
                    continue
                ratio = mean / peer["mean"]
                # Both programs' figures have an error.
                too_far = mean - math.sqrt(2) * divergence["error"] > MOST * peer["mean"]
                bad = too_far or same + math.sqrt(2) * top["error"] < peer["same_top"] - 0.001
                failures += bad
                print(
                    f"| {dtype} | {where} | {mean:.6f} | {peer['mean']:.6f} | {ratio:.3f} | {same:.4f} | {peer['same_top']:.4f} |"
                    + (" worse than llama.cpp" if bad else ""),
                    flush=True,
                )
    if options.write:
        kept = json.loads(options.write.read_text()) if options.write.exists() else {}
        kept[judge.name] = kept.get(judge.name, {}) | figures
        options.write.write_text(json.dumps(kept, indent=1) + "\n")
    sys.exit(f"{failures} worse than llama.cpp" if failures else 0)


if __name__ == "__main__":
    main()
