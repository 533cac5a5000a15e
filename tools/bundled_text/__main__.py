"""Runs ``make.py``: ``python -m tools.bundled_text``."""

import sys

from tools.bundled_text.make import main

main(sys.argv[1:])
