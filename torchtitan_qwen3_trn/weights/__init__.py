"""Hugging Face folders out of a job and its checkpoints, folders as checkpoints, and verifying both."""
