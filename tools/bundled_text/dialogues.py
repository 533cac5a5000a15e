"""Conversations: at the market, at the railway counter, on the street, guessing games, small talk."""

from __future__ import annotations

from collections.abc import Callable

from tools.bundled_text import words
from tools.bundled_text.draw import Draw
from tools.bundled_text.encyclopedia import town_facts
from tools.bundled_text.english import (
    capital,
    clock,
    counted,
    duration,
    expand,
    in_words,
    joined,
    money,
    past,
    plural,
    sentences,
)
from tools.bundled_text.world import World, bearing, distance

_CHAT = {
    "hello": (
        "Good morning.",
        "Hello.",
        "Good evening, {b}.",
        "Ah, {b}, there you are.",
        "How are you, {b}?",
    ),
    "bye": (
        "Goodbye, {b}.",
        "Until {weekday}, then.",
        "Thank you, {b}.",
        "Mind the {object} on your way out.",
    ),
    "ask": (
        "Have you seen my {quality} {object}?",
        "Did you {handle} the {object} as I asked?",
        "Why is the {object} so {quality}?",
        "Shall we {handle} the {object} before {weekday}?",
        "What do you think of {notion}?",
        "Is it true that {c} is a {trade} now?",
        "Would you like some {food} with your {food}?",
    ),
    "answer": (
        "I {handled} it on {weekday}, together with the {object}.",
        "Only if it is {texture} tomorrow.",
        "No, but {c} has a {material} one.",
        "Ask {c}, who was at the {place} all day.",
        "I would rather {handle} the {colour} {object}.",
        "{Notion} is for {trades}; I prefer {notion}.",
        "You are too {mood}, {b}. Leave it in the {room}.",
        "My {animal} {rested} when I told it so.",
        "Yes, and with {food} as well.",
    ),
    "quality": words.QUALITIES,
    "object": words.OBJECTS,
    "material": words.MATERIALS,
    "colour": words.COLOURS,
    "handle": words.HANDLING,
    "handled": tuple(past(verb) for verb in words.HANDLING),
    "rested": tuple(past(verb) for verb in words.RESTING),
    "weekday": words.WEEKDAYS,
    "notion": words.NOTIONS,
    "Notion": tuple(capital(notion) for notion in words.NOTIONS),
    "trade": words.TRADES,
    "trades": tuple(plural(trade) for trade in words.TRADES),
    "food": words.FOODS,
    "texture": words.TEXTURES,
    "place": words.PLACES,
    "room": words.ROOMS,
    "mood": words.CHARACTERS,
    "animal": words.ANIMALS,
}


