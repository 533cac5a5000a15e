"""Sums, unit conversions and number puzzles, worked in words; every result is right."""

from __future__ import annotations

from collections.abc import Callable

from tools.bundled_text import words
from tools.bundled_text.draw import Draw
from tools.bundled_text.english import (
    clock,
    counted,
    duration,
    grouped,
    in_words,
    joined,
    money,
    plural,
    sentences,
)

# Larger unit, smaller unit, how many of the smaller make one of the larger.
_UNITS = (
    ("kilometre", "metre", 1000),
    ("metre", "centimetre", 100),
    ("centimetre", "millimetre", 10),
    ("kilogram", "gram", 1000),
    ("tonne", "kilogram", 1000),
    ("litre", "millilitre", 1000),
    ("hour", "minute", 60),
    ("minute", "second", 60),
    ("day", "hour", 24),
    ("week", "day", 7),
    ("dozen", "piece", 12),
    ("foot", "inch", 12),
    ("yard", "foot", 3),
)
_IRREGULAR_UNITS = {"foot": "feet", "dozen": "dozen"}


def _units(name: str) -> str:
    return _IRREGULAR_UNITS.get(name, plural(name))


def _unit(number: int, name: str) -> str:
    return f"{number} {name if number == 1 else _units(name)}"


def _person(draw: Draw) -> tuple[str, str]:
    is_woman = draw.chance(0.5)
    return draw.pick(words.WOMEN if is_woman else words.MEN), "she" if is_woman else "he"


def _gather(draw: Draw) -> str:
    (name, she), (other, _) = _person(draw), _person(draw)
    noun, box = draw.pick(words.COUNTED_FOODS + words.OBJECTS), draw.pick(words.BOXES)
    have, more, gone = draw.between(5, 60), draw.between(2, 40), draw.between(1, 6)
    total = have + more
    return sentences(
        [
            f"{name} has {have} {plural(noun)} in a {box}.",
            f"{other} brings {more} more, so now there are {have} + {more} = {total}.",
            f"{she} gives away {in_words(gone)}, and {total} - {gone} = {total - gone} are left.",
            f"Altogether {name} keeps {in_words(total - gone)} {plural(noun)}.",
        ]
    )


def _share(draw: Draw) -> str:
    noun, people = draw.pick(words.COUNTED_FOODS), draw.between(2, 9)
    amount = draw.between(people * 2, people * 15)
    each, rest = divmod(amount, people)
    who = draw.pick(("children", "friends", "sailors", "neighbours"))
    ending = f"{in_words(rest)} {'is' if rest == 1 else 'are'} left over" if rest else "nothing is left over"
    return sentences(
        [
            f"{in_words(people)} {who} share {amount} {plural(noun)} equally.",
            f"{amount} divided by {people} is {each}, because {people} times {each} is {people * each}.",
            f"Each gets {each}, and {ending}.",
        ]
    )


