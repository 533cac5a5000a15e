"""Checkpoint files: what their headers say, how they are read, whether they were really loaded."""
