"""Settings as nobody should write them: values, files, words and DeepSpeed files."""

import json
from typing import Literal, get_args, get_origin

NUMBERS = (
    *("0", "1", "-1", "2", "3", "7", "-0", "+1", "0.5", "0.25", "1.0", "1.", ".5", "1e-6", "1e5"),
    *("1e308", "1e309", "-1e309", "1e-400", ".inf", "-.inf", ".nan", ".NaN", "nan", "inf", "NaN"),
    *(str(2**63), str(2**63 - 1), str(-(2**63)), "9" * 25, "9" * 5000, "1_000", "1__0", "_1"),
    *("0x1F", "0o17", "010", "0b1", "1:30", "2026-01-31", "٣", "1٣", "1e", "--1", "1,000"),
)
TEXTS = (
    *("", "~", "null", "Null", "true", "yes", "off", "y", "x", "auto", "'1'", '"1"', "'true'"),
    *('"\\0"', '"\\ud800"', '"\\u202e"', '"\\e[31m"', '"a\\nb"', '"a\\tb"', '"\\x7f"', "é✓"),
    *("'" + "x" * 9_999 + "'", "x" * 100_000, "../../../etc/passwd", "~/a", "~nobody-is-it/a"),
    *("http://u:pw@h/x", "s3://b/k", "| \n   a\n", "'it''s'", "a: b", "a #b", "@x", "`x`", "%x"),
)
SHAPES = (
    *("[]", "[1]", "[[1]]", "[a, b]", "[a, a]", "[~]", "{}", "{a: 1}", "{a: b}", "{a: {b: c}}"),
    *("{a: ~}", "{1: a}", "{~: a}", "{[a]: b}", "{a: b, a: c}", "[a, [b, [c]]]", "- x", "? a"),
    *("!!int '1'", "!!str 1", "!!binary aGk=", "!!python/object/apply:os.system ['true']"),
    *("!!python/name:os.system", "!x y", "&a [*a]", "&a x", "*a", "!!set {a}", "!!omap [a: b]"),
    *("{<<: {a: b}}", "!!timestamp 2026-01-31", "[" * 60 + "]" * 60, "[" * 600 + "]" * 600),
)


def value(draw, setting):
    """A value as YAML: often one that may stand there, else anything."""
    kind = setting.kind
    if draw.random() < 0.35:
        if get_origin(kind) is Literal:
            return draw.choice(get_args(kind))
        if kind is bool:
            return draw.choice(("true", "no", "On"))
        if kind in (int, float):
            return draw.choice(NUMBERS[:15])
        return draw.choice(("x", "some text", "[a, b]", "{a: b}"))
    most = (NUMBERS, TEXTS, SHAPES)
    return draw.choice(draw.choice((NUMBERS, *most) if kind in (int, float) else most))


def file_of(draw, values):
    """A file of settings by their dotted names; at times a name is damaged or given twice."""
    sections = {}
    for name, text in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(_name(draw, section), []).append(f"  {_name(draw, key)}: {text}\n")
    lines = [f"{section}:\n{''.join(given)}" for section, given in sections.items()]
    if draw.random() < 0.03:
        lines.append(draw.choice(lines))
    return "".join(lines)


def _name(draw, name):
    if draw.random() > 0.02:
        return name
    return draw.choice(
        [
            *(name.upper(), name[:-1], f"{name}s", "~", "1", "[a]", "x" * 5000, f'"{name}\\0"'),
            *("!!x y", f"{name}.{name}", "__class__", '"\\e[31m"', "'a\n\n  b'", "<<", "''"),
        ]
    )


