"""The demo as a visitor runs it, without the making of its environment: seconds, and the figures it prints.

python benchmarks/demo.py [--json PATH]
"""

import sys
import tempfile
import time

from measuring import command_parser, of_process, write_json


def main() -> None:
    options = command_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sfumato", "demo", "--json", "--out", folder]
        start = time.perf_counter()
        found = of_process(command)["test"]
        seconds = time.perf_counter() - start
    print(f"demo: {seconds:.0f} s")
    write_json(options.json, {"seconds": seconds} | {direction: found[direction] for direction in ("i2t", "t2i")})


if __name__ == "__main__":
    main()
