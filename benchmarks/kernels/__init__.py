"""Modelled cost of the NKI kernels, counted by the emulator of ``nki``. Run as modules from the repository's root."""