def _script(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{speaker}: {sentences([text])}" for speaker, text in lines)


def small_talk(draw: Draw, world: World) -> str:
    """Two people talk about things, somebody absent, and now and then about a town they know."""
    first, second, absent = draw.several(words.WOMEN + words.MEN, 3)
    town = draw.pick(world.towns)
    lines = [(first, expand(draw, _CHAT, "hello", b=second))]
    for turn in range(draw.long_tailed(3, 30) | 1):
        speaker, listener = (second, first) if turn % 2 == 0 else (first, second)
        kind = "answer" if turn % 3 else "ask"
        if draw.chance(0.15):
            text = " ".join(town_facts(draw, town, (draw.pick(("industry", "table", "feast", "sight")),)))
        else:
            text = expand(draw, _CHAT, kind, b=listener, c=absent)
        lines.append((speaker, text))
    return _script([*lines, (first, expand(draw, _CHAT, "bye", b=second))])


def at_the_market(draw: Draw, world: World) -> str:
    """Buying things one after the other while the seller keeps a running total."""
    buyer, seller = draw.pick(words.WOMEN + words.MEN), f"The {draw.pick(words.TRADES)}"
    total = 0
    lines = [(seller, draw.pick(("What may I give you?", "Good day! What will it be?", "You are next.")))]
    for noun in draw.several(words.COUNTED_FOODS + words.OBJECTS, draw.long_tailed(1, 8)):
        price, number = 5 * draw.between(1, 80), draw.between(1, 12)
        total += price * number
        lines += [
            (buyer, f"What does a {noun} cost?"),
            (seller, f"{money(price)}."),
            (buyer, f"Then I take {in_words(number)}."),
            (seller, f"{counted(number, noun)}, that is {money(price * number)}; {money(total)} so far."),
        ]
    paid = (total // 1000 + 1) * 1000
    lines += [
        (buyer, f"That is all. Here are {money(paid)}."),
        (seller, f"And {money(paid - total)} back. Greetings to {draw.pick(world.towns).name}!"),
    ]
    return _script(lines)


def at_the_counter(draw: Draw, world: World) -> str:
    """A traveller asks for the way by train; line, stops and times follow the map."""
    traveller, line = draw.pick(words.WOMEN + words.MEN), draw.pick(world.lines)
    start = draw.between(0, len(line.stops) - 2)
    end = draw.between(start + 1, len(line.stops) - 1)
    origin, target = line.stops[start], line.stops[end]
    ride, leave = sum(line.minutes[start:end]), draw.between(70, 260) * 5
    between = [stop.name for stop in line.stops[start + 1 : end]]
    lines = [
        (traveller, f"How do I get from {origin.name} to {target.name}?"),
        ("Clerk", f"Take the {line.name}. {target.name} is {distance(origin, target)} km to the "
                  f"{bearing(origin, target)}."),
        (traveller, "Where does the train stop on the way?"),
        ("Clerk", f"At {joined(between)}." if between else "Nowhere, it is the next stop."),
        (traveller, "When does it leave, and how long does it take?"),
        ("Clerk", f"At {clock(leave)}. After {duration(ride)} you arrive, at {clock(leave + ride)}."),
    ]  # fmt: skip
    if draw.chance(0.6):
        topics = tuple(draw.several(("sight", "table", "feast", "industry"), draw.between(1, 3)))
        lines += [
            (traveller, f"And what is there to do in {target.name}?"),
            ("Clerk", sentences(town_facts(draw, target, topics))),
        ]
    return _script([*lines, (traveller, "Thank you."), ("Clerk", "Have a good journey.")])


def asking_the_way(draw: Draw, world: World) -> str:
    """Directions through a town, then the same way back with every turn reversed."""
    stranger, local = draw.several(words.WOMEN + words.MEN, 2)
    stops = draw.several(words.PLACES, draw.between(3, 7))
    turns = [draw.pick(("left", "right")) for _ in stops[1:]]
    there = [f"turn {turn} at the {stop}" for turn, stop in zip(turns, stops, strict=False)]
    flipped = {"left": "right", "right": "left"}
    back = [
        f"turn {flipped[turn]} at the {stop}" for turn, stop in zip(reversed(turns), reversed(stops[:-1]), strict=True)
    ]
    steps = draw.between(1, 9) * 50
    return _script(
        [
            (stranger, f"Excuse me, where is the {stops[-1]} of {draw.pick(world.towns).name}?"),
            (
                local,
                f"First {joined(there, 'and then')}. After {steps} steps you will see the {stops[-1]}.",
            ),
            (stranger, f"So first {there[0]}. And how do I come back?"),
            (local, f"The same way in reverse: {joined(back, 'and then')}."),
            (stranger, f"Thank you, {local}."),
        ]
    )


def guessing_game(draw: Draw, world: World) -> str:
    """One person thinks of a number; the other always halves what is left, so every guess follows."""
    asker, guesser = draw.several(words.WOMEN + words.MEN, 2)
    low, high = 1, draw.pick((15, 31, 63, 100, 127, 200, 500, 1000))
    secret = draw.between(low, high)
    lines = [(asker, f"I am thinking of a number from {low} to {high}.")]
    tries = 0
    while True:
        guess, tries = (low + high) // 2, tries + 1
        lines.append((guesser, draw.pick((f"Is it {guess}?", f"{guess}?", f"I say {guess}."))))
        if guess == secret:
            break
        if guess < secret:
            low = guess + 1
        else:
            high = guess - 1
        hint = f"Larger than {guess}." if guess < secret else f"Smaller than {guess}."
        lines.append((asker, hint if draw.chance(0.6) else f"{hint} It is between {low} and {high}."))
    lines.append((asker, f"Yes, it is {secret}. You needed {in_words(tries)} {'try' if tries == 1 else 'tries'}."))
    return _script(lines)


DIALOGUES: tuple[tuple[Callable[[Draw, World], str], int], ...] = (
    (small_talk, 10),
    (at_the_market, 5),
    (at_the_counter, 6),
    (asking_the_way, 3),
    (guessing_game, 4),
)
