#!/usr/bin/env python3
"""Times one MoE layer on this machine: `jmx bench`, runnable from a checkout where jmx is not installed.

    python benchmarks/layer.py --model gpt-oss-120b --tokens 1,64,1024,8192 --json out.json --png out.png

NOTES.md beside this file holds results, `--help` all options, jmx/bench.py the method.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
