"""Draws templates, many of them hostile, and compares what they come to with Jinja alone.

A template ends in a text, a bad row or a refusal. Each text is compared with that of Jinja without
bounds, where it ends within its limits too. Three in four are chat templates, the others a judge's.
"""

import random
import sys
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from campaigns import runner  # noqa: E402
from campaigns.cases import Campaign, End, addresses_for, tried  # noqa: E402
from jinja2 import StrictUndefined  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

from align.schemas.rows import BadRow  # noqa: E402
from align.stages.data.chat_template import ChatTemplate, request_of  # noqa: E402
from align.stages.judge.judge_template import load_template  # noqa: E402
from align.stages.render.render_process import Limits  # noqa: E402

LIMITS = Limits(0.1, 1 << 18)
MESSAGES = [
    {"role": "user", "content": "a question\nof two lines"},
    {"role": "assistant", "content": "an answer, <b>bold</b>"},
]
ASKED = [*MESSAGES]
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


def rendered(template):
    """The text of a template, or the bad row that it ends in."""
    chat = ChatTemplate(template, source="F", specials={}, limits=LIMITS)
    chat.require_sound()
    try:
        return chat.answer(request_of(ASKED, None, {}, {})).text
    except BadRow as bad:
        return bad


def name_of(seed):
    """Whose template it is."""
    return "judge" if seed % 4 == 3 else "chat"


def case(seed, folder):
    """Renders a template, and compares its text."""
    template = template_of(seed)
    if name_of(seed) == "judge":
        return judge_case(template + "{{ answer }}", folder / "case")
    (folder / "case").write_text(template)
    return tried(partial(rendered, template), ("F",), partial(judged, template))


def judged(template, found):
    """Whether Jinja alone comes to the same."""
    if isinstance(found, BadRow) and (
        "tokens.template_" in found.detail or "crash" in found.detail
    ):
        return End("quarantined", found.detail)
    try:  # it has ended within its limits, so it may be made without them
        # Jinja computes what is constant before it renders, also where it is never shown.
        with addresses_for(1 << 30):
            ((plain,), _) = render_jinja_template([MESSAGES], chat_template=template)
    except Exception as error:  # whatever a template raises
        if isinstance(found, BadRow):
            return End("quarantined", found.detail)
        return End("wrong", f"is a text within its limits alone: {error}"[:300])
    if isinstance(found, BadRow):
        return End("wrong", f"raises within its limits alone: {found.detail}")
    return End("same" if plain == found else "wrong", "" if plain == found else f"{found[:80]!r}")


def judge_case(template, file):
    """Fills a judge's template."""
    if "messages" not in template:
        template += "{{ messages | length }}"
    file.write_text(template)

    def filled():
        judge = load_template("rubric", str(file), LIMITS)
        return judge.filled(tuple(ASKED), ("an answer",)).text[-1]["content"]

    def judged(found):
        with addresses_for(1 << 30):
            plain = ImmutableSandboxedEnvironment(
                undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
            ).from_string(template)
            text = plain.render(messages=MESSAGES, answer="an answer").strip()
        return End("same" if text == found else "wrong", "" if text == found else f"{found!r:.80}")

    return tried(filled, (str(file),), judged)


def with_another_row():
    """Answers with the text of another row."""
    ASKED.reverse()


CAMPAIGN = Campaign(__file__, name_of, case, plants={"row": with_another_row})

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
