#!/usr/bin/env python3
"""Mean KL divergence of quantized models to their F32 logits, beside llama.cpp's for the same files.

    benches/accuracy/kl.py --samite target/release/samite --llama LLAMA_CPP_BIN --model smollm2.gguf [--types Q4_0 ...]

The model is dequantized to F32 once, and quantized from there to each type (`--pure`). llama-perplexity writes the base
file, both programs are compared with it. Needs llama-perplexity in LLAMA_CPP_BIN; without --llama, samite writes the base
file and llama.cpp's columns stay empty.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS".split()
# Name, environment, flags of samite.
PATHS = [
    ("packed", {}, []),
    ("as in the file", {}, ["--no-repack"]),
    ("one column", {}, ["-ub", "1"]),
    ("one column, as in the file", {}, ["-ub", "1", "--no-repack"]),
]


def run(command, **environment):
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {result.stderr[-2000:]}")
    return result.stdout + result.stderr


def of_llama(text):
    """Mean divergence and share of equal top tokens in llama-perplexity's report."""
    mean = re.search(r"Mean\s+KLD:\s+(\S+)", text)
    same = re.search(r"Same top p:\s+(\S+)", text)
    if not mean or not same:
        sys.exit(f"no divergence in: {text[-2000:]}")
    return float(mean.group(1)), float(same.group(1)) / 100


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samite", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file with real weights")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("text.txt"))
    parser.add_argument("--context", default="256")
    parser.add_argument("--threads", default=str(os.cpu_count()))
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--levels", nargs="*", default=[], help="instruction sets beside the machine's own (SAMITE_CPU_ISA)")
    parser.add_argument("--device", help="measure this device instead of the CPU")
    parser.add_argument("--as-is", action="store_true", help="the file itself instead of types made from it")
    parser.add_argument("--folder", type=Path, help="where models are kept")
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    options = parser.parse_args()

    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    name = options.model.stem
    full = folder / f"{name}-f32.gguf"
    if not full.exists():
        run([options.samite, "quantize", options.model, full, "F32", "--allow-requantize"])
    base = folder / f"{name}-{options.text.stem}-{options.context}.base"
    common = ["-c", options.context, "-t", options.threads]
    if not base.exists():
        if options.llama:
            command = [options.llama / "llama-perplexity", "-b", options.context, "--no-warmup"]
        else:
            command = [options.samite, "perplexity"]
        run([*command, "-m", full, "-f", options.text, "--kl-divergence-base", base, *common])

    paths = list(PATHS)
    for level in options.levels:
        paths += [(f"{level}, {path}", {"SAMITE_CPU_ISA": level}, flags) for path, _, flags in PATHS]
    if options.device:
        device = ["--device", options.device]
        paths = [(f"{options.device}, {path}", {}, flags + device) for path, _, flags in PATHS]

    figures = []
    for dtype in [""] if options.as_is else options.types:
        file = options.model if options.as_is else folder / f"{name}-{dtype}.gguf"
        if not file.exists():
            run([options.samite, "quantize", full, file, dtype, "--pure"])
        compare = ["-m", file, "--kl-divergence", "--kl-divergence-base", base, *common]
        best = None
        if options.llama:
            command = [options.llama / "llama-perplexity", "-f", options.text, "-b", options.context, "--no-warmup"]
            both = [of_llama(run([*command, *flags, *compare])) for flags in ([], ["--no-repack"])]
            best = (min(mean for mean, _ in both), max(same for _, same in both))
            print(f"{dtype or name:<8} llama.cpp {both[0][0]:.6f} {both[1][0]:.6f}, same top {best[1]:.4f}", flush=True)
        for path, environment, flags in paths:
            report = json.loads(run([options.samite, "perplexity", "--json", *compare, *flags], **environment).split("\n}")[0] + "\n}")
            mean, same = report["kl_divergence"]["mean"], report["same_top"]["share"]
            row = {"model": name, "type": dtype, "path": path, "mean": mean, "same_top": same}
            text = f"{dtype or name:<8} {path:<36} {mean:.6f}"
            if best:
                row |= {"llama": both[0][0], "llama_no_repack": both[1][0], "ratio": mean / best[0], "llama_same_top": best[1]}
                text += f" {row['ratio']:.4f} {'' if row['ratio'] <= 1.02 else 'above 1.02'}"
            figures.append(row)
            print(f"{text} same top {same:.4f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
