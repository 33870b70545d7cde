#!/usr/bin/env python3
"""Prints all reports of `samite bench --compare --json` in a folder as one JSON object by name, a line each: all.py FOLDER."""

import json
import pathlib
import sys


def main():
    lines = []
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
        # A row that failed leaves an empty file.
        if path.stem != "all" and path.stat().st_size:
            report = json.loads(path.read_text())
            lines.append(f"{json.dumps(path.stem)}: {json.dumps(report, separators=(',', ':'))}")
    print("{\n" + ",\n".join(lines) + "\n}")


main()
