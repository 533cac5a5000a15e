"""Recipes, instructions, letters and weather diaries."""

from __future__ import annotations

from collections.abc import Callable

from tools.bundled_text import words
from tools.bundled_text.draw import Draw
from tools.bundled_text.english import (
    articles,
    capital,
    counted,
    duration,
    expand,
    gerund,
    in_words,
    joined,
    ordinal,
    past,
    plural,
    sentences,
)
from tools.bundled_text.world import World

_DISHES = (
    "pie",
    "stew",
    "soup",
    "cake",
    "pudding",
    "salad",
    "omelette",
    "gratin",
    "curry",
    "casserole",
    "jelly",
)
_MEASURES = ("grams", "spoonfuls", "cups", "slices", "handfuls", "pinches")
_COOKING = {
    "prepare": (
        "Wash the {food} and chop it {fineness}.",
        "Cut the {food} into {pieces}.",
        "Grate the {food} {manner}.",
        "Soak the {food} in {warmth} water for {span}.",
        "Mix the {food} with a little {liquid}.",
    ),
    "combine": (
        "Add the {food} and stir {manner}.",
        "Fold in the {food}.",
        "Put the {food} into the {vessel} and cover it.",
        "Sprinkle the {food} on top.",
        "Pour the {liquid} over the {food} and wait {span}.",
    ),
    "heat": (
        "Bake it at {degrees} degrees for {span}.",
        "Let it simmer for {span}, stirring every {few} minutes.",
        "Boil it until it is {done}, about {span}.",
        "Fry it in {liquid} on both sides until {done}.",
    ),
    "serve": (
        "Serve {warmth}, with {extra} and {extra}.",
        "Leave it to cool for {span} before you cut it.",
        "It keeps for {few} days in a {vessel}.",
        "Taste it, and add {extra} if it is too {taste}.",
    ),
    "fineness": ("finely", "roughly", "into small cubes", "into thin strips"),
    "pieces": ("slices", "quarters", "cubes", "thin rings", "halves"),
    "manner": words.MANNERS,
    "warmth": ("hot", "cold", "warm"),
    "liquid": ("water", "milk", "cream", "broth", "oil", "vinegar", "cider", "juice"),
    "vessel": ("pan", "pot", "bowl", "jar", "dish", "tin"),
    "degrees": ("160", "170", "180", "190", "200", "210", "220"),
    "few": ("two", "three", "four", "five", "six"),
    "done": ("golden", "soft", "brown", "thick", "clear", "crisp"),
    "taste": words.TASTES,
    "extra": words.FOODS,
}
_REPAIR = {
    "step": (
        "{Handle} the {part} {manner}.",
        "Take the {part} off the {thing} and {handle} it.",
        "Look for a {quality} {part}; if there is one, {handle} it before going on.",
        "Hold the {part} with one hand and {handle} the {other} with the other.",
        "Use the {tool} to {handle} the {part}.",
        "{Handle} the {part} until it is {quality}.",
        "If the {part} is {quality}, {handle} it again, this time {manner}.",
        "Wait {span}, then {handle} the {other}.",
        "Never {handle} the {part} while the {other} is {quality}.",
    ),
    "quality": words.QUALITIES,
    "manner": words.MANNERS,
    "handle": words.HANDLING,
    "Handle": tuple(capital(verb) for verb in words.HANDLING),
}
_TOOLS = words.OBJECTS[34:47]
_LETTER = {
    "greeting": (
        "Dear {reader},",
        "My dear {reader},",
        "Hello {reader},",
        "Dearest {reader},",
    ),
    "opening": (
        "Thank you for your letter of the {day} of {month}.",
        "It is {texture} here in {town}, and I have time to write at last.",
        "You asked how things are in {town}.",
        "I hope this finds you less {mood} than last time.",
        "We arrived in {town} {span} late, but safe and {mood}.",
    ),
    "news": (
        "The {animal} has {acted} the {quality} {object} again.",
        "{friend} {acted} my {object} and is {mood} about it.",
        "Yesterday we went to the {place}, where a {trade} was {acting} a {material} {object}.",
        "Your {relative} sends you a {colour} {object} and some {food}.",
        "In the {room} I found the {object} you lost in {season}.",
        "I have been {mood} since {weekday}, and only {notion} helps.",
        "They are building a {quality} {place} beside the {landmark}.",
        "The {plant} by the {room} is in bloom, and the {animal} sleeps under it.",
        "{friend} says that {notion} matters more than {notion}; I am not so sure.",
        "We ate {food} with {food} at the {place}, and {friend} {rested} all evening.",
        "Do you remember the {trade} with the {quality} {object}? {friend} met him at {festival}.",
    ),
    "closing": (
        "Write soon, and tell me about the {object}.",
        "Please bring the {material} {object} when you come in {month}.",
        "The post goes in {span}, so I must close.",
        "Come in {month}, for {festival}.",
        "Stay {mood}, and do not forget the {food}.",
    ),
    "signature": (
        "Yours, {writer}",
        "With love, {writer}",
        "Your {mood} friend {writer}",
        "Best wishes, {writer}",
    ),
    "relative": ("mother", "father", "aunt", "uncle", "grandmother", "cousin", "sister", "brother"),
    "texture": words.TEXTURES,
    "mood": words.CHARACTERS,
    "animal": words.ANIMALS,
    "quality": words.QUALITIES,
    "object": words.OBJECTS,
    "material": words.MATERIALS,
    "colour": words.COLOURS,
    "food": words.FOODS,
    "place": words.PLACES,
    "room": words.ROOMS,
    "trade": words.TRADES,
    "notion": words.NOTIONS,
    "plant": words.PLANTS,
    "month": words.MONTHS,
    "weekday": words.WEEKDAYS,
    "season": words.SEASONS,
    "acted": tuple(past(verb) for verb in words.HANDLING),
    "acting": tuple(gerund(verb) for verb in words.HANDLING),
    "rested": tuple(past(verb) for verb in words.RESTING),
    "day": tuple(ordinal(day) for day in range(1, 29)),
}


