"""Answers as no server should give them: their JSON, and what is said in them."""

import json
from collections.abc import Callable

KEY = "planted-key-8f3a91c4d7e25b60"
STRANGE = "\x1b[31m\x07\x00\r\x9b\u202e\u2028"
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 1.0, 1.5, -0.0, 2**31 - 1, 2**31, 2**63, 10**400, 10**5000),
    *(float("nan"), float("inf"), "", "x", "stop", "length", "null", "\ud800", STRANGE, KEY, "٣"),
    *([], {}, [[]], [None], ["x"], [{}], {"": {}}, {"x": KEY}, "word " * 60_000, "é" * 3_000_000),
)
FINISHES = (
    *("stop", "stop", "stop", "length", "tool_calls", "content_filter", "STOP", "eos", "abort"),
    *("error", "", STRANGE, KEY, "stop "),
)
SCORES = (
    *(*map(str, range(-1, 13)), "100", "7.5", "7/10", "07", "+7", "1e1", "0x7", "NaN", "inf", ""),
    *(
        "\uff17",
        "\u0667",
        "\u2166",
        "seven",
        "**7**",
        "[[7]]",
        "7.",
        "10 ",
        "1 0",
        "7\u200b",
        "7\x00",
        "None",
    ),
)
VERDICTS = (
    *(
        "A",
        "B",
        "tie",
        "A",
        "B",
        "tie",
        "a",
        "Tie",
        "C",
        "AB",
        "A or B",
        "[[A]]",
        "**A**",
        "\u0410",
    ),
    *("\uff21", "A.", "A wins", "", "None", "neither", "1", "A\x00", "tie\u200b"),
)
LABELS = (
    "{w}: ",
    "{w}: ",
    "{w}: ",
    "{w}:",
    "{w} : ",
    "{w}:\t",
    "{w}:  ",
    "**{w}**: ",
    "{w}\uff1a",
    "",
)
STARTS = (
    *("", "", "It is fine.\n", "Fine.\r\n", "Fine. ", "> ", "<think>\nhm\n</think>\n", "```\n"),
    *("{w}: 3\n", 'The user wrote "{w}: A".\n', "<think>{w}: B</think>\n", "\ufeff", "\x1b[2J\n"),
)
ENDS = ("", "", "", "", "\n", " \t\n", "\r\n", "\u2028", "\x0b", "\x1c", "\n\n.", "\n```", "\x00")


def verdict(draw, word):
    """What a judge may say."""
    if draw.random() < 0.05:
        return ""
    told = draw.choice(SCORES if word == "Score" else VERDICTS)
    label = draw.choice((*[word] * 6, word.lower(), word.upper(), f"My {word}"))
    form = draw.choice(("{w}: ", "{w}: ", draw.choice(LABELS)))
    start, end = (draw.choice(("", draw.choice(some))) for some in (STARTS, ENDS))
    return f"{start}{form}{told}{end}".replace("{w}", label)


def completion(draw):
    """What a policy may say."""
    words = ("an answer", STRANGE, "</s>", "<|im_end|>", "\n\n", "é✓", " ", "\x00", "\ufeff", "\\")
    return "".join(draw.choices(words, k=draw.choice((0, 1, 2, 5, 3000))))


def record(draw, answer):
    """Another record in place of a plain one, as bytes, and what was done."""
    how = draw.choice([*_RECORDS])
    return how, _RECORDS[how](draw, json.loads(json.dumps(answer)))


def _with_value(draw, answer):
    """Another value somewhere, or none, or one that nobody asked for."""
    inner = draw.choice([*_inner(answer)])
    name = draw.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
    match draw.randrange(6):
        case 0:
            del inner[name]
        case 1 if isinstance(inner, dict):
            inner["another"] = draw.choice(VALUES)
        case _:
            inner[name] = draw.choice(VALUES)
    return written(answer)


