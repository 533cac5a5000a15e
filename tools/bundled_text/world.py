"""An invented country: towns, rivers, people, animals and railway lines whose facts never change.

Documents of every kind refer to it, so a model meets the same facts many times in different words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from tools.bundled_text import words
from tools.bundled_text.draw import Draw
from tools.bundled_text.english import plural

WORLD_SEED = 1881
COUNTRY = "Velmora"
THIS_YEAR = 1960

_ONSETS = words.table("b br c d dr f fl g gr h k l m n p r s sk st t th tr v w")
_VOWELS = words.table("a e i o u ae ei ou")
_CODAS = words.table("l n r s m nd rn ld st ck th v")
_TOWN_ENDINGS = words.table("ford mere holm wick stad haven burg dale by moor bridge gate")
_RIVER_ENDINGS = words.table("a e en ow is")
_SPECIES_ENDINGS = {
    "bird": words.table("finch thrush gull tern warbler plover"),
    "fish": words.table("perch bream char minnow"),
    "mammal": words.table("vole marten hare shrew dormouse"),
    "insect": words.table("moth beetle cricket hawker"),
    "flower": words.table("bell wort lily sorrel"),
    "tree": words.table("willow pine alder beech"),
}
_TERRAINS = (
    "a low coast of dunes and salt marshes",
    "a plateau of heather and bare rock",
    "a wide valley of orchards",
    "a chain of wooded hills",
    "a plain of wheat and sugar beet",
    "a lake district with hundreds of small islands",
    "a high range whose peaks keep their snow until July",
    "a forest of spruce and birch",
)
_DISHES = words.table("soup stew gratin salad jelly curry casserole")
_LANDMARKS = words.table(
    "tower bridge chapel clock theatre market_hall lighthouse museum fountain windmill library gate"
)
_FESTIVALS = words.table(
    "Lantern_Night the_Apple_Fair the_Boat_Race the_Bell_Parade the_Day_of_Kites the_Herring_Week "
    "the_Glass_Market the_Mask_Ball the_Snow_Run the_Book_Fair the_Honey_Feast the_Night_of_Drums"
)
_WORK_NAMES = (
    "The {quality} {thing}",
    "A {season} in {town}",
    "The {thing} and the {animal}",
    "On {notion}",
    "Letters from {town}",
    "{notion} and {other}",
    "Songs of the {river}",
    "The {animal} of {town}",
)
_WORK_KINDS = {
    "poet": "poem",
    "painter": "painting",
    "composer": "symphony",
    "sculptor": "statue",
    "historian": "history",
    "actor": "play",
    "photographer": "photograph",
}


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of the country."""

    name: str
    terrain: str
    weather: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Town:
    """A town; ``x`` and ``y`` are kilometres on the map, ``month`` is when the festival takes place."""

    name: str
    region: Region
    river: str
    x: int
    y: int
    people: int
    founded: int
    founder: str
    goods: tuple[str, str]
    dish: str
    festival: str
    month: str
    landmark: str
    built: int


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody people in the country have heard of."""

    name: str
    is_woman: bool
    born: int
    died: int
    town: Town
    trade: str
    kind: str
    work: str
    year: int


@dataclass(frozen=True, kw_only=True)
class Species:
    """An animal or plant that lives nowhere else; ``size`` is in centimetres."""

    name: str
    kind: str
    colours: tuple[str, str]
    region: Region
    food: str
    size: int
    season: str
    finder: Person


@dataclass(frozen=True, kw_only=True)
class Line:
    """A railway line; ``minutes[i]`` is the time from stop i to stop i + 1."""

    name: str
    stops: tuple[Town, ...]
    minutes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything there is to know about the country."""

    regions: tuple[Region, ...]
    towns: tuple[Town, ...]
    people: tuple[Person, ...]
    species: tuple[Species, ...]
    lines: tuple[Line, ...]


def distance(first: Town, second: Town) -> int:
    """Kilometres between two towns in a straight line, rounded down."""
    return isqrt((first.x - second.x) ** 2 + (first.y - second.y) ** 2)


def bearing(origin: Town, target: Town) -> str:
    """The main compass direction from one town to another."""
    east, north = target.x - origin.x, target.y - origin.y
    if abs(east) > abs(north):
        return "east" if east > 0 else "west"
    return "north" if north > 0 else "south"


