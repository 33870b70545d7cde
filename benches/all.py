#!/usr/bin/env python3
"""Prints all reports of `samite bench --compare --json` in a folder as one JSON object by name, a line for each pair: all.py FOLDER."""

import json
import pathlib
import sys


def main():
    reports = {}
    pairs = []
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
        # A row that failed leaves an empty file.
        if path.stem == "all" or path.stat().st_size == 0:
            continue
        reports[path.stem] = json.loads(path.read_text())
        for row in reports[path.stem]["results"]:
            pairs.append(row["pairs"])
            row["pairs"] = f"pairs {len(pairs) - 1}"
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(report)}" for name, report in reports.items())
    for number, each in enumerate(pairs):
        lines = ",\n".join(map(json.dumps, each))
        text = text.replace(f'"pairs {number}"', f"[\n{lines}\n]")
    print(f"{{\n{text}\n}}")


main()