def _inner(value):
    """Every object and list that holds something."""
    if isinstance(value, dict | list) and value:
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _inner(one)


def _with_model(draw, answer):
    if "model" in answer:
        name = answer["model"]
        answer["model"] = draw.choice(
            [
                *(f"org/{name}", f"{name}-2026-01-31", f"{name}@main", f"/{name}/", name.upper()),
                *("another", f"{name}-mini", "", STRANGE, KEY, "other " * 100_000),
                f"{name}-\u0662\u0660\u0662\u0666-01-31",
            ]
        )
    return written(answer)


def _with_choices(draw, answer):
    name = "choices" if "choices" in answer else "data"
    answer[name] = answer[name] * draw.choice((0, 1, 2, 100_000))
    return written(answer)


def _with_finish(draw, answer):
    for choice in answer.get("choices", ()):
        choice["finish_reason"] = draw.choice(FINISHES)
    return written(answer)


def _with_counts(draw, answer):
    for name in answer.get("usage", ()):
        answer["usage"][name] = draw.choice(VALUES[:17])
    return written(answer)


def _with_itself_twice(draw, answer):
    text = json.dumps(answer)
    name = draw.choice(("model", "choices", "usage", "data", "content", "prompt_tokens", "x", "x"))
    return f'{{"{name}": {json.dumps(answer.get(name, 1))}, {text[1:]}'.encode()


def _damaged(draw, answer):
    data = bytearray(json.dumps(answer).encode())
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + draw.choice((1, 1, 5, 50))]
            case 2:
                data[at:at] = draw.choice((b"\0", b"\xff", b'"', b"}", b"\\ud800", b",", b"9"))
            case 3:
                del data[max(1, at) :]
        data = data or bytearray(b"0")
    return bytes(data)


def _encoded(draw, answer):
    text = json.dumps(answer)
    marked = draw.choice(("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7"))
    return draw.choice((text.encode(marked), text.encode() * 2, b"data: " + text.encode() + b"\n"))


def _nested(draw, answer):
    depth = draw.choice((50, 900, 5000, 100_000))
    inner = draw.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    return (json.dumps(answer)[:-1] + f', "x": {inner}}}').encode()


def _many(draw, answer):
    """Few bytes for each of many values."""
    part = draw.choice((b"[],", b"{},", b'"",', b"1.5,", b'{"a":1},'))
    size = draw.choice((1 << 20, 8 << 20, 15 << 20, 60 << 20))
    return json.dumps(answer)[:-1].encode() + b', "x": [' + part * (size // len(part)) + b"0]}"


def _error(draw, _):
    return written(error(draw))


def error(draw):
    """What servers say beside an answer."""
    words = draw.choice(
        [
            *(f"Incorrect API key provided: {KEY}", f"x{KEY}y", f"Bearer_{KEY}", STRANGE, ""),
            *("a" * (4795 - draw.randrange(40)) + KEY, " " * (4795 - draw.randrange(20)) + KEY),
            "é" * 10**6,
        ]
    )
    shaped = ({"message": words}, words, [words], {"error": {"message": [words]}}, {words: words})
    return {draw.choice(("error", "message", "detail", "x")): draw.choice(shaped)}


def written(value):
    """JSON with NaN and half characters, as some libraries write it; long numbers too."""
    if isinstance(value, dict):
        inner = b",".join(written(name) + b":" + written(one) for name, one in value.items())
        return b"{" + inner + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(written, value)) + b"]"
    if type(value) is int and value >= 10**400:
        return b"1" + b"0" * (400 if value < 10**401 else 5000)
    return json.dumps(value).encode()


_RECORDS: dict[str, Callable] = {
    "value": _with_value,
    "model": _with_model,
    "choices": _with_choices,
    "finish": _with_finish,
    "usage": _with_counts,
    "twice": _with_itself_twice,
    "bytes": _damaged,
    "encoding": _encoded,
    "nested": _nested,
    "many": _many,
    "error": _error,
}
