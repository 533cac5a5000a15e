"""The same global batches for every number of ranks and every accumulation, and the plain loop that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

ROWS = 4  # of one global batch


def global_batch(step: int, vocab_size: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels and positions ``[ROWS, seq_len]``; two or three documents are packed into each row."""
    generator = torch.Generator().manual_seed(1000 + step)
    # Few of the tokens occur, so that there is something to learn.
    tokens = torch.randint(vocab_size // 32, (ROWS, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len).repeat(ROWS, 1)
    for row in range(ROWS):
        for start in torch.randint(4, seq_len - 4, (2,), generator=generator).sort().values.tolist():
            positions[row, start:] = torch.arange(seq_len - start)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions


class FixedBatches(BaseDataLoader):
    """Feeds one rank its rows of `global_batch`, microbatch by microbatch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 256
        accumulation: int = 1

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **kwargs: Any
    ) -> None:
        self.config, self.rank, self.ranks = config, dp_rank, dp_world_size
        self.seq_len, self.rows, self.step = seq_len, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.step += 1
            inputs, labels, positions = global_batch(self.step, self.config.vocab_size, self.seq_len)
            for micro in range(self.config.accumulation):
                first = (micro * self.ranks + self.rank) * self.rows
                mine = slice(first, first + self.rows)
                yield {"input": inputs[mine], "positions": positions[mine]}, labels[mine]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def plain_losses(model: Any, *, steps: int, seq_len: int, router_loss: bool = False, rows: int = ROWS) -> list[float]:
    """Losses of a plain PyTorch loop over a Transformers model: cross-entropy, clipping to 1, AdamW.

    With ``router_loss`` the router's loss of each ``rows`` rows is added as Transformers adds it.
    """
    model.train()
    vocab_size = model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(1, steps + 1):
        inputs, labels, positions = global_batch(step, vocab_size, seq_len)
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, ROWS, rows):
            part = slice(first, first + rows)
            extra = {"output_router_logits": True} if router_loss else {}
            output = model(input_ids=inputs[part], position_ids=positions[part], use_cache=False, **extra)
            loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels[part].flatten())
            loss = loss * rows / ROWS
            total += loss.item()
            if router_loss:
                loss = loss + model.config.router_aux_loss_coef * output.aux_loss * rows / ROWS
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses
