"""Timetables, account books, league tables, inventories and code: documents whose lines must agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tools.bundled_text import words
from tools.bundled_text.draw import Draw
from tools.bundled_text.english import (
    clock,
    counted,
    duration,
    in_words,
    joined,
    money,
    plural,
    sentences,
)
from tools.bundled_text.world import World


def timetable(draw: Draw, world: World) -> str:
    """Departures of one line at every stop, and questions that the table answers."""
    line = draw.pick(world.lines)
    first, gap, trains = draw.between(60, 100) * 5, draw.pick((20, 30, 45, 60, 90)), draw.between(2, 6)
    leaves = [[first + gap * train] for train in range(trains)]
    for times in leaves:
        for minutes in line.minutes:
            times.append(times[-1] + minutes)
    rows = [
        f"{stop.name}: {' '.join(clock(times[index]) for times in leaves)}" for index, stop in enumerate(line.stops)
    ]
    notes = [f"A train runs every {duration(gap)}, {in_words(trains)} in all."]
    for _ in range(draw.between(0, 4)):
        start = draw.between(0, len(line.stops) - 2)
        end = draw.between(start + 1, len(line.stops) - 1)
        train = draw.below(trains)
        notes.append(
            f"Whoever boards at {line.stops[start].name} at {clock(leaves[train][start])} "
            f"reaches {line.stops[end].name} at {clock(leaves[train][end])}, "
            f"{duration(sum(line.minutes[start:end]))} later."
        )
    return "\n".join([f"{line.name}, {draw.pick(words.WEEKDAYS)}s", *rows, "", sentences(notes)])


def account_book(draw: Draw, world: World) -> str:
    """Money in and out with a running balance."""
    owner, town = draw.pick(words.TRADES), draw.pick(world.towns)
    balance, month = draw.between(20, 400) * 100, draw.pick(words.MONTHS)
    lines = [
        f"Account book of the {owner} of {town.name}, {month}",
        f"Balance brought forward: {money(balance)}",
    ]
    day = 1
    for _ in range(draw.long_tailed(4, 20)):
        day = min(30, day + draw.between(0, 3))
        amount, thing = 5 * draw.between(10, 900), draw.pick(words.OBJECTS + words.COUNTED_FOODS)
        buys = draw.chance(0.5) and amount < balance
        number = draw.between(1, 9)
        balance += -amount if buys else amount
        verb, where = ("bought", "paid") if buys else ("sold", "received")
        lines.append(
            f"{day} {month}: {verb} {counted(number, thing)}, {where} {money(amount)}. Balance {money(balance)}"
        )
    return "\n".join([*lines, f"Carried over to the next page: {money(balance)}"])


@dataclass
class _Team:
    name: str
    points: int = 0
    scored: int = 0
    conceded: int = 0


def league(draw: Draw, world: World) -> str:
    """A tournament in which everybody plays everybody, and the table that follows from the results."""
    game = draw.pick(("chess", "handball", "football", "curling", "rowing", "skittles", "ice hockey"))
    teams = [_Team(town.name) for town in draw.several(world.towns, draw.between(3, 6))]
    lines = [f"The {game} league of {draw.pick(words.SEASONS)}"]
    for index, home in enumerate(teams):
        for guest in teams[index + 1 :]:
            ours, theirs = draw.between(0, 5), draw.between(0, 5)
            home.scored, home.conceded = home.scored + ours, home.conceded + theirs
            guest.scored, guest.conceded = guest.scored + theirs, guest.conceded + ours
            home.points += 2 if ours > theirs else int(ours == theirs)
            guest.points += 2 if theirs > ours else int(ours == theirs)
            result = "beat" if ours > theirs else "lost to" if ours < theirs else "drew with"
            lines.append(f"{home.name} {result} {guest.name} {ours}:{theirs}.")
    table = sorted(teams, key=lambda team: (-team.points, team.conceded - team.scored, team.name))
    rows = [
        f"{rank}. {team.name}, {counted(team.points, 'point')}, {team.scored}:{team.conceded}"
        for rank, team in enumerate(table, 1)
    ]
    return "\n".join([*lines, "", "Final table", *rows, "", f"The winner is {table[0].name}."])


def inventory(draw: Draw, world: World) -> str:
    """What is on the shelves, what comes and goes, and what is there in the end."""
    place, town = draw.pick(words.PLACES + words.ROOMS), draw.pick(world.towns)
    stock = {
        noun: draw.between(1, 40) for noun in draw.several(words.OBJECTS + words.COUNTED_FOODS, draw.between(3, 9))
    }
    lines = [f"Stock of the {place} in {town.name}: {joined([counted(n, noun) for noun, n in stock.items()])}."]
    for _ in range(draw.long_tailed(2, 16)):
        noun = draw.pick(tuple(stock))
        change = draw.between(1, 15)
        if change < stock[noun] and draw.chance(0.6):
            stock[noun] -= change
            lines.append(f"{counted(change, noun)} went out, {stock[noun]} left.")
        else:
            stock[noun] += change
            lines.append(f"{counted(change, noun)} came in, now {stock[noun]}.")
    total = sum(stock.values())
    lines.append(f"At closing time there were {joined([counted(n, noun) for noun, n in stock.items()])}.")
    return sentences([*lines, f"That is {counted(total, 'thing')} altogether."])


def ordering_puzzle(draw: Draw, world: World) -> str:
    """Neighbouring pairs of a hidden order in random sequence, then the order itself and questions on it."""
    more, most, least = draw.pick(
        (
            ("taller", "tallest", "shortest"),
            ("older", "oldest", "youngest"),
            ("faster", "fastest", "slowest"),
            ("richer", "richest", "poorest"),
            ("heavier", "heaviest", "lightest"),
        )
    )
    people = draw.several(words.WOMEN + words.MEN, draw.between(3, 7))
    clues = draw.shuffled([f"{a} is {more} than {b}." for a, b in pairwise(people)])
    steps = [f"Who is the {most}? {people[0]}.", f"Who is the {least}? {people[-1]}."]
    for _ in range(draw.between(1, 5)):
        first, second = sorted(draw.several(range(len(people)), 2))
        asked = draw.pick(((first, second), (second, first)))
        verdict = "Yes" if asked == (first, second) else "No"
        steps.append(f"Is {people[asked[0]]} {more} than {people[asked[1]]}? {verdict}.")
    return sentences([*clues, f"In order, beginning with the {most}: {joined(people)}.", *steps])


def spelling_lesson(draw: Draw, world: World) -> str:
    """Words spelled, reversed, counted and sorted."""
    noun_tables = (words.OBJECTS, words.ANIMALS, words.COUNTED_FOODS, words.PLANTS, words.TRADES)
    lines = []
    for word in draw.several([noun for table in noun_tables for noun in table if " " not in noun], draw.between(2, 9)):
        lines += draw.several(
            (
                f"The word “{word}” is spelled {'-'.join(word)}.",
                f"Backwards, {word} reads {word[::-1]}.",
                f"“{word}” has {counted(len(word), 'letter')}, from {word[0]} to {word[-1]}.",
                f"One {word}, two {plural(word)}.",
            ),
            draw.between(1, 3),
        )
    group = draw.several(draw.pick(noun_tables), draw.between(4, 12))
    return sentences([*lines, f"In alphabetical order, {joined(group)} become {joined(sorted(group))}."])


def _function(draw: Draw) -> list[str]:
    first, second = (noun.replace(" ", "_") for noun in draw.several(words.FOODS, 2))
    price, other, extra = draw.between(2, 19), draw.between(2, 19), draw.between(0, 30)
    calls = [(draw.between(0, 20), draw.between(0, 20)) for _ in range(draw.between(1, 4))]
    name = draw.pick(("total", "price", "weight", "cost", "score")) + f"_of_{first}_and_{second}"
    body = [f"    total = {price} * {first} + {other} * {second}"]
    if extra:
        body += [f"    if {first} > {second}:", f"        total = total + {extra}"]
    examples = []
    for a, b in calls:
        result = price * a + other * b + (extra if a > b else 0)
        examples += [f">>> {name}({a}, {b})", str(result)]
    return [f"def {name}({first}, {second}):", *body, "    return total", "", *examples]


def _loop(draw: Draw) -> list[str]:
    noun = draw.pick(words.OBJECTS)
    start, step, count = draw.between(0, 20), draw.between(1, 9), draw.between(3, 8)
    stop = start + step * count
    output = [f"{noun} {value}" for value in range(start, stop, step)]
    return [f"for number in range({start}, {stop}, {step}):", f'    print("{noun}", number)', "", *output]


def _listing(draw: Draw) -> list[str]:
    nouns = draw.several(words.ANIMALS + words.PLANTS, draw.between(3, 8))
    name = draw.pick(("names", "words", "things", "found"))
    lines = [f"{name} = {json.dumps(nouns)}"]
    index = draw.below(len(nouns))
    lines += [f">>> len({name})", str(len(nouns)), f">>> {name}[{index}]", repr(nouns[index])]
    return [
        *lines,
        f">>> sorted({name})",
        repr(sorted(nouns)),
        f">>> max({name}, key=len)",
        repr(max(nouns, key=len)),
    ]


def _record(draw: Draw, world: World) -> list[str]:
    town = draw.pick(world.towns)
    record = {"name": town.name, "region": town.region.name, "river": town.river, "people": town.people}
    record |= {"founded": town.founded, "goods": list(town.goods)}
    keys = sorted(draw.several(tuple(record), draw.between(2, 5)))
    return json.dumps({key: record[key] for key in keys}, indent=2, ensure_ascii=False).splitlines()


def code(draw: Draw, world: World) -> str:
    """Small Python snippets with the output they give, and JSON records of towns."""
    blocks = []
    for _ in range(draw.long_tailed(1, 6)):
        maker = draw.weighted(((_function, 3), (_loop, 2), (_listing, 2)))
        blocks.append("\n".join(_record(draw, world) if draw.chance(0.2) else maker(draw)))
    return "\n\n".join(blocks)


RECORDS: tuple[tuple[Callable[[Draw, World], str], int], ...] = (
    (timetable, 5),
    (account_book, 5),
    (league, 3),
    (inventory, 5),
    (ordering_puzzle, 4),
    (spelling_lesson, 3),
    (code, 6),
)
