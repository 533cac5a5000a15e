"""Qwen3 on stock torchtitan, for AWS Trainium, CUDA and CPU. Start reading in ``entry_points/``."""