def _shopping(draw: Draw) -> str:
    name, she = _person(draw)
    bought = [
        (noun, draw.between(1, 9), 5 * draw.between(2, 60))
        for noun in draw.several(words.COUNTED_FOODS, draw.between(1, 5))
    ]
    total = sum(number * price for _, number, price in bought)
    paid = (total // 500 + draw.between(1, 3)) * 500
    lines = [f"{counted(number, noun)} at {money(price)} each" for noun, number, price in bought]
    steps = [
        f"The {plural(noun) if number > 1 else noun} cost {number} x {price} = {number * price} bits."
        for noun, number, price in bought
    ]
    return sentences(
        [
            f"{name} buys {joined(lines)}.",
            *steps,
            f"That makes {money(total)} in all.",
            f"{she} pays with {money(paid)} and gets back {money(paid - total)}.",
        ]
    )


def _conversion(draw: Draw) -> str:
    large, small, factor = draw.pick(_UNITS)
    whole, part = draw.between(1, 40), draw.between(1, factor - 1)
    return sentences(
        [
            f"How many {_units(small)} are {_unit(whole, large)} and {_unit(part, small)}?",
            f"One {large} is {_unit(factor, small)}, so {_unit(whole, large)} "
            f"{'is' if whole == 1 else 'are'} {whole} x {factor} = {_unit(whole * factor, small)}.",
            f"Adding {part} gives {_unit(whole * factor + part, small)}.",
        ]
    )


def _temperature(draw: Draw) -> str:
    celsius = 5 * draw.between(-8, 24)
    return sentences(
        [
            f"A thermometer shows {celsius} °C.",
            f"To get degrees Fahrenheit, multiply by nine, divide by five and add 32: "
            f"{celsius} x 9 / 5 = {celsius * 9 // 5}, and {celsius * 9 // 5} + 32 = {celsius * 9 // 5 + 32}.",
            f"So {celsius} °C is {celsius * 9 // 5 + 32} °F.",
        ]
    )


def _journey(draw: Draw) -> str:
    name, she = _person(draw)
    speed, hours, start = draw.between(3, 24) * 4, draw.between(1, 7), draw.between(60, 200) * 5
    quarter = draw.between(0, 3)
    travelled, minutes = speed * hours + speed * quarter // 4, 60 * hours + 15 * quarter
    how = draw.pick(("by tram", "on a bicycle", "by boat", "in a cart", "by train", "on horseback"))
    return sentences(
        [
            f"{name} travels {how} at {speed} kilometres an hour and leaves at {clock(start)}.",
            f"After {duration(minutes)} {she} has come {counted(travelled, 'kilometre')}, "
            f"and the clock shows {clock(start + minutes)}.",
        ]
    )


def _field(draw: Draw) -> str:
    length, width = draw.between(4, 90), draw.between(3, 60)
    what = draw.pick((*words.ROOMS[-6:], "field", "carpet", "roof", "playground", "meadow"))
    return sentences(
        [
            f"The {what} is {length} metres long and {width} metres wide.",
            f"Its area is {length} x {width} = {grouped(length * width)} square metres.",
            f"A fence all round measures 2 x ({length} + {width}) = {2 * (length + width)} metres.",
        ]
    )


def _percentage(draw: Draw) -> str:
    price, rate = 20 * draw.between(5, 400), 5 * draw.between(1, 12)
    cut = price * rate // 100
    return sentences(
        [
            f"A {draw.pick(words.QUALITIES)} {draw.pick(words.OBJECTS)} costs {money(price)}.",
            f"In the sale it is {rate} per cent cheaper.",
            f"{rate} per cent of {grouped(price)} bits is {grouped(cut)} bits, "
            f"so the new price is {money(price - cut)}.",
        ]
    )


def _sequence(draw: Draw) -> str:
    start, step, shown = draw.between(1, 30), draw.between(2, 13), draw.between(4, 8)
    doubling = draw.chance(0.3)
    row = [start << index if doubling else start + step * index for index in range(shown + 2)]
    rule = "each is twice the one before" if doubling else f"the step is always {in_words(step)}"
    return sentences(
        [
            f"Continue the row {', '.join(map(str, row[:shown]))}.",
            f"Here {rule}, so the next two are {row[shown]} and {row[shown + 1]}.",
        ]
    )


def _count(draw: Draw) -> str:
    start, step = draw.between(1, 900), draw.pick((1, 1, 1, 2, 5, 10))
    row = [in_words(start + step * index) for index in range(draw.between(5, 14))]
    return sentences([f"Count by {in_words(step)} from {start}: {', '.join(row)}."])


def _average(draw: Draw) -> str:
    town = draw.pick(("rain", "eggs", "visitors", "letters", "loaves"))
    count, mean = draw.between(3, 7), draw.between(10, 60)
    shifts = [draw.between(-9, 9) for _ in range(count - 1)]
    values = [mean + shift for shift in [*shifts, 0]]
    total = sum(values)
    whole, rest = divmod(total, count)
    result = f"{whole}" if not rest else f"{whole} and {rest} over"
    return sentences(
        [
            f"On {count} days the {town} came to {joined([str(value) for value in values])}.",
            f"The sum is {total}; divided by {count} that makes {result}.",
            f"The largest number was {max(values)} and the smallest {min(values)}.",
        ]
    )


_PROBLEMS: tuple[tuple[Callable[[Draw], str], int], ...] = (
    (_gather, 5),
    (_share, 4),
    (_shopping, 5),
    (_conversion, 5),
    (_temperature, 2),
    (_journey, 3),
    (_field, 2),
    (_percentage, 3),
    (_sequence, 3),
    (_count, 2),
    (_average, 2),
)


def worked_problems(draw: Draw) -> str:
    """A few worked problems of mixed kinds, or many of one kind, as in an exercise book."""
    count = draw.long_tailed(1, 12)
    if draw.chance(0.3):
        same = draw.weighted(_PROBLEMS)
        problems = [same(draw) for _ in range(count)]
    else:
        problems = [draw.weighted(_PROBLEMS)(draw) for _ in range(count)]
    if count > 2 and draw.chance(0.6):
        problems = [f"{number}. {problem}" for number, problem in enumerate(problems, 1)]
    return "\n\n".join(problems)


def times_table(draw: Draw) -> str:
    """A multiplication table for one or more numbers."""
    tables = []
    for base in draw.several(range(2, 26), draw.between(1, 4)):
        spoken = draw.chance(0.5)
        rows = [
            f"{in_words(base)} times {in_words(index)} is {in_words(base * index)}."
            if spoken
            else f"{base} x {index} = {base * index}"
            for index in range(1, 11)
        ]
        tables.append("\n".join([f"The table of {in_words(base)}", *(sentences([row]) for row in rows)]))
    return "\n\n".join(tables)
