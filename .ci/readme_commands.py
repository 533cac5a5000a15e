"""Run every command of the given Markdown files as written, each once.

    python .ci/readme_commands.py README.md docs/*.md

Commands are the lines of ``console`` code blocks that start with ``$ ``. A block whose line before is
``<!-- not run: reason -->`` is printed with its reason and skipped: it needs hardware or a download. A command that an
earlier file has is not run again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.*?) -->\n)?```console\n(?P<body>.*?)```", re.DOTALL)


def main(pages: list[Path]) -> int:
    done: set[str] = set()
    for page in pages:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            for line in block["body"].splitlines():
                command = line.removeprefix("$ ")
                if command == line or command in done:
                    continue
                if block["reason"]:
                    print(f"--- {page}: not run ({block['reason']}): {command}", flush=True)
                    continue
                done.add(command)
                if (status := run(command, page)) != 0:
                    return status
    print(f"ran {len(done)} commands of {len(pages)} pages")
    return 0 if done else 1


def run(command: str, page: Path) -> int:
    print(f"--- {page}: {command}", flush=True)
    began = time.monotonic()
    status = subprocess.run(["bash", "-c", command], check=False).returncode
    print(f"--- exit status {status} after {time.monotonic() - began:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
