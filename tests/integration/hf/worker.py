"""Trains several small jobs one after the other in one process per rank and writes their losses as JSON.

    torchrun --nproc_per_node=N worker.py CASES.json OUT.json

A case is ``{"name", "args", "accumulation", "still", "before"}``; ``args`` are those of ``torchtitan.train``. With
``still`` it takes no step: the weights are loaded, and the plugins told that training has ended. ``before`` are
arguments of ``torchtitan-trn``, run first.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

_DIMS: dict[str, Any] = {}
DEADLINE_S = int(os.environ.get("D", "240"))


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train one case; losses are exact, not those printed in the log."""
    from fixed_batches import FixedBatches
    from torchtitan.config import ConfigManager

    from torchtitan_qwen3_trn.cli import main as main_command
    from torchtitan_qwen3_trn.models.first_loss import global_loss

    if case.get("before") and os.environ["RANK"] == "0":
        main_command(case["before"])
    config = ConfigManager().parse_args(case["args"])
    vocab_size, accumulation = config.model_spec.model.vocab_size, case.get("accumulation", 1)
    config.dataloader = FixedBatches.Config(vocab_size=vocab_size, accumulation=accumulation)
    trainer = _trainer(config)
    try:
        trainer.checkpointer.load(step=config.checkpoint.load_step)
        batches = trainer.batch_generator(trainer.dataloader)
        losses = []
        while not case.get("still") and trainer.should_continue_training():
            trainer.step += 1
            trainer.train_step(batches)
            losses.append(global_loss(trainer.local_loss, trainer.parallel_dims))
            trainer.checkpointer.save(trainer.step, last_step=trainer.step == config.training.steps)
        trainer.job.plugins.call("training_ended", trainer.job.config, trainer=trainer)
        return {"losses": losses}
    finally:
        trainer.close()


def _trainer(config: Any) -> Any:
    """A trainer that keeps the process group of the case before: gloo groups made anew in one process hang."""
    from torchtitan.distributed import ParallelDims

    from torchtitan_qwen3_trn.trainer import PluginTrainer

    class SameGroup(PluginTrainer):
        def init_distributed(self) -> ParallelDims:
            if not torch.distributed.is_initialized():
                _DIMS[repr(self.config.parallelism)] = super().init_distributed()
            # DTensor remembers meshes by value, and FSDP on the native route wants the very object.
            degrees = repr(self.config.parallelism)
            if degrees not in _DIMS:
                _DIMS[degrees] = ParallelDims.from_config(self.config.parallelism, torch.distributed.get_world_size())
            return _DIMS[degrees]

    return SameGroup(config)


def main(cases: Path, out: Path) -> None:
    """Run every case; one that fails is reported with its traceback."""
    log: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    logging.getLogger().addHandler(Keep())
    logging.getLogger().setLevel(logging.INFO)
    results = {}
    for case in json.loads(cases.read_text()):
        log.clear()
        print(case["name"], flush=True)
        try:
            result = run(case)
        except (Exception, SystemExit):
            result = {"error": traceback.format_exc()}
        results[case["name"]] = {**result, "log": "\n".join(log)}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
