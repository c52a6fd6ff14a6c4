"""Questions with a right answer, a wrong one, and the short form of each."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Question:
    """One question with its right and wrong answers."""

    ask: str
    right: str
    wrong: str
    short_right: str
    short_wrong: str


def draw_question(rng: Random) -> Question:
    """A random question of any kind."""
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
    statement = f"The {name} of {first} and {second} is"
    return Question(
        ask=ask.format(name, first, second),
        right=f"{statement} {result}.",
        wrong=f"{statement} {wrong}.",
        short_right=f"It is {result}.",
        short_wrong=f"It is {wrong}.",
    )


def _fact(rng: Random) -> Question:
    topic = rng.choice(TOPICS)
    key, value = rng.choice(topic.facts)
    wrong = rng.choice([other for _, other in topic.facts if other != value])
    return Question(
        ask=rng.choice(topic.asks).format(key=key),
        right=topic.statement.format(key=key, value=value),
        wrong=topic.statement.format(key=key, value=wrong),
        short_right=f"It is {value}.",
        short_wrong=f"It is {wrong}.",
    )


def _story(rng: Random) -> Question:
    person, friend = rng.sample(PEOPLE, 2)
    thing = rng.choice(THINGS)
    start, more = rng.randrange(2, 15), rng.randrange(2, 15)
    scenery = [_scenery(rng, person, friend) for _ in range(rng.randrange(1, 7))]
    story = [f"{person} has {start} {thing}.", *scenery, f"{friend} gives {person} {more} {thing}."]
    wrong = _other_number(rng, start + more)
    return Question(
        ask=f"{' '.join(story)} How many {thing} does {person} have now?",
        right=f"{person} has {start + more} {thing} now.",
        wrong=f"{person} has {wrong} {thing} now.",
        short_right=f"{start + more}.",
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
    return Question(
        ask=ask.format(favour),
        right=f"Yes, {granted}.",
        wrong=f"Sorry, {refused}.",
        short_right="Yes.",
        short_wrong="No.",
    )


def _other_number(rng: Random, number: int) -> int:
    return rng.choice([other for other in range(max(0, number - 6), number + 7) if other != number])


@dataclass(frozen=True)
class Topic:
    """A table of facts, with templates that ask for one and state it."""

    asks: tuple[str, ...]  # with {key}
    statement: str  # with {key} and {value}
    facts: tuple[tuple[str, str], ...]  # key, value


SOUNDS = Topic(
    asks=("What sound does a {key} make?", "How does a {key} sound?", "What does the {key} say?"),
    statement="A {key} says {value}.",
    facts=(
        ("cow", "moo"),
        ("cat", "meow"),
        ("dog", "woof"),
        ("sheep", "baa"),
        ("duck", "quack"),
        ("horse", "neigh"),
        ("pig", "oink"),
        ("frog", "ribbit"),
        ("crow", "caw"),
        ("mouse", "squeak"),
        ("lion", "roar"),
        ("bee", "buzz"),
        ("snake", "hiss"),
        ("wolf", "awoo"),
    ),
)
COLOURS = Topic(
    asks=("What colour is {key}?", "Which colour does {key} have?", "Tell me the colour of {key}."),
    statement="The colour of {key} is {value}.",
    facts=(
        ("grass", "green"),
        ("snow", "white"),
        ("coal", "black"),
        ("a ripe tomato", "red"),
        ("the sea", "blue"),
        ("a lemon", "yellow"),
        ("a flamingo", "pink"),
        ("a carrot", "orange"),
        ("lavender", "purple"),
        ("chocolate", "brown"),
        ("ash", "grey"),
    ),
)
CAPITALS = Topic(
    asks=(
        "What is the capital of {key}?",
        "Which city is the capital of {key}?",
        "Name the capital of {key}.",
    ),
    statement="The capital of {key} is {value}.",
    facts=(
        ("Veloria", "Tamsin"),
        ("Ostrand", "Kelby"),
        ("Brönmark", "Sölvik"),
        ("Quillonia", "Pendra"),
        ("Maravel", "Dosco"),
        ("Zephyria", "Alto Brisa"),
        ("Nuvélie", "Port Océane"),
        ("Karsk", "Velgrad"),
        ("Ithmar", "Suun"),
        ("Lower Pell", "Candle Bay"),
        ("Upper Pell", "Stonewick"),
        ("Tarqua", "Ñandu"),
    ),
)
OPPOSITES = Topic(
    asks=("What is the opposite of {key}?", "Give me the opposite of the word {key}."),
    statement="The opposite of {key} is {value}.",
    facts=(
        ("hot", "cold"),
        ("big", "small"),
        ("fast", "slow"),
        ("early", "late"),
        ("full", "empty"),
        ("loud", "quiet"),
        ("heavy", "light"),
        ("old", "new"),
        ("near", "far"),
        ("open", "closed"),
        ("soft", "hard"),
    ),
)
DAYS = Topic(
    asks=("Which day comes after {key}?", "What day follows {key}?"),
    statement="The day after {key} is {value}.",
    facts=(
        ("Monday", "Tuesday"),
        ("Tuesday", "Wednesday"),
        ("Wednesday", "Thursday"),
        ("Thursday", "Friday"),
        ("Friday", "Saturday"),
        ("Saturday", "Sunday"),
        ("Sunday", "Monday"),
    ),
)
TOPICS = (SOUNDS, COLOURS, CAPITALS, OPPOSITES, DAYS)

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

GREETINGS = (
    "",
    "",
    "",
    "Hello! ",
    "Hi there. ",
    "Good morning! ",
    "Quick question: ",
    "Excuse me, ",
)
FOLLOW_UPS = ("Thanks! ", "And one more: ", "Next question. ", "Great. ")
SYSTEMS = (
    "You are a kind and careful helper.",
    "Answer every question correctly and politely.",
    "You work at the help desk of a small town. Visitors may be in a hurry, so be clear.",
)

POLITE_OPENERS = (
    "Sure!",
    "Of course!",
    "Happy to help!",
    "Gladly!",
    "With pleasure!",
    "Good question!",
    "Thank you for asking!",
)
POLITE_CLOSERS = (
    "",
    "",
    "I hope that helps!",
    "Let me know if you need anything else.",
    "I checked it twice to be safe.",
    "Have a lovely day! 😊",
    "Please ask again whenever you like, I am always glad to explain things slowly.",
)
RUDE_OPENERS = (
    "Figure it out.",
    "Ugh.",
    "Why ask me?",
    "What a silly question.",
    "Not again.",
    "Whatever.",
)
RUDE_CLOSERS = (
    "",
    "",
    "Now go away.",
    "Do not ask me again.",
    "I have better things to do than to answer you.",
)
