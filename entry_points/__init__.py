"""Plugins of this package, one file each: hook implementations and options, nothing else."""
