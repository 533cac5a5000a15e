"""Safetensors folders: what their headers say, which files may be opened, reading them, planning new ones."""
