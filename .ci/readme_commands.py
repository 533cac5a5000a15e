"""Run every command of the README as written.

Commands are the lines of ``console`` code blocks that start with ``$ ``. A block whose line before is
``<!-- not run: reason -->`` is printed with its reason and skipped: it needs hardware or a download.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.*?) -->\n)?```console\n(?P<body>.*?)```", re.DOTALL)


def main(readme: Path) -> int:
    ran = 0
    for block in BLOCK.finditer(readme.read_text(encoding="utf-8")):
        for line in block["body"].splitlines():
            if not line.startswith("$ "):
                continue
            command = line[2:]
            if block["reason"]:
                print(f"--- not run ({block['reason']}): {command}", flush=True)
                continue
            print(f"--- {command}", flush=True)
            began = time.monotonic()
            status = subprocess.run(["bash", "-c", command], check=False).returncode
            print(f"--- exit status {status} after {time.monotonic() - began:.0f} s", flush=True)
            if status != 0:
                return status
            ran += 1
    print(f"ran {ran} README commands")
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
