#!/usr/bin/env python3
"""Prints the JSON of `samite bench --compare` as rows of a Markdown table: row.py NAME FILE."""

import json
import sys


def number(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


def main():
    name, path = sys.argv[1:]
    with open(path) as file:
        report = json.load(file)
    for row in report["results"]:
        share = row["share_of_limit"]
        cells = [
            name,
            f"{row['test']}, {row['threads']} threads",
            number(row["samite"], 1),
            f"{number(row['llama_cpp'], 1)} ({int(row['repack'])})",
            number(row["ratio"], 2),
            f"{number(row['ratio_low'], 2)} to {number(row['ratio_high'], 2)}",
            f"{row['kept']} ({row['restless']}{'' if row['restless_dropped'] else ' restless, not dropped'})",
            "" if share is None else f"{100 * share:.0f} % of {row['limit']}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


main()
