"""The demo as a visitor runs it, without the making of its environment: seconds, and the figures it prints.

python benchmarks/demo.py [--json PATH]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sfumato", "demo", "--json", "--out", folder]
        start = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
    print(f"demo: {seconds:.0f} s")
    if options.json:
        found = json.loads(done.stdout.splitlines()[-1])["test"]
        record = {"seconds": seconds} | {direction: found[direction] for direction in ("i2t", "t2i")}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
