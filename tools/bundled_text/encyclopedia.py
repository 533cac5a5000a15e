"""Articles about the invented country: towns, people, animals and plants, regions, comparisons, quizzes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tools.bundled_text import words
from tools.bundled_text.draw import Draw
from tools.bundled_text.english import counted, expand, grouped, in_words, joined, sentences
from tools.bundled_text.world import (
    COUNTRY,
    THIS_YEAR,
    Person,
    Region,
    Species,
    Town,
    World,
    bearing,
    distance,
)

_TOWN_FACTS = {
    "opening": (
        "{name} is a {size} in {region}, on the river {river}.",
        "{name}, a {size} on the {river}, lies in {region}.",
        "The {size} of {name} stands where the road through {region} crosses the {river}.",
    ),
    "founding": (
        "It was founded in {founded} by {founder}.",
        "{founder} founded it in the year {founded}.",
        "The first houses were built in {founded}, when {founder} settled there.",
    ),
    "crowd": (
        "About {people} people live there.",
        "It has {people} inhabitants.",
        "At the last census {people} people were counted.",
    ),
    "industry": (
        "The workshops of {name} make {goods}.",
        "{name} is known for its {goods}.",
        "Most of the {goods} sold in " + COUNTRY + " come from here.",
    ),
    "table": (
        "Visitors should try the {dish}.",
        "The local dish is {dish}, served {taste} and {warmth}.",
        "No inn in the {size} closes its kitchen before the last bowl of {dish} is gone.",
    ),
    "feast": (
        "Every {month} the {size} celebrates {festival}.",
        "{festival} takes place in {month}.",
        "In {month} the streets fill up for {festival}.",
    ),
    "sight": (
        "The {landmark}, built in {built}, is its best known sight.",
        "Its {landmark} dates from {built}.",
        "Travellers remember the {landmark} of {built}.",
    ),
    "warmth": ("hot", "cold", "warm"),
    "taste": words.TASTES[2:],
}


def _size(town: Town) -> str:
    return "city" if town.people > 60_000 else "town" if town.people > 6_000 else "village"


def town_facts(draw: Draw, town: Town, topics: tuple[str, ...]) -> list[str]:
    """One sentence on each of the topics, in the order given."""
    given = {
        "name": town.name,
        "size": _size(town),
        "region": town.region.name,
        "river": town.river,
        "founded": str(town.founded),
        "founder": town.founder,
        "people": grouped(town.people),
        "goods": joined(town.goods),
        "dish": town.dish,
        "month": town.month,
        "festival": town.festival,
        "landmark": town.landmark,
        "built": str(town.built),
    }
    return [expand(draw, _TOWN_FACTS, topic, **given) for topic in topics]


def town_article(draw: Draw, world: World) -> str:
    """What a guide would say about one town, with two or three of its neighbours."""
    town = draw.pick(world.towns)
    topics = draw.several(("founding", "crowd", "industry", "table", "feast", "sight"), draw.between(3, 6))
    nearest = sorted(world.towns, key=lambda other: (distance(town, other), other.name))[1:6]

    def far(other: Town) -> str:
        return counted(distance(town, other), "kilometre")

    neighbours = [
        draw.pick(
            (
                f"{other.name} is {far(other)} to the {bearing(town, other)}.",
                f"To the {bearing(town, other)}, {far(other)} away, lies {other.name}.",
            )
        )
        for other in draw.several(nearest, draw.between(1, 3))
    ]
    natives = [person for person in world.people if person.town == town]
    born = [f"The {person.trade} {person.name} was born here in {person.born}." for person in natives[:2]]
    body = town_facts(draw, town, ("opening", *topics))
    return f"{town.name}\n\n{sentences(body)}\n\n{sentences([*neighbours, *born])}"


def biography(draw: Draw, world: World) -> str:
    """The life of one person, and some of the people of the same trade or town."""
    person = draw.pick(world.people)
    she, her = ("she", "her") if person.is_woman else ("he", "his")
    life = [
        f"{person.name} ({person.born}–{person.died}) was a {person.trade} from {person.town.name}.",
        f"{she} grew up by the river {person.town.river} in {person.town.region.name}.",
        draw.pick(
            (
                f"{her} best known {person.kind}, “{person.work}”, appeared in {person.year}.",
                f"in {person.year}, aged {person.year - person.born}, {she} finished “{person.work}”.",
                f"the {person.kind} “{person.work}” of {person.year} made {her} name.",
            )
        ),
        f"people who knew {person.name.split()[0]} called {'her' if person.is_woman else 'him'} "
        f"{joined(draw.several(words.CHARACTERS, draw.between(2, 3)))}.",
        f"{she} died in {person.died}, aged {person.died - person.born}.",
    ]
    peers = [other for other in world.people if other != person and other.trade == person.trade]
    links = [
        f"{other.name}, born in {other.born}, was also a {other.trade} and came from {other.town.name}."
        for other in draw.several(peers, draw.between(0, 2))
    ]
    home = town_facts(draw, person.town, tuple(draw.several(("industry", "feast", "sight", "table"), 2)))
    return f"{person.name}\n\n{sentences(life)}\n\n{sentences([*links, *home])}"


def _habit(draw: Draw, species: Species) -> str:
    if species.kind in ("flower", "tree"):
        return draw.pick(("It flowers in {}.", "Its flowers open in {}.")).format(species.season)
    habits = ("It feeds on {} and has its young in {}.", "It lives on {}; look for its young in {}.")
    return draw.pick(habits).format(species.food, species.season)


def _length(species: Species) -> str:
    return f"{species.size // 100} metres" if species.kind == "tree" else counted(species.size, "centimetre")


def nature_note(draw: Draw, world: World) -> str:
    """A field guide's entries on a few animals or plants."""
    entries = []
    for species in draw.several(world.species, draw.long_tailed(1, 7)):
        finder = species.finder
        body = [
            f"The {species.name} is a {species.kind} found only in {species.region.name}, {species.region.terrain}.",
            f"It is {species.colours[0]} and {species.colours[1]} and grows to {_length(species)}.",
            _habit(draw, species),
            f"{finder.name}, the {finder.trade} of {finder.town.name}, described it first.",
        ]
        keep = draw.several(range(1, 4), draw.between(1, 3))
        entries.append(sentences([body[0], *(body[index] for index in sorted(keep))]))
    return "\n\n".join(entries)