def _span(draw: Draw) -> str:
    return duration(draw.pick((2, 5, 10, 15, 20, 25, 30, 40, 45, 60, 90, 120)))


def recipe(draw: Draw, world: World) -> str:
    """A recipe: what goes in, then numbered steps that use each ingredient once, in the order of the list."""
    foods = draw.several(words.FOODS, draw.between(3, 10))
    people = draw.between(2, 8)
    amounts = [f"{people * draw.between(1, 12)} {draw.pick(_MEASURES)} of {food}" for food in foods]
    steps = [
        expand(draw, _COOKING, "prepare" if index < len(foods) // 2 else "combine", food=food, span=_span(draw))
        for index, food in enumerate(foods)
    ]
    steps += [expand(draw, _COOKING, kind, span=_span(draw)) for kind in ("heat", "serve")]
    town = draw.pick(world.towns)
    title = f"{capital(foods[0])} and {foods[1]} {draw.pick(_DISHES)}"
    origin = f"This is how they make it in {town.name}. " if draw.chance(0.4) else ""
    numbered = [articles(f"{number}. {step}") for number, step in enumerate(steps, 1)]
    return "\n".join([title, f"{origin}For {in_words(people)} people you need {joined(amounts)}.", "", *numbered])


def instructions(draw: Draw, world: World) -> str:
    """How to look after or mend a thing, step by step, always with the same few parts and one tool."""
    thing, *parts = draw.several(words.OBJECTS, draw.between(4, 7))
    tool = draw.pick(_TOOLS)
    verb = draw.pick(words.HANDLING)
    trade, town = draw.pick(words.TRADES), draw.pick(world.towns)
    opening = [
        f"How to {verb} a {thing}.",
        f"You need a {tool}, a {draw.pick(words.QUALITIES)} cloth and about {_span(draw)}.",
        draw.pick(
            (
                f"A {trade} in {town.name} does it this way.",
                f"The parts are {joined(['the ' + part for part in parts])}.",
                f"It is easier than {gerund(draw.pick(words.HANDLING))} a {draw.pick(words.OBJECTS)}.",
            )
        ),
    ]
    steps = []
    for number in range(1, draw.long_tailed(4, 20) + 1):
        part, other = draw.several(parts, 2)
        step = expand(draw, _REPAIR, "step", part=part, other=other, thing=thing, tool=tool, span=_span(draw))
        steps.append(articles(draw.pick((f"{number}. {step}", f"{number}. {step}", f"{number}. {capital(step)}"))))
    return "\n".join([sentences(opening), "", *steps, f"{len(steps) + 1}. Put the {tool} back where it belongs."])


def letter(draw: Draw, world: World) -> str:
    """A letter from one town to another."""
    reader, writer, friend = draw.several(words.WOMEN + words.MEN, 3)
    town = draw.pick(world.towns)
    given = {"reader": reader, "writer": writer, "friend": friend, "town": town.name, "span": _span(draw)}
    given |= {"landmark": town.landmark, "festival": town.festival}
    paragraphs = [
        sentences([expand(draw, _LETTER, "news", **given) for _ in range(draw.between(2, 5))])
        for _ in range(draw.long_tailed(1, 6))
    ]
    opening, closing = (sentences([expand(draw, _LETTER, part, **given)]) for part in ("opening", "closing"))
    body = "\n\n".join([f"{opening} {paragraphs[0]}", *paragraphs[1:], closing])
    head = expand(draw, _LETTER, "greeting", **given)
    return f"{head}\n\n{body}\n\n{expand(draw, _LETTER, 'signature', **given)}"


def weather_diary(draw: Draw, world: World) -> str:
    """A few days of weather in one town, each compared with the day before."""
    town, month = draw.pick(world.towns), draw.pick(words.MONTHS)
    first, days = draw.between(1, 14), draw.long_tailed(3, 14)
    warmth, lines = draw.between(-6, 24), [f"Weather in {town.name}, {month}"]
    start = draw.below(7)
    for day in range(days):
        change = draw.between(-5, 5)
        warmth += change
        turn = f"{abs(change)} degrees {'warmer' if change > 0 else 'colder'} than the day before"
        compare = "as warm as the day before" if change == 0 else turn.replace("1 degrees", "1 degree")
        sky, wind = draw.pick(words.TEXTURES), draw.pick(words.DIRECTIONS)
        rain = draw.pick(("no rain", "a few drops", counted(draw.between(1, 30), "millimetre") + " of rain"))
        lines.append(
            f"{words.WEEKDAYS[(start + day) % 7]} {first + day}: {sky}, {warmth} °C, "
            f"{compare if day else 'at noon'}. Wind from the {wind}, {rain}."
        )
    return "\n".join(lines)


def rhyme(draw: Draw, world: World) -> str:
    """A counting rhyme that loses one thing with each verse."""
    noun = draw.pick(words.ANIMALS + words.COUNTED_FOODS + words.OBJECTS)
    place, mood = draw.pick(words.ROOMS + words.PLACES), draw.pick(words.QUALITIES)
    verb = past(draw.pick(words.RESTING))
    verses = []
    for count in range(draw.between(4, 10), 0, -1):
        many = f"{in_words(count)} {mood} {plural(noun) if count > 1 else noun}"
        left = f"{in_words(count - 1)} {'was' if count == 2 else 'were'} left" if count > 1 else "none was left"
        verses.append(f"{capital(many)} in the {place},\none of them {verb}, and {left}.")
    return "\n\n".join([*verses, f"That was in {draw.pick(world.towns).name}."])


EVERYDAY: tuple[tuple[Callable[[Draw, World], str], int], ...] = (
    (recipe, 8),
    (instructions, 7),
    (letter, 10),
    (weather_diary, 4),
    (rhyme, 2),
)
