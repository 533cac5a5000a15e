"""Prints as JSON what loading a checkpoint costs one process: bytes of the parameters, and resident bytes at most.

python measure_load.py JOB.toml
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])


def main() -> None:
    from torchtitan.config import ConfigManager

    from torchtitan_qwen3_trn.device.cpu import cpu_device_module as device

    config = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    trainer = config.build()
    trainer.checkpointer.load()
    peak = device.max_memory_allocated()
    held = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model_parts[0].parameters())
    print("MEMORY", json.dumps({"parameters": held, "resident": peak - before}))


if __name__ == "__main__":
    main()
