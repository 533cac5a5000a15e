"""Torchtitan model specifications, one package per model source."""