def damaged(content, draw):
    """The bytes of a file after a few changes."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        at, size = draw.randrange(len(data)), draw.choice((1, 1, 4, 40, 400))
        part = draw.choice((*NUMBERS, *TEXTS, *SHAPES)).encode()
        part = draw.choice((part, part, bytes([draw.randrange(256)]), b"\0", b"\xff", b"\xc3"))
        match draw.randrange(8):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case 3:
                del data[max(1, at) :]
            case 4:
                data[at:at] = b"\n" + data[at - at % 7 : at + 60] + b"\n"
            case 5:
                data[at : at + size] = part
            case _:  # in the place of a value
                colon = data.find(b": ", at)
                end = data.find(b"  #", colon)
                if 0 <= colon < end:
                    data[colon + 2 : end] = part
    return bytes(data)


def shape(draw):
    """A file whose shape is the trouble."""
    count = draw.choice((3, 50, 900, 5000, 30_000, 100_000))
    name = draw.choice(("a", "train", "data", "x" * 200))
    return draw.choice(
        (
            lambda: "".join(f"k{i}: 1\n" for i in range(count)),
            lambda: "".join(f"{name}: 1\n" for _ in range(count)),
            lambda: f"{name}:\n" + "".join(f"  k{i}: 1\n" for i in range(count)),
            lambda: f"{name}: {{files: [" + "a, " * count + "]}",
            lambda: f"{name}: " + "[" * count + "]" * count,
            lambda: f"{name}: " + "{a: " * count + "}" * count,
            lambda: "".join(" " * i + f"{name}:\n" for i in range(min(count, 900))),
            lambda: _laughs(min(count, 40)),
            lambda: "- " * count,
            lambda: "? " * count,
            lambda: "'" + "x" * count,
            lambda: "x" * count,
            lambda: "x" * count + ": 1",
            lambda: f"{name}: {{{'y' * count}: 1}}",
            lambda: "--- a\n" * count,
            lambda: "%TAG ! tag:x,1:\n" * count,
            lambda: "#" * count + "\n",
            lambda: "\n" * count,
            lambda: "\t" * count,
            lambda: "a: !!python/object/new:os.system [x]\n" * count,
            lambda: "train: {lr: 1e-6, lr: 1e-5}",
            lambda: "train: {lr: 1e-6}\ntrain: {lr: 1e-5}",
            lambda: "train: {lr: 1e-6}\ntrain.lr: 1e-5",
            lambda: "\ufeff" * count + "train: {lr: 1e-6}",
            lambda: "train: {lr: 1e-6}\0",
            lambda: "train: |\n" + "  a\n" * count,
            lambda: "data: {map: {" + "".join(f"k{i}: v, " for i in range(count)) + "}}",
            lambda: "method: {" + "".join(f"k{i}: v, " for i in range(count)) + "}",
            lambda: "data: {files: '" + "a" * count + "'}",
            lambda: "model: {path: '" + "../" * count + "'}",
            lambda: "train: {seed: " + "9" * count + "}",
            lambda: "train: {lr: 0." + "9" * count + "}",
            lambda: "train: {lr: 1e" + "9" * count + "}",
            lambda: "train: {best: '" + "😀" * count + "'}",
        )
    )().encode("utf-8", "surrogatepass") + draw.choice((b"", b"", b"", b"\xff\xfe", b"\x80"))


def _laughs(depth):
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, depth)]
    return "\n".join(lines)


def words(draw, settings):
    """Words behind --set."""
    given = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice([name for name in settings if not name.startswith("method.")])
        text = value(draw, settings[name])
        damaged_name = draw.choice(
            [
                *(f"{name}\0", name.upper(), "", ".", "train", "train.", ".lr", "x" * 9000),
                *("\x1b[31m.a", f"{name}\udc80", f" {name}", f"{name}.a", "method", "a\nb.c"),
            ]
        )
        name = name if draw.random() < 0.9 else damaged_name
        text = text if draw.random() < 0.9 else draw.choice(("\udc80", "a\0b", "\x1b[2J", "1\n2"))
        given.append(draw.choice((f"{name}={text}",) * 9 + (name, f"{name}:{text}")))
    return given


def formed(draw, flag):
    """A text of a form: times, sizes, shares, pairs of names."""
    unit = draw.choice(
        ("1", "0", "9" * 30, "9" * 400, "9" * 5000, "-1", "1.5", "²", "٣", "1e9", "")
    )
    other = draw.choice(("1", "2", "0", "9" * 5000, "³", "", "x"))
    forms = {
        "train.max_time": (f"{unit}d", f"{unit}h{other}m", unit, f"{unit}s", f"{unit} h", "h"),
        "--gpu": (f"{unit}g", unit, f"{unit}.{other}g", f"{unit}G", f"{unit}t", "g"),
        "--ray-workers": (f"{unit}:{other}", unit, f"{unit}:", f":{other}"),
        "--part": (f"{unit}/{other}", unit, f"{unit}/{other}/1", f"{other}/{unit}"),
        "--map": (f"a={unit}", unit, "=", "a=", "=a", "a" * 5000),
        "--vary": (
            *(f"train.lr={unit},{other}", f"method.beta={unit}", unit, "=", "train.lr=1,,2"),
            *(f"method.{unit}=1", "train.method=a", "x" * 9000, f"train.lr={'1,' * 3000}1"),
        ),
    }
    junk = ("\0", "\udc80", "\x1b[31m", "x" * 9000, "\n", " ", "a\nb", "..", "%s", "{0}")
    return draw.choice(forms[flag]) if draw.random() < 0.8 else draw.choice(junk)


BASE = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "bf16": {"enabled": False},
    "fp16": {"enabled": False},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "steps_per_print": 100,
    "data_types": {"grad_accum_dtype": "fp32"},
    "activation_checkpointing": {"number_checkpoints": 2},
}
JSON_VALUES = (
    *(None, True, False, 0, 1, -1, 3, 2**70, -(2**63), 0.5, 1e308, "", "auto", "x" * 100_000),
    *("cpu", "\0", "\ud800", "\x1b[31m", [], [1], [[1]], [0.9, 0.999], ["auto"], {}, {"a": 1}),
    *({"a": {"b": "auto"}}, {"device": "auto"}, {"stage": True}, "1e-6", "true", ["x"] * 5000),
)
JSON_TEXTS = ("NaN", "Infinity", "-Infinity", "1e999", "1e-999", "9" * 5000, "01", "'a'", "[1,]")


def deepspeed(draw):
    """The bytes of a DeepSpeed file."""
    config = json.loads(json.dumps(BASE))
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        inside = draw.choice([config, config, *(one for one in config.values() if _holds(one))])
        inside = draw.choice([inside, *(one for one in inside.values() if _holds(one))])
        new = draw.choice(("stage", "scheduler", "a", "amp", "x" * 5000, "\0", "", "bfloat16", "é"))
        key = draw.choice([*inside, *inside, new])
        if draw.random() < 0.2:
            inside.pop(key, None)
        else:
            inside[key] = draw.choice(JSON_VALUES)
    content = json.dumps(config)
    match draw.randrange(14):
        case 0:
            return damaged(content.encode(), draw)
        case 1:
            depth = draw.choice((90, 300, 700, 5000, 200_000))
            inner = draw.choice((("[", "]"), ('{"a":', "}")))
            return f'{{"aio": {inner[0] * depth}1{inner[1] * depth}}}'.encode()
        case 2:
            return content.replace("1000000", draw.choice(JSON_TEXTS)).encode()
        case 3:
            return content.replace('"auto"', draw.choice(JSON_TEXTS), 1).encode()
        case 4:
            many = draw.choice((100, 3000, 60_000))
            return ("{" + ",".join(f'"k{i}": 1' for i in range(many)) + "}").encode()
        case 5:
            many = draw.choice((2, 3000, 60_000))
            return ("{" + ",".join('"aio": 1' for _ in range(many)) + "}").encode()
        case 6:
            return draw.choice(
                (b"", b"[]", b"null", b"1", b'"x"', b"\xff", b"\xef\xbb\xbf{}", b"{")
            )
        case _:
            return content.encode()


def _holds(one):
    return isinstance(one, dict)
