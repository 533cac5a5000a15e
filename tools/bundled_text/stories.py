"""Little stories told by a simulator.

It keeps track of who is where, who holds what and what lies in which room, so that every answer given on
the way and the summary at the end are true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tools.bundled_text import words
from tools.bundled_text.draw import Draw
from tools.bundled_text.english import clock, expand, gerund, in_words, joined, past, sentences
from tools.bundled_text.world import World

_RULES = {
    "opening": (
        "It was a {texture} {weekday} in {month}, and {cast} were at home in {town}.",
        "On a {texture} morning in {season}, {cast} met in a house near the {landmark} of {town}.",
        "In {town}, not far from the {river}, lived {cast}.",
        "This is the story of {cast}, who shared a {quality} house in {town}.",
        "“Nothing ever happens in {town},” people used to say, but {cast} knew better.",
    ),
    "place_note": (
        "The {place} smelled of {food} and {food}.",
        "The {place} was {quality} and {quality}.",
        "There was a {quality} {material} {object} in the {place}, which nobody ever used.",
        "Somebody had left the window of the {place} open.",
        "From the {place} one could hear a {animal}.",
    ),
    "move": (
        "{who} {walked} to the {place}.",
        "{who} {manner} {walked} into the {place}.",
        "Then {who} {walked} from the {origin} to the {place}.",
        "{who} left the {origin} and {walked} into the {place}.",
        "“I shall be in the {place},” said {name}, and off {she} went.",
    ),
    "walked": ("walked", "went", "ran", "hurried", "strolled", "wandered", "tiptoed", "marched", "crept"),
    "take": (
        "{who} picked up the {thing}.",
        "{who} took the {thing} from the {surface}.",
        "In the {place} {name} found the {thing} and kept it.",
        "{who} saw the {thing} and {manner} took it along.",
    ),
    "drop": (
        "{who} left the {thing} in the {place}.",
        "{who} {manner} put the {thing} on the {surface} in the {place}.",
        "{who} had no more use for the {thing} and laid it down in the {place}.",
    ),
    "give": (
        "{who} gave the {thing} to {other}.",
        "“Would you look after the {thing}?” {name} asked, and {other} took it.",
        "{other} asked for the {thing}, and {name} handed it over {manner}.",
    ),
    "use": (
        "{who} {handled} the {thing} {manner}.",
        "For a while {who} {handled} the {thing}, {resting} now and then.",
        "{who} spent {minutes} minutes {handling} the {thing}.",
    ),
    "feeling": (
        "{who} felt {mood}, and {other} noticed.",
        "{who} was {mood} and {mood} at once.",
        "“You look {mood},” said {other}. {name} only {rested}.",
        "{who} {rested} {manner}, thinking of {notion}.",
        "{who} thought about {notion} and about {notion}.",
    ),
    "talk": (
        "“Do you like {food}?” asked {name}. “Only with {food},” {other} replied.",
        "“My {relative} was a {trade},” said {name}. “Mine was a {trade} in {town},” said {other}.",
        "“Is {notion} worth more than {notion}?” {name} wondered. {other} {rested} and gave no answer.",
        "{who} told {other} about a {quality} {animal} that lived under a {plant}.",
        "“The {animal} is back,” said {other}. “The {quality} one?” asked {name}.",
    ),
    "weather": (
        "Outside it grew {texture}.",
        "By {time} it had turned {texture}.",
        "The {month} sky was {texture} now, and the {plant} in the garden moved in the wind.",
    ),
    "meal": (
        "At {time} they ate {food} with {food}.",
        "{who} made a {taste} {food} pie, and everybody had a slice.",
        "There was {food} soup, which {name} found too {warmth}.",
    ),
    "surface": ("table", "shelf", "bench", "floor", "windowsill", "chair", "stool", "mantelpiece"),
    "relative": ("mother", "father", "aunt", "uncle", "grandmother", "grandfather", "cousin"),
    "warmth": words.TASTES,
    "taste": words.TASTES,
    "texture": words.TEXTURES,
    "weekday": words.WEEKDAYS,
    "quality": words.QUALITIES,
    "manner": words.MANNERS,
    "food": words.FOODS,
    "animal": words.ANIMALS,
    "plant": words.PLANTS,
    "material": words.MATERIALS,
    "object": words.OBJECTS,
    "mood": words.CHARACTERS,
    "notion": words.NOTIONS,
    "trade": words.TRADES,
    "handled": tuple(past(verb) for verb in words.HANDLING),
    "handling": tuple(gerund(verb) for verb in words.HANDLING),
    "rested": tuple(past(verb) for verb in words.RESTING),
    "resting": tuple(gerund(verb) for verb in words.RESTING),
}


@dataclass
class _Actor:
    name: str
    she: str
    place: str
    holds: list[str] = field(default_factory=list)


@dataclass
class _Scene:
    draw: Draw
    actors: list[_Actor]
    rooms: list[str]
    lies_in: dict[str, str]
    town: str
    month: str
    minute: int
    noted: list[str] = field(default_factory=list)
    last: _Actor | None = None

    def tell(self, symbol: str, actor: _Actor, **given: str) -> str:
        """One sentence about ``actor``, by pronoun when the sentence before was about the same person."""
        who = actor.she if actor is self.last and self.draw.chance(0.6) else actor.name
        self.last = actor
        given = {
            "who": who,
            "name": actor.name,
            "she": actor.she,
            "town": self.town,
            "month": self.month,
            **given,
        }
        given |= {"time": clock(self.minute), "minutes": in_words(self.draw.between(2, 40))}
        return expand(self.draw, _RULES, symbol, **given)

    def other(self, actor: _Actor) -> _Actor | None:
        """Somebody else in the same room."""
        near = [other for other in self.actors if other is not actor and other.place == actor.place]
        return self.draw.pick(near) if near else None

    def whereabouts(self, thing: str) -> str:
        """Where a thing is now, as the end of a sentence."""
        for actor in self.actors:
            if thing in actor.holds:
                return f"with {actor.name} in the {actor.place}"
        return f"in the {self.lies_in[thing]}"


def _move(scene: _Scene, actor: _Actor) -> list[str]:
    origin = actor.place
    actor.place = scene.draw.pick([room for room in scene.rooms if room != origin])
    lines = [scene.tell("move", actor, place=actor.place, origin=origin)]
    if actor.place not in scene.noted and scene.draw.chance(0.5):
        scene.noted.append(actor.place)
        lines.append(expand(scene.draw, _RULES, "place_note", place=actor.place))
    return lines


def _take(scene: _Scene, actor: _Actor) -> list[str]:
    here = [thing for thing, room in scene.lies_in.items() if room == actor.place]
    if not here:
        return []
    thing = scene.draw.pick(here)
    del scene.lies_in[thing]
    actor.holds.append(thing)
    return [scene.tell("take", actor, thing=thing, place=actor.place)]


def _drop(scene: _Scene, actor: _Actor) -> list[str]:
    if not actor.holds:
        return []
    thing = scene.draw.pick(actor.holds)
    actor.holds.remove(thing)
    scene.lies_in[thing] = actor.place
    return [scene.tell("drop", actor, thing=thing, place=actor.place)]


def _give(scene: _Scene, actor: _Actor) -> list[str]:
    other = scene.other(actor)
    if other is None or not actor.holds:
        return []
    thing = scene.draw.pick(actor.holds)
    actor.holds.remove(thing)
    other.holds.append(thing)
    return [scene.tell("give", actor, thing=thing, other=other.name)]


def _use(scene: _Scene, actor: _Actor) -> list[str]:
    return [scene.tell("use", actor, thing=scene.draw.pick(actor.holds))] if actor.holds else []


def _ask(scene: _Scene, actor: _Actor) -> list[str]:
    things = [*scene.lies_in, *(thing for one in scene.actors for thing in one.holds)]
    other = scene.other(actor)
    if other is None or not things:
        return []
    thing = scene.draw.pick(things)
    holder = next((one for one in scene.actors if thing in one.holds), None)
    scene.last = None
    if holder is other:
        return [f"“Where is the {thing}?” asked {actor.name}. “I have it here,” answered {other.name}."]
    if holder is actor:
        return [f"“Where is the {thing}?” asked {other.name}. “I have it,” said {actor.name}."]
    return [f"“Where is the {thing}?” asked {actor.name}. “It is {scene.whereabouts(thing)},” {other.name} said."]


def _mood(scene: _Scene, actor: _Actor) -> list[str]:
    other = scene.other(actor)
    return [scene.tell(scene.draw.pick(("feeling", "talk")), actor, other=other.name)] if other else []


def _pause(scene: _Scene, actor: _Actor) -> list[str]:
    scene.minute += scene.draw.between(5, 60)
    return [scene.tell(scene.draw.pick(("weather", "meal")), actor)]


_EVENTS: tuple[tuple[Callable[[_Scene, _Actor], list[str]], int], ...] = (
    (_move, 8),
    (_take, 7),
    (_drop, 3),
    (_give, 4),
    (_use, 4),
    (_ask, 4),
    (_mood, 5),
    (_pause, 3),
)


def _summary(scene: _Scene) -> str:
    where = [f"{actor.name} was in the {actor.place}" for actor in scene.actors]
    things = sorted([*scene.lies_in, *(thing for actor in scene.actors for thing in actor.holds)])
    facts = [f"The {thing} was {scene.whereabouts(thing)}." for thing in scene.draw.several(things, 4)]
    return sentences([f"When it was over, {joined(where)}.", *facts])


def _set_the_stage(draw: Draw) -> tuple[list[_Actor], list[str], list[str]]:
    rooms = draw.several(words.ROOMS, draw.between(3, 6))
    cast = [
        _Actor(name, she, draw.pick(rooms))
        for she, names in (("she", words.WOMEN), ("he", words.MEN))
        for name in draw.several(names, draw.between(1, 2))
    ]
    things = [
        f"{draw.pick(draw.pick((words.COLOURS, words.MATERIALS, words.QUALITIES)))} {noun}"
        for noun in draw.several(words.OBJECTS, draw.between(2, 6))
    ]
    return draw.shuffled(cast), rooms, things


def story(draw: Draw, world: World) -> str:
    """A story of a few to about a hundred events, in paragraphs, with a summary that is true."""
    cast, rooms, things = _set_the_stage(draw)
    town, month = draw.pick(world.towns), draw.below(12)
    scene = _Scene(
        draw=draw,
        actors=cast,
        rooms=rooms,
        lies_in={thing: draw.pick(rooms) for thing in things},
        town=town.name,
        month=words.MONTHS[month],
        minute=draw.between(420, 720),
    )
    given = {"cast": joined([actor.name for actor in cast]), "town": town.name, "river": town.river}
    given |= {"month": scene.month, "season": words.season(month), "landmark": town.landmark}
    opening = expand(draw, _RULES, "opening", **given)
    placing = [f"{actor.name} was in the {actor.place}." for actor in cast]
    placing += [f"The {thing} lay in the {room}." for thing, room in scene.lies_in.items() if draw.chance(0.7)]
    paragraphs = [sentences([opening, *placing])]
    events, told, lines = draw.long_tailed(4, 127), 0, list[str]()
    while told < events:
        actor = scene.last if scene.last and draw.chance(0.45) else draw.pick(cast)
        happened = draw.weighted(_EVENTS)(scene, actor)
        told += bool(happened)
        lines += happened
        if len(lines) >= 6 and draw.chance(0.3):
            paragraphs.append(sentences(lines))
            lines, scene.last = [], None
    paragraphs += [sentences(lines)] if lines else []
    return "\n\n".join([*paragraphs, _summary(scene)])