def _names(draw: Draw, count: int, endings: Sequence[str]) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        stem = draw.pick(_ONSETS) + draw.pick(_VOWELS) + draw.pick(_CODAS)
        name = (stem + draw.pick(endings)).capitalize()
        if name not in found:
            found.append(name)
    return found


def _town(draw: Draw, name: str, region: Region, rivers: Sequence[str]) -> Town:
    founded = draw.between(880, 1720)
    landmark = draw.pick(_LANDMARKS)
    first, second = draw.several(words.OBJECTS, 2)
    return Town(
        name=name,
        region=region,
        river=draw.pick(rivers),
        x=draw.between(0, 240),
        y=draw.between(0, 240),
        people=draw.long_tailed(700, 179_000),
        founded=founded,
        founder=f"{draw.pick(words.WOMEN + words.MEN)} {draw.pick(words.FAMILIES)}",
        goods=(plural(first), plural(second)),
        dish=f"{draw.pick(words.COUNTED_FOODS)} {draw.pick(_DISHES)}",
        festival=draw.pick(_FESTIVALS),
        month=draw.pick(words.MONTHS),
        landmark=f"{draw.pick(words.MATERIALS + words.COLOURS)} {landmark}",
        built=draw.between(founded, 1930),
    )


def _person(draw: Draw, towns: Sequence[Town]) -> Person:
    is_woman = draw.chance(0.5)
    town, other = draw.several(towns, 2)
    born = draw.between(1720, 1900)
    trade = draw.pick((*_WORK_KINDS, *_WORK_KINDS, *words.TRADES))
    title = draw.pick(_WORK_NAMES).format(
        quality=draw.pick(words.QUALITIES).title(),
        thing=draw.pick(words.OBJECTS).title(),
        animal=draw.pick(words.ANIMALS).title(),
        season=draw.pick(words.SEASONS).title(),
        notion=draw.pick(words.NOTIONS).title(),
        other=draw.pick(words.NOTIONS).title(),
        town=other.name,
        river=town.river,
    )
    return Person(
        name=f"{draw.pick(words.WOMEN if is_woman else words.MEN)} {draw.pick(words.FAMILIES)}",
        is_woman=is_woman,
        born=born,
        died=born + draw.between(48, 91),
        town=town,
        trade=trade,
        kind=_WORK_KINDS.get(trade, "book"),
        work=title,
        year=born + draw.between(24, 46),
    )


def _species(draw: Draw, regions: Sequence[Region], people: Sequence[Person]) -> Species:
    kind = draw.pick(tuple(_SPECIES_ENDINGS))
    first, second = draw.several(words.COLOURS, 2)
    (stem,) = _names(draw, 1, ("", "en", "er"))
    return Species(
        name=f"{stem} {draw.pick(_SPECIES_ENDINGS[kind])}",
        kind=kind,
        colours=(first, second),
        region=draw.pick(regions),
        food=plural(draw.pick(("snail", "ant", "spider", "beetle", "moth", "worm", "seed", "nut", "reed", "berry"))),
        size=draw.long_tailed(700, 2700) if kind == "tree" else draw.long_tailed(2, 60),
        season=draw.pick(words.SEASONS),
        finder=draw.pick(people),
    )


def _line(draw: Draw, number: int, towns: Sequence[Town]) -> Line:
    start = draw.pick(towns)
    near = sorted(towns, key=lambda town: (distance(start, town), town.name))[: draw.between(5, 9)]
    stops = tuple(sorted(near, key=lambda town: (town.x + town.y, town.name)))
    minutes = tuple(max(4, distance(a, b)) for a, b in pairwise(stops))
    return Line(name=f"{words.COLOURS[number].capitalize()} Line", stops=stops, minutes=minutes)


def build_world() -> World:
    """The country, the same each time."""
    draw = Draw(WORLD_SEED)
    regions = tuple(
        Region(name=name, terrain=terrain, weather=(draw.pick(words.TEXTURES), draw.pick(words.TEXTURES)))
        for name, terrain in zip(_names(draw, 8, ("land", "mark", "shire")), _TERRAINS, strict=True)
    )
    rivers = _names(draw, 14, _RIVER_ENDINGS)
    towns = tuple(_town(draw, name, draw.pick(regions), rivers) for name in _names(draw, 56, _TOWN_ENDINGS))
    people = tuple(_person(draw, towns) for _ in range(90))
    return World(
        regions=regions,
        towns=towns,
        people=people,
        species=tuple(_species(draw, regions, people) for _ in range(70)),
        lines=tuple(_line(draw, number, towns) for number in range(10)),
    )
