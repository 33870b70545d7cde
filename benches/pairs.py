#!/usr/bin/env python3
"""Compares how long two commands take, in interleaved pairs: for whole programs, where `samite bench --compare` is for speeds.

    pairs.py [--pairs 12] NAME "FIRST COMMAND" "SECOND COMMAND"

The order within pairs is drawn, and turned round in every second pair. Prints a row of a Markdown table: median times in
seconds, and the median of the ratios second / first with its 95 % interval (bootstrap), so that above 1 the first is faster.
"""

import argparse
import math
import random
import statistics
import subprocess
import sys
import time


def seconds(command):
    start = time.perf_counter()
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    taken = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr[-500:]}")
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("name")
    parser.add_argument("commands", nargs=2)
    args = parser.parse_args()

    # Files come into the page cache, and the first run of a program is not like the others.
    for command in args.commands:
        seconds(command)
    times = ([], [])
    order = [0, 1]
    for pair in range(args.pairs):
        if pair % 2 == 0:
            random.shuffle(order)
        else:
            order.reverse()
        for which in order:
            times[which].append(seconds(args.commands[which]))

    logs = [math.log(b / a) for a, b in zip(*times)]
    draws = random.Random(1)
    medians = sorted(
        statistics.median(draws.choices(logs, k=len(logs))) for _ in range(4000)
    )
    low, high = (math.exp(medians[round(q * (len(medians) - 1))]) for q in (0.025, 0.975))
    first, second = map(statistics.median, times)
    ratio = math.exp(statistics.median(logs))
    print(f"| {args.name} | {first:.2f} | {second:.2f} | {ratio:.2f} | {low:.2f} to {high:.2f} | {args.pairs} |")


main()
