"""Small rules of English: articles, plurals, verb forms, numbers in words, lists, and template expansion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tools.bundled_text.draw import Draw
from tools.bundled_text.words import table

_SMALL = table("""
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen
""")
_TENS = table("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
_ORDINALS = table("""
    zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth
    fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth
""")

_IRREGULAR_PLURALS = {
    "knife": "knives", "wolf": "wolves", "goose": "geese", "mouse": "mice", "sheep": "sheep", "deer": "deer",
    "elk": "elk", "fish": "fish", "trout": "trout", "salmon": "salmon", "pike": "pike", "carp": "carp",
    "dice": "dice", "shelf": "shelves", "loaf": "loaves", "herring": "herring", "potato": "potatoes",
    "tomato": "tomatoes", "scarf": "scarves", "fisherman": "fishermen", "ferryman": "ferrymen",
    "postman": "postmen",
}  # fmt: skip
_DOUBLING = {"drop", "drag", "scrub", "wrap", "unwrap", "nod", "shrug", "hum", "swap", "label"}
_VOWEL_SOUND = re.compile(r"(?:[aeio]|hour|honest|u(?!ni|se|su|ti))", re.IGNORECASE)
_LONE_ARTICLE = re.compile(r"\b([Aa]) (?=([^\W\d]+))")
_SLOT = re.compile(r"\{(\w+)\}")


def articles(text: str) -> str:
    """Turns "a" into "an" wherever the next word starts with a vowel sound."""

    def mend(match: re.Match[str]) -> str:
        word = match.group(2)
        vowel = _VOWEL_SOUND.match(word) and not word.lower().startswith(("one", "eu"))
        return f"{match.group(1)}{'n' if vowel else ''} "

    return _LONE_ARTICLE.sub(mend, text)


def capital(text: str) -> str:
    """The text with a capital first letter, the rest untouched."""
    return text[:1].upper() + text[1:]


def plural(noun: str) -> str:
    """The plural of a noun or noun phrase whose last word is the noun."""
    head, space, last = noun.rpartition(" ")
    if last in _IRREGULAR_PLURALS:
        many = _IRREGULAR_PLURALS[last]
    elif last.endswith("y") and last[-2] not in "aeiou":
        many = last[:-1] + "ies"
    else:
        many = last + ("es" if last.endswith(("s", "x", "z", "ch", "sh")) else "s")
    return head + space + many


def counted(number: int, noun: str) -> str:
    """ "1 apple", "7 apples"."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def past(verb: str) -> str:
    """The simple past of a regular verb, or "shook"."""
    if verb == "shake":
        return "shook"
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + (verb[-1] if verb in _DOUBLING else "") + "ed"


def gerund(verb: str) -> str:
    """The present participle of a verb."""
    if verb.endswith("e"):
        return verb[:-1] + "ing"
    return verb + (verb[-1] if verb in _DOUBLING else "") + "ing"


def joined(parts: Sequence[str], word: str = "and") -> str:
    """ "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def in_words(number: int) -> str:
    """A whole number from 0 to 999,999 in British English words."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, unit = divmod(number, 10)
        return _TENS[tens] + (f"-{_SMALL[unit]}" if unit else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    high, rest = divmod(number, size)
    link = " and " if rest < 100 else " "
    return f"{in_words(high)} {name}" + (f"{link}{in_words(rest)}" if rest else "")


def ordinal(number: int) -> str:
    """ "first" to "twentieth" in words, "21st" and so on after that."""
    if number < len(_ORDINALS):
        return _ORDINALS[number]
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def grouped(number: int) -> str:
    """ "12,345"."""
    return f"{number:,}"


def clock(minutes: int) -> str:
    """Minutes after midnight as "09:05"."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def duration(minutes: int) -> str:
    """ "2 hours and 5 minutes"."""
    hours, rest = divmod(minutes, 60)
    parts = [counted(hours, "hour")] if hours else []
    return joined([*parts, counted(rest, "minute")] if rest or not hours else parts)


def money(pence: int) -> str:
    """An amount in the invented world's currency: 100 bits make one crown."""
    crowns, bits = divmod(pence, 100)
    parts = [counted(crowns, "crown")] if crowns else []
    return joined([*parts, counted(bits, "bit")] if bits or not crowns else parts)


def expand(draw: Draw, rules: Mapping[str, Sequence[str]], symbol: str, **given: str) -> str:
    """A sentence grown from a context-free grammar.

    Args:
        draw: source of choices.
        rules: for each symbol the templates it can become; ``{other}`` in a template is expanded in turn.
        symbol: where to start.
        given: values that stand for a symbol wherever it occurs.

    Raises:
        KeyError: a template names a symbol that has neither a rule nor a value.
    """

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return given[name] if name in given else expand(draw, rules, name, **given)

    return _SLOT.sub(fill, draw.pick(rules[symbol]))


def sentences(parts: Sequence[str]) -> str:
    """Finished sentences in one paragraph: capitals and articles put right."""
    return articles(" ".join(capital(part) for part in parts if part))
