"""Questions with a right answer, a wrong one, and the short form of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import words

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True)
class Question:
    """One question and what can be said to it."""

    ask: str
    right: str
    wrong: str
    short_right: str
    short_wrong: str


def draw_question(rng: Random) -> Question:
    """Draws one question of any kind."""
    kinds = (_arithmetic, _arithmetic, _fact, _fact, _story, _favour)
    return rng.choice(kinds)(rng)


def _arithmetic(rng: Random) -> Question:
    first, second = rng.randrange(2, 21), rng.randrange(2, 21)
    name, result = rng.choice(
        (
            ("sum", first + second),
            ("product", first * second),
            ("difference", abs(first - second)),
        )
    )
    ask = rng.choice(("What is the {} of {} and {}?", "Please work out the {} of {} and {}."))
    wrong = _other_number(rng, result)
    tells = f"The {name} of {first} and {second} is"
    return Question(
        ask=ask.format(name, first, second),
        right=f"{tells} {result}.",
        wrong=f"{tells} {wrong}.",
        short_right=f"It is {result}.",
        short_wrong=f"It is {wrong}.",
    )


def _fact(rng: Random) -> Question:
    topic = rng.choice(words.TOPICS)
    key, value = rng.choice(topic.facts)
    wrong = rng.choice([other for _, other in topic.facts if other != value])
    return Question(
        ask=rng.choice(topic.asks).format(key=key),
        right=topic.tells.format(key=key, value=value),
        wrong=topic.tells.format(key=key, value=wrong),
        short_right=f"It is {value}.",
        short_wrong=f"It is {wrong}.",
    )


def _story(rng: Random) -> Question:
    person, friend = rng.sample(words.PEOPLE, 2)
    thing = rng.choice(words.THINGS)
    start, more = rng.randrange(2, 15), rng.randrange(2, 15)
    scenery = [_scenery(rng, person, friend) for _ in range(rng.randrange(1, 7))]
    told = [f"{person} has {start} {thing}.", *scenery, f"{friend} gives {person} {more} {thing}."]
    wrong = _other_number(rng, start + more)
    return Question(
        ask=f"{' '.join(told)} How many {thing} does {person} have now?",
        right=f"{person} has {start + more} {thing} now.",
        wrong=f"{person} has {wrong} {thing} now.",
        short_right=f"{start + more}.",
        short_wrong=f"{wrong}.",
    )


def _scenery(rng: Random, person: str, friend: str) -> str:
    place, weather = rng.choice(words.PLACES), rng.choice(words.WEATHER)
    return rng.choice(
        (
            f"It is a {weather} day at the {place}.",
            f"{person} walks past the {place} and waves to {friend}.",
            f"On the way to the {place} the weather turns {weather}.",
            f"{friend} is waiting near the {place} with a warm drink and a long tale to tell.",
            f'"What a {weather} morning," says {friend}.',
        )
    )


def _favour(rng: Random) -> Question:
    favour, granted, refused = rng.choice(words.FAVOURS)
    ask = rng.choice(("Could you please {}?", "Would you {}?", "Can you {}, please?"))
    return Question(
        ask=ask.format(favour),
        right=f"Yes, {granted}.",
        wrong=f"Sorry, {refused}.",
        short_right="Yes.",
        short_wrong="No.",
    )


def _other_number(rng: Random, number: int) -> int:
    return rng.choice([other for other in range(max(0, number - 6), number + 7) if other != number])