def _region_towns(world: World, region: Region) -> list[Town]:
    return [town for town in world.towns if town.region == region]


def region_article(draw: Draw, world: World) -> str:
    """A region: its land, its weather, its towns in order of size, what lives there."""
    region = draw.pick(world.regions)
    towns = sorted(_region_towns(world, region), key=lambda town: (-town.people, town.name))
    opening = [
        f"{region.name} is {region.terrain}.",
        f"The days are {region.weather[0]} in summer and {region.weather[1]} in winter.",
        f"It has {in_words(len(towns))} places of note: {joined([town.name for town in towns])}.",
        f"The largest is {towns[0].name} with {grouped(towns[0].people)} people, "
        f"the smallest {towns[-1].name} with {grouped(towns[-1].people)}.",
        f"Together they hold {grouped(sum(town.people for town in towns))} people.",
    ]
    details = [
        sentences([f"{town.name}:", *town_facts(draw, town, tuple(draw.several(tuple(_TOWN_FACTS)[1:7], 2)))])
        for town in draw.several(towns, draw.between(1, len(towns)))
    ]
    wild = [species.name for species in world.species if species.region == region]
    ending = f"Among the animals and plants that live only here are the {joined(wild, 'and the')}." if wild else ""
    return "\n\n".join([sentences(opening), *details, ending]).strip()


def comparison(draw: Draw, world: World) -> str:
    """Two or three towns side by side: size, age, distance."""
    towns = draw.several(world.towns, draw.between(2, 4))
    parts = [f"How do {joined([town.name for town in towns])} compare?"]
    for first, second in pairwise(towns):
        large, small = (first, second) if first.people >= second.people else (second, first)
        elder, younger = (first, second) if first.founded <= second.founded else (second, first)
        claims = [
            f"{large.name} has {grouped(large.people)} people and {small.name} {grouped(small.people)}, "
            f"so {large.name} is larger by {grouped(large.people - small.people)}.",
            f"{elder.name} was founded in {elder.founded}, {younger.name} in {younger.founded}, "
            f"{counted(younger.founded - elder.founded, 'year')} later.",
            f"From {first.name} to {second.name} it is {counted(distance(first, second), 'kilometre')} "
            f"as the crow flies, towards the {bearing(first, second)}.",
            f"{first.name} makes {joined(first.goods)}, while {second.name} makes {joined(second.goods)}.",
            f"The {first.landmark} of {first.name} is {THIS_YEAR - first.built} years old, "
            f"the {second.landmark} of {second.name} {THIS_YEAR - second.built}.",
        ]
        parts += draw.several(claims, draw.between(2, 5))
    return sentences(parts)


def _town_question(draw: Draw, town: Town) -> tuple[str, str]:
    return draw.pick(
        (
            (f"On which river does {town.name} lie?", f"On the {town.river}."),
            (f"Who founded {town.name}?", f"{town.founder}, in {town.founded}."),
            (f"What is made in {town.name}?", f"{joined(town.goods)}."),
            (f"In which month is {town.festival} held in {town.name}?", f"In {town.month}."),
            (f"Which dish belongs to {town.name}?", f"The {town.dish}."),
            (f"Which region is {town.name} in?", f"In {town.region.name}, {town.region.terrain}."),
            (f"What should one see in {town.name}?", f"The {town.landmark}, built in {town.built}."),
        )
    )


def _person_question(draw: Draw, person: Person) -> tuple[str, str]:
    return draw.pick(
        (
            (f"Who made “{person.work}”?", f"{person.name}, the {person.trade}."),
            (f"Where was {person.name} born?", f"In {person.town.name}, in {person.born}."),
            (f"How old did {person.name} become?", f"{in_words(person.died - person.born)} years."),
        )
    )


def quiz(draw: Draw, world: World) -> str:
    """Questions about the country with their answers."""
    lines = [f"A quiz about {COUNTRY}, {counted(count := draw.long_tailed(4, 24), 'question')}.", ""]
    for number in range(1, count + 1):
        if draw.chance(0.7):
            question, answer = _town_question(draw, draw.pick(world.towns))
        else:
            question, answer = _person_question(draw, draw.pick(world.people))
        lines.append(f"{number}. {sentences([question])} {sentences([answer])}")
    return "\n".join(lines)


def register(draw: Draw, world: World) -> str:
    """Facts as table rows, one town or person a line."""
    if draw.chance(0.5):
        rows = [
            f"{town.name} | {town.region.name} | {town.river} | {town.founded} | {town.people}"
            for town in draw.several(world.towns, draw.long_tailed(4, 20))
        ]
        return "\n".join(["town | region | river | founded | people", *rows])
    rows = [
        f"{person.name} | {person.trade} | {person.town.name} | {person.born} | {person.died}"
        for person in draw.several(world.people, draw.long_tailed(4, 20))
    ]
    return "\n".join(["name | trade | town | born | died", *rows])


ARTICLES: tuple[tuple[Callable[[Draw, World], str], int], ...] = (
    (town_article, 10),
    (biography, 9),
    (nature_note, 6),
    (region_article, 3),
    (comparison, 5),
    (quiz, 4),
    (register, 2),
)
