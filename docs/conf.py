"""Sphinx configuration: ``python -m sphinx -E -W --keep-going -n -b html docs docs/_build/html``."""

project = "torchtitan-qwen3-trn"
author = "The torchtitan-qwen3-trn authors"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torchtitan-qwen3-trn"
# Anchors for headings, as GitHub makes them; links to missing ones are warnings, and warnings are errors.
myst_heading_anchors = 3
# The picture is a fenced block, which GitHub renders too.
myst_fence_as_directive = ["mermaid"]
