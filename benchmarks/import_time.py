#!/usr/bin/env python3
"""Times `import jmx` where jax and flax are imported already: seconds of CPU time, the least of five processes.

    python benchmarks/import_time.py

The target is 0.3 s.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = """
import time
import flax
import jax
start = time.process_time()
import jmx
print(time.process_time() - start)
"""


def main() -> int:
    """Prints the time."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    runs = (
        subprocess.run([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, check=True)
        for _ in range(5)
    )
    print(f"import jmx: {min(float(done.stdout) for done in runs):.2f} s of CPU time beyond jax and flax")
    return 0


if __name__ == "__main__":
    sys.exit(main())
