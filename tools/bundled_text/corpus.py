"""Puts the kinds of documents together into one collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.bundled_text.arithmetic import times_table, worked_problems
from tools.bundled_text.dialogues import DIALOGUES
from tools.bundled_text.draw import Draw
from tools.bundled_text.encyclopedia import ARTICLES
from tools.bundled_text.everyday import EVERYDAY
from tools.bundled_text.records import RECORDS
from tools.bundled_text.stories import story
from tools.bundled_text.world import World, build_world

SHORTEST = 40  # words
TEXT_SEED = 20_000_003

_SUMS: tuple[tuple[Callable[[Draw], str], int], ...] = ((worked_problems, 9), (times_table, 1))
_KINDS = (("story", 17), ("article", 24), ("everyday", 21), ("dialogue", 14), ("record", 14), ("sums", 10))


def _one(draw: Draw, world: World) -> str:
    match draw.weighted(_KINDS):
        case "story":
            return story(draw, world)
        case "article":
            return draw.weighted(ARTICLES)(draw, world)
        case "everyday":
            return draw.weighted(EVERYDAY)(draw, world)
        case "dialogue":
            return draw.weighted(DIALOGUES)(draw, world)
        case "record":
            return draw.weighted(RECORDS)(draw, world)
        case _:
            return draw.weighted(_SUMS)(draw)


def document(index: int, world: World) -> str:
    """Document number ``index``. It depends on the index alone, so it can be made without the others."""
    draw = Draw(TEXT_SEED + index)
    text = _one(draw, world)
    while len(text.split()) < SHORTEST:
        text = f"{text}\n\n{_one(draw, world)}"
    return text


def documents(count: int) -> Iterator[str]:
    """The first ``count`` documents."""
    world = build_world()
    return (document(index, world) for index in range(count))
