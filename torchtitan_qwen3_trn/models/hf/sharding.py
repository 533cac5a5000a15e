"""Where the local part of a sharded tensor lies in the whole."""

from __future__ import annotations

from torch.distributed.tensor import DTensor


def local_slice(value: DTensor) -> tuple[slice, ...]:
    """The index that takes this rank's part out of the whole tensor, as distributed checkpoints see it.

    Raises:
        ValueError: the part is not one contiguous block.
    """
    chunks = value.__create_chunk_list__()
    if len(chunks) != 1:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} is held in {len(chunks)} pieces on one rank")
    offsets, sizes = chunks[0].offsets, chunks[0].sizes
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
