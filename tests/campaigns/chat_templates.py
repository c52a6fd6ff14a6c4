"""Draws chat templates, many of them hostile, and compares what they come to with Jinja alone.

    python tests/campaigns/chat_templates.py --seeds 0:2000 --log FILE [--plant]

A template ends in a text, a bad row or a refusal. Each text is compared with that of Jinja without
bounds, where it ends within its limits too. FILE gets a line for each seed; a run that was stopped
goes on after its last line. `--plant` answers with a text of another row: it has to be found.
"""

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers.utils.chat_template_utils import render_jinja_template

from align.schemas.errors import UsageError
from align.schemas.rows import BadRow
from align.stages.data.chat_template import ChatTemplate, request_of
from align.stages.data.render_process import Limits

LIMITS = Limits(0.1, 1 << 18)
MESSAGES = [
    {"role": "user", "content": "a question\nof two lines"},
    {"role": "assistant", "content": "an answer, <b>bold</b>"},
]
COUNTS = ("2", "7", "2", "7", "messages | length", "999", "10 ** 5", "10 ** 10")
TEXTS = ("'ab'", "messages[0].content", "messages[-1].role", "'<\t>'", "ns.a", "ns.a")
FILTERS = (
    *("trim", "upper", "length", "list", "string", "tojson", "reverse | list", "unique | list"),
    *("center({n})", "indent({n})", "batch({n}) | list", "slice({n}) | list", "wordwrap({n} + 1)"),
    *("truncate({n} + 3)", "replace('a', {t})", "join({t})", "tojson(indent={n})", "urlize"),
    *("format({n})", "striptags", "map('string') | list", "sort | list"),
)
EXPRESSIONS = (
    *("{t} * ({n})", "{t} ~ {t}", "({t} | string) + ({t} | string)", "'%' ~ ({n}) ~ 'd' % 1"),
    *("[{t}] * ({n})", "{t} | {f}", "{t} | {f}", "{t} | {f}", "({n}) ** ({n})", "range({n})"),
    *("({t} | string).center({n})", "({t} | string).replace('a', {t} | string)", "[{t}, {t}]"),
)
STATEMENTS = (
    *("{{{{ {e} }}}}", "{{{{ {e} }}}}", "{{% set ns.a = {e} %}}", "{{% set ns.a = {e} %}}"),
    *("{{% for i in range({n}) %}}{s}{{% endfor %}}", "{{% for x in {e} %}}{s}{{% endfor %}}"),
    *("{{% if {e} %}}{s}{{% else %}}{s}{{% endif %}}", "{{% set b %}}{s}{s}{{% endset %}}"),
    "{{% macro m(k) %}}{s}{{% if k %}}{{{{ m(k - 1) }}}}{{% endif %}}{{% endmacro %}}"
    "{{{{ m(3) }}}}",
    *("{{% for m in messages %}}{{{{ m.role }}}}{s}{{% endfor %}}", "words\n", "{{% nothing %}}"),
)


def template_of(seed):
    """A template; the same for the same seed."""
    draw = random.Random(seed)

    def text():
        return draw.choice(TEXTS)

    def expression():
        form = draw.choice(EXPRESSIONS)
        used = draw.choice(FILTERS).format(n=draw.choice(COUNTS), t=text())
        return form.format(t=text(), n=draw.choice(COUNTS), f=used)

    def statement(depth):
        # One in many does not parse.
        forms = STATEMENTS[:-1] if draw.random() < 0.97 else STATEMENTS
        form = draw.choice(forms) if depth else "{{{{ {e} }}}}"
        inner = statement(depth - 1) if "{s}" in form else ""
        return form.format(e=expression(), n=draw.choice(COUNTS), s=inner)

    body = "".join(statement(draw.randrange(4)) for _ in range(draw.randrange(1, 6)))
    return "{% set ns = namespace(a='ab') %}" + body


def outcome_of(template, *, is_planted=False):
    """How a template ends, with its text if that is how."""
    chat = ChatTemplate(template, source="F", specials={}, limits=LIMITS)
    try:
        chat.require_sound()
        messages = MESSAGES[::-1] if is_planted else MESSAGES
        text = chat.answer(request_of(messages, None, {}, {})).text
    except UsageError:
        return "refused", ""
    except BadRow as bad:
        is_over = "tokens.template_" in bad.detail or "crashes" in bad.detail
        return ("over its limits" if is_over else "raises"), ""
    return "text", text


@contextmanager
def little_memory():
    """Jinja computes what is constant before it renders, also where it is never shown."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fault_in(outcome, text, template):
    """What is wrong with an outcome; empty if nothing is."""
    if outcome not in ("text", "raises"):
        return ""
    try:  # it has ended within its limits, so it may be made without them
        with little_memory():
            ((plain,), _) = render_jinja_template([MESSAGES], chat_template=template)
    except Exception:  # whatever a template raises
        return "" if outcome == "raises" else "is a text within its limits alone"
    if outcome == "raises":
        return "raises within its limits alone"
    return "" if plain == text else f"another text: {text[:80]!r}, not {plain[:80]!r}"


def main(arguments=None):
    """Runs the seeds that the log does not hold yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--plant", action="store_true")
    given = parser.parse_args(arguments)
    lines = given.log.read_text().splitlines() if given.log.exists() else []
    known = {one["seed"]: one for one in map(json.loads, lines)}
    first, last = map(int, given.seeds.split(":"))
    with given.log.open("a", buffering=1) as log:
        for seed in range(first, last):
            if seed in known:
                continue
            template, begun = template_of(seed), time.monotonic()
            outcome, text = outcome_of(template, is_planted=given.plant)
            found = {"seed": seed, "outcome": outcome, "seconds": time.monotonic() - begun}
            known[seed] = found | {"fault": fault_in(outcome, text, template)}
            log.write(f"{json.dumps(known[seed])}\n")
    counts = Counter(one["outcome"] for one in known.values())
    faults = [one for one in known.values() if one["fault"]]
    slowest = max(one["seconds"] for one in known.values())
    print(f"{len(known)} templates: {dict(counts)}; slowest {slowest:.1f} s; {len(faults)} faults")
    for one in faults[:10]:
        print(f"seed {one['seed']}: {one['fault']}\n  {template_of(one['seed'])}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
