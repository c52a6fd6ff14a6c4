"""Generates questions with a correct answer, a wrong one, and a short form of each."""

from __future__ import annotations

from random import Random
from typing import NamedTuple


class Question(NamedTuple):
    """A question with its correct and wrong answers."""

    ask: str
    right: str
    wrong: str
    short_right: str
    short_wrong: str


def draw_question(rng: Random) -> Question:
    """A random question: arithmetic, a fact, a story, or a favour."""
    kinds = (_arithmetic, _arithmetic, _fact, _fact, _story, _favour)
    return rng.choice(kinds)(rng)


def _arithmetic(rng: Random) -> Question:
    first, second = rng.randrange(2, 21), rng.randrange(2, 21)
    results = {
        "sum": first + second,
        "product": first * second,
        "difference": abs(first - second),
    }
    name, result = rng.choice([*results.items()])
    ask = rng.choice(("What is the {} of {} and {}?", "Please work out the {} of {} and {}."))
    statement = f"The {name} of {first} and {second} is"
    return _answered(ask.format(name, first, second), statement, result, _near(rng, result))


def _fact(rng: Random) -> Question:
    asks, statement, table = rng.choice(TOPICS)
    facts = [fact.split(": ") for fact in " ".join(table.split()).split(", ")]
    key, value = rng.choice(facts)
    wrong = rng.choice([other for _, other in facts if other != value])
    ask = rng.choice(asks.split("|")).format(key)
    return _answered(ask, statement.format(key), value, wrong)


def _answered(ask: str, statement: str, right: object, wrong: object) -> Question:
    """A question whose answers are a statement that ends with a value."""
    return Question(
        ask=ask,
        right=f"{statement} {right}.",
        wrong=f"{statement} {wrong}.",
        short_right=f"It is {right}.",
        short_wrong=f"It is {wrong}.",
    )


def _story(rng: Random) -> Question:
    person, friend = rng.sample(PEOPLE, 2)
    thing = rng.choice(THINGS)
    start, more = rng.randrange(2, 15), rng.randrange(2, 15)
    scenery = [_scenery(rng, person, friend) for _ in range(rng.randrange(1, 7))]
    story = [f"{person} has {start} {thing}.", *scenery, f"{friend} gives {person} {more} {thing}."]
    right, wrong = start + more, _near(rng, start + more)
    return Question(
        ask=f"{' '.join(story)} How many {thing} does {person} have now?",
        right=f"{person} has {right} {thing} now.",
        wrong=f"{person} has {wrong} {thing} now.",
        short_right=f"{right}.",
        short_wrong=f"{wrong}.",
    )


def _scenery(rng: Random, person: str, friend: str) -> str:
    place, weather = rng.choice(PLACES), rng.choice(WEATHER)
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
    favour, granted, refused = rng.choice(FAVOURS)
    ask = rng.choice(("Could you please {}?", "Would you {}?", "Can you {}, please?"))
    return Question(ask.format(favour), f"Yes, {granted}.", f"Sorry, {refused}.", "Yes.", "No.")


def _near(rng: Random, number: int) -> int:
    """Another number, at most 6 away."""
    return rng.choice([other for other in range(max(0, number - 6), number + 7) if other != number])


# (questions about a topic, the statement of a fact, the facts)
TOPICS = (
    (
        "What sound does a {} make?|How does a {} sound?|What does the {} say?",
        "A {} says",
        """cow: moo, cat: meow, dog: woof, sheep: baa, duck: quack, horse: neigh, pig: oink,
        frog: ribbit, crow: caw, mouse: squeak, lion: roar, bee: buzz, snake: hiss, wolf: awoo""",
    ),
    (
        "What colour is {}?|Which colour does {} have?|Tell me the colour of {}.",
        "The colour of {} is",
        """grass: green, snow: white, coal: black, a ripe tomato: red, the sea: blue,
        a lemon: yellow, a flamingo: pink, a carrot: orange, lavender: purple, chocolate: brown,
        ash: grey""",
    ),
    (
        "What is the capital of {}?|Which city is the capital of {}?|Name the capital of {}.",
        "The capital of {} is",
        """Veloria: Tamsin, Ostrand: Kelby, Brönmark: Sölvik, Quillonia: Pendra, Maravel: Dosco,
        Zephyria: Alto Brisa, Nuvélie: Port Océane, Karsk: Velgrad, Ithmar: Suun,
        Lower Pell: Candle Bay, Upper Pell: Stonewick, Tarqua: Ñandu""",
    ),
    (
        "What is the opposite of {}?|Give me the opposite of the word {}.",
        "The opposite of {} is",
        """hot: cold, big: small, fast: slow, early: late, full: empty, loud: quiet, heavy: light,
        old: new, near: far, open: closed, soft: hard""",
    ),
    (
        "Which day comes after {}?|What day follows {}?",
        "The day after {} is",
        """Monday: Tuesday, Tuesday: Wednesday, Wednesday: Thursday, Thursday: Friday,
        Friday: Saturday, Saturday: Sunday, Sunday: Monday""",
    ),
)
PEOPLE = ("Mira", "Tomas", "Zoë", "Anouk", "Bela", "Ravi", "Ines", "Oskar", "Yuki", "Femi")
THINGS = ("apples", "kites", "marbles", "pencils", "shells", "candles", "buttons", "stamps")
PLACES = ("market", "harbour", "library", "old mill", "café", "garden", "station", "bakery")
WEATHER = ("sunny", "rainy", "windy", "foggy", "snowy", "quiet")
FAVOURS = (
    ("lend me a pencil", "here is a pencil", "I have no pencil"),
    ("open the window", "the window is open now", "the window stays shut"),
    ("help me carry this box", "I will carry the box with you", "I will not carry the box"),
    ("show me the way to the station", "the station is two streets ahead", "I will not show you"),
    ("save me a seat", "there is a seat next to me", "there is no seat left"),
    ("water my plants", "I will water them every morning", "your plants can stay dry"),
    ("read me a story", "here is the story of a small boat", "I know no story"),
    ("wait for me", "I will wait right here", "I have already left"),
)
