"""Chat templates: the text of transformers, and no template that takes the machine."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from align.schemas.data_options import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.rows import BadRow
from align.stages.data.chat_template import ChatTemplate, request_of
from align.stages.data.tokenizer import load_tokenizer
from align.stages.data.validate import Unlearned
from align.stages.render import render_process
from align.stages.render.render_process import Limits
from support import hostile_templates as hostile
from support import tool_templates
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, byte_tokenizer
from support.read_rows import bot, conversation, encode, user
from support.turn_templates import KINDS

TEMPLATES = {name: kind["template"] for name, kind in KINDS.items()} | {
    name: text
    for name, text in vars(tool_templates).items()
    if name.isupper() and isinstance(text, str)
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"name": "look", "arguments": {"a": 1, "b": "é", "c": [None, True, 0.5]}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CONVERSATIONS = (
    [user("hi")],
    [user(" Żółw\n"), bot("好 {{ 1 }} \ud800")],
    [{"role": "system", "content": "Be kind."}, user("hi"), bot("one"), user("and?"), bot("two ")],
    [user("hi"), {"role": "assistant", "tool_calls": [{"id": "call00001", "function": CALL}]}],
    [user("hi"), {**bot("A"), "thinking": "Hm.", "content": "A"}, {"role": "tool", "content": "x"}],
    [user("hi"), {**bot("A"), "reasoning": "Hm.", "n": 2**70, "raw": b"bytes"}, user("")],
)
# What templates of models use, and the corners of it.
CORNERS = {
    "everything": "{{ messages }}{{ tools }}{{ documents }}{{ extra }}{{ bos_token }}",
    "json": "{{ messages | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 2 %}{% break %}{% endif %}{{ ns.n }}{{ m.role }}{% endfor %}",
    "underscore": "{% set ns = namespace(_n=0) %}{{ ns._n }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}",
    "blanks": "  {% for m in messages %}\n  {{- m.content -}}\n  {% endfor %}\n",
    "slices": "{{ messages[::-1] }}{{ messages[0].content[:2] | upper }}",
    "raises": "{{ raise_exception('no') }}",
    "changes": "{{ messages.append(1) }}",
    "undefined": "{{ nothing.at.all }}",
    "marks in a macro": "{% macro m(t) %}{% generation %}{{ t }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}a{{ m.role }}{{ m(m.content) }}{% endfor %}",
}
SMALL = Limits(0.1, 1 << 20)


def of(text, limits=SMALL):
    return ChatTemplate(text, source="F", specials=SPECIALS, limits=limits)


def request(messages, how=None, /, *, tools=None, **options):
    return request_of(messages, tools, options, how or {})


def expected(template, messages, tools, how):
    """What transformers makes of it: a text and spans, or nothing."""
    given = [{key: value for key, value in one.items() if value is not None} for one in messages]
    how = {"return_assistant_tokens_mask": True} if "is_marked" in how else how
    try:
        (text,), spans = render_jinja_template(
            [given], tools=tools, chat_template=template, extra=[1], **SPECIALS, **how
        )
    except Exception:  # whatever a template raises
        return None
    return text, tuple(spans[0]) if spans else ()


@pytest.mark.parametrize("name", [*TEMPLATES, *CORNERS])
def test_a_text_and_its_marks_are_those_of_transformers(name):
    template = TEMPLATES.get(name) or CORNERS[name]
    hows = [{}, {"add_generation_prompt": True}, {"continue_final_message": True}]
    if "{% generation" in template:
        hows.append({"is_marked": True})
    chat, texts = of(template), 0
    for messages, tools, how in product(CONVERSATIONS, (None, TOOLS), hows):
        try:
            answer = chat.answer(request(messages, how, tools=tools, extra=[1]))
        except BadRow:
            found = None
        else:
            found = answer.text, answer.spans
            texts += 1
        assert found == expected(template, messages, tools, how), (messages, how)
    assert texts or name in {"underscore", "raises", "changes", "undefined", "marks in a macro"}


def outcome(template, limits=SMALL):
    """A text, a refusal or a bad row."""
    chat = of(template, limits)
    try:
        chat.require_sound()
        return chat.answer(request(CONVERSATIONS[1]))
    except (UsageError, BadRow) as error:
        return error


EVERY = {**hostile.OVER_TIME_OR_MEMORY, **hostile.OTHERS}
SOME = [*EVERY][::6]


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.long) for n in EVERY)])
def test_a_hostile_template_is_refused_or_makes_a_bad_row_or_ends_within_its_limits(name):
    found = outcome(EVERY[name])
    if isinstance(found, BadRow):
        assert found.reason == "template_error"
        assert found.detail
    elif isinstance(found, UsageError):
        assert str(found).startswith("F: ")
    else:
        assert name in hostile.OTHERS or name in hostile.MAY_END
        assert len(found.text) <= SMALL.text + 1000
    assert of(CHATML).answer(request([user("hi")])).text.startswith("<|im_start|>user\nhi")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def make(template):
        folder = tmp_path_factory.mktemp("tokenizer")
        return byte_tokenizer(folder, CHATML_SPECIALS, template=template, eos="<|endoftext|>")

    return make


@pytest.mark.parametrize("name", hostile.NOT_JINJA)
def test_a_template_that_is_not_jinja_is_refused_once_with_its_file_and_line(
    folder_of, tmp_path, name
):
    template, line = hostile.NOT_JINJA[name]
    folder = folder_of(template)
    mine = tmp_path / "mine.jinja"
    mine.write_text(template)
    for options, file in (({}, folder), ({"chat_template": str(mine)}, str(mine))):
        tokenizer = load_tokenizer(folder, TokenOptions(**options))
        with pytest.raises(UsageError, match=f"line {line}") as refused:
            tokenizer.require_template(folder)
        assert file in str(refused.value)
        assert ".jinja" in str(refused.value)
        with pytest.raises(UsageError):
            encode(folder, conversation((bot("one"),)), **options)
    # Plain text has no use for it.
    plain = replace(conversation("one", "two"), prompt="hi")
    assert encode(folder, plain) == encode(folder_of(None), plain)


@pytest.mark.parametrize("bomb", ["nested loops", "a text doubled", "a long text"])
def test_a_row_that_a_template_breaks_on_is_a_bad_row_and_the_others_are_as_ever(folder_of, bomb):
    hostile_folder = folder_of(hostile.once_triggered(EVERY[bomb]))
    rows = [conversation((bot(f"one {n}"), user("and?"), bot("two"))) for n in range(40)]
    rows = [replace(row, row=n) for n, row in enumerate(rows)]
    hit = {7, 33}  # one in the first batch, and one in the batch that is rendered meanwhile
    bad = [replace(one, prompt=(user(f"{hostile.TRIGGER}!"),)) for one in rows]
    mixed = [bad[n] if n in hit else rows[n] for n in range(40)]
    result = encode(hostile_folder, *mixed, template_seconds=0.2, template_mib=0.5)
    assert [(one.row, one.reason) for one in result.rejected] == [
        (n, "template_error") for n in sorted(hit)
    ]
    for rejected in result.rejected:
        assert hostile_folder in rejected.detail
        assert "tokens.template_" in rejected.detail
    well = encode(
        folder_of(hostile.once_triggered("")), *[rows[n] for n in range(40) if n not in hit]
    )
    assert [*map(repr, result.rows)] == [*map(repr, well.rows)]
    assert not well.rejected


def test_a_template_that_breaks_on_every_row_is_refused_after_a_bounded_time():
    chat = of(hostile.once_triggered(EVERY["nested loops"]), Limits(0.05, 1 << 20))
    chat.require_sound()
    outcomes = []
    while len(outcomes) < 50 and UsageError not in outcomes:
        with pytest.raises((BadRow, UsageError)) as broken:
            chat.answer(request([user(f"{hostile.TRIGGER} {len(outcomes)}")]))
        outcomes.append(broken.type)
    assert outcomes == [*[BadRow] * (len(outcomes) - 1), UsageError]
    with pytest.raises(UsageError, match=r"template_seconds"):  # also what would be well
        chat.answer(request([user("hi")]))


def test_rows_that_a_template_breaks_on_now_and_then_do_not_refuse_it():
    chat = of(hostile.once_triggered(EVERY["a text doubled"]), Limits(30, 1 << 20))
    for number in range(3):
        with pytest.raises(BadRow, match="template_mib"):
            chat.answer(request([user(f"{hostile.TRIGGER} {number}")]))
    assert chat.answer(request([user("hi")])).text


def test_a_worker_that_was_killed_is_replaced_and_threads_share_one():
    chat = of(CHATML)
    worker = render_process._SHARED.running()
    os.kill(worker._process.pid, signal.SIGKILL)
    assert "hi" in chat.answer(request([user("hi")])).text
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda n: chat.answer(request([user(f"{n}.")])).text, range(200))
    assert [int(re.findall(r"(\d+)\.", text)[0]) for text in texts] == [*range(200)]


def test_a_batch_that_is_rendered_meanwhile_is_kept_whoever_asks_and_whatever_dies():
    chat, other = of(CHATML), of("{{ messages[0].content }}")
    batches = [[request([user(f"{n}.{k};")]) for k in range(5)] for n in range(6)]
    for number, batch in enumerate(chat.ahead((each, each) for each in batches)):
        assert other.answer(request([user("else")])).text == "else"
        assert "new" in chat.answer(request([user("new")])).text
        if number % 2:
            os.kill(render_process._SHARED._worker._process.pid, signal.SIGKILL)
        texts = [chat.answer(one).text for one in batch]
        assert [re.findall(r"(\S+);", text) for text in texts] == [
            [f"{number}.{k}"] for k in range(5)
        ]
    assert number == 5


def test_batches_that_nobody_waits_for_do_not_answer_others():
    chat = of(CHATML)
    batches = [[request([user(f"{n}.")])] * 3 for n in range(3)]
    assert next(chat.ahead((each, each) for each in batches)) == batches[0]
    assert "hi" in chat.answer(request([user("hi")])).text


def test_options_of_a_row_cannot_stand_for_its_messages():
    for name in ("messages", "tokenize", "add_generation_prompt"):
        with pytest.raises(BadRow, match=name):
            request([user("hi")], {"add_generation_prompt": True}, **{name: True})
    marked = Unlearned(bot("A"))
    assert request([user("hi"), marked]) == request([user("hi"), bot("A")])


def test_specials_at_the_end_of_a_text_are_taken_off_whatever_their_order(folder_of):
    tokenizer = load_tokenizer(folder_of(CHATML), TokenOptions())
    special = (tokenizer.added.texts[token] for token in tokenizer.added.special)
    names = "|".join(re.escape(name) for name in {*special, *tokenizer.specials})
    for parts in product(["<|im_end|>", "<|endoftext|>", " ", "\n", "a", "<|im_"], repeat=4):
        text = "a" + "".join(parts)
        assert tokenizer.before_specials(text) == re.sub(rf"(?:{names}|\s)*\Z", "", text)
    # In steps as many as characters, though blanks stand in many places.
    assert tokenizer.before_specials(" " * 10**6 + "a" + " <|im_end|>" * 9) == " " * 10**6 + "a"
