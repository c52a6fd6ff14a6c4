"""Tokens of rows: the traps of each, and where a turn begins and ends in any family."""

import json
from dataclasses import replace

import pytest

from align.schemas.cache import StopTokens
from align.schemas.data_options import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Role, TextRow
from align.stages.data.tokenizer import decoder, load_tokenizer, tokenizer_fingerprint
from align.stages.demo.tiny_tokenizer import make_tokenizer
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, FAMILIES, byte_tokenizer
from support.read_rows import (
    USER,
    bot,
    conversation,
    encode,
    encode_one,
    refusal_of,
    texts_of,
    user,
)

TEMPLATE = "{{ bos_token }}" + CHATML


def save_tokenizer(folder, *, template=TEMPLATE, adds_bos=True):
    """A token is a byte, a special token or " world"."""
    named = {"bos": "<s>", "eos": "<|im_end|>", "adds_bos": adds_bos, "added": [" world"]}
    return byte_tokenizer(folder, ["<s>", *CHATML_SPECIALS], template=template, **named)


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tok"))


def text(prompt="hello world,", chosen=" how are you", rejected=" no-one knows"):
    return TextRow(
        0, 0, prompt, (chosen, rejected), (Role.CHOSEN, Role.REJECTED), scores=(None, None)
    )


def chat(*completions, asked="hello world,"):
    turns = tuple((bot(completion),) for completion in completions)
    return replace(text(), prompt=(user(asked),), completions=turns)


def tokenizer_of(folder):
    return load_tokenizer(folder, TokenOptions())


def test_prompt_and_completion_ids_are_the_tokens_of_the_full_text(saved_tokenizer):
    row, notes = encode_one(saved_tokenizer, text())
    backend = tokenizer_of(saved_tokenizer).backend
    for completion, words in zip(row.completions, (" how are you", " no-one knows"), strict=True):
        whole = backend.encode("hello world," + words, add_special_tokens=False).ids
        assert row.prompt[1:] + completion[:-1] == whole
    assert {name for name, count in notes.items() if count} == {"rows_of_plain_text"}


def test_a_bos_is_there_once_and_first_or_not_at_all(saved_tokenizer, tmp_path):
    bos = tokenizer_of(saved_tokenizer).hf.bos_token_id
    for record in (text(), text(prompt="<s>hello world,"), chat("how are you", "no-one")):
        row, _ = encode_one(saved_tokenizer, record)
        assert row.prompt[0] == bos
        assert [*row.prompt, *row.completions[0]].count(bos) == 1
    shy = save_tokenizer(tmp_path, adds_bos=False)
    assert encode_one(shy, text(), bos="always")[0].prompt[0] == bos
    assert encode_one(saved_tokenizer, text(), bos="never")[0].prompt[0] != bos


def test_what_is_too_long_is_cut_and_counted_or_refused(saved_tokenizer):
    full, _ = encode_one(saved_tokenizer, text())
    limit = len(full.prompt) + len(full.completions[0]) - 1  # room for all but EOS
    row, notes = encode_one(saved_tokenizer, text(), max_length=limit)
    assert (row.completions[0], row.cut[0]) == (full.completions[0][:-1], 1)
    assert notes["rows_with_completion_truncated"] == 1
    _, notes = encode_one(saved_tokenizer, text(rejected=" no"), max_length=limit)
    assert notes["rows_with_completion_truncated"] == 1  # by one of its two completions
    _, notes = encode_one(saved_tokenizer, text(), max_prompt_length=3)
    assert notes["rows_with_prompt_truncated"] == 1
    bad = refusal_of(saved_tokenizer, text(), max_length=len(full.prompt))
    assert bad.reason == "too_long"


def test_a_tokenizer_with_dropout_gives_the_same_tokens_each_time(tmp_path):
    make_tokenizer(tmp_path)
    file, asked = tmp_path / "tokenizer.json", "How far is the moon from here?"
    before = tokenizer_of(tmp_path)
    whole = json.loads(file.read_text())
    whole["model"]["dropout"] = 0.5
    file.write_text(json.dumps(whole))
    after = tokenizer_of(tmp_path)
    assert {tuple(after.backend.encode(asked).ids) for _ in range(9)} == {
        tuple(before.backend.encode(asked).ids)
    }
    assert tokenizer_fingerprint(after) == tokenizer_fingerprint(before)


def test_a_template_that_rewrites_the_prompt_is_counted(tmp_path):
    opened = "<|im_start|>assistant\n{% endif %}"
    thinking = TEMPLATE.replace(opened, opened.replace("{%", "<think>{%"))
    folder = save_tokenizer(tmp_path, template=thinking)
    (_, completion, _), notes = texts_of(folder, chat("how are you", "no-one"))
    assert notes["rows_whose_template_changes_the_prompt"] == 1
    assert completion == "how are you<|im_end|>"


DATES = {  # what asks for the date, and what may be made of it
    "{{ strftime_now('%d %b %Y') }}": "03 Feb 2026",
    "{# strftime_now(form) #}{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
    " strftime_now": "2026 strftime_now",
    "{% set form = '%d %b' %}{{ strftime_now(form) }}": None,
    "{{ strftime_now('%D' | lower) }}": None,
    "{{ strftime_now(format='%d %b') }}": None,
    "{{ strftime_now('%d' ~ ' %b') }}": None,
    "{% set now = strftime_now %}{{ now('%d %b') }}{{ strftime_now('%Y') }}": None,
}


@pytest.mark.parametrize("asks", DATES)
def test_a_template_is_given_the_date_of_the_settings_or_refused(tmp_path, asks):
    folder = save_tokenizer(tmp_path, template=asks + TEMPLATE)
    for date in ("", "2026-02-03"):
        if date and DATES[asks]:
            (prompt, *_), _ = texts_of(folder, chat("a", "b"), date=date)
            assert prompt.removeprefix("<s>").startswith(DATES[asks])
            continue
        # Also where the first rows are plain text.
        with pytest.raises(UsageError, match=r"tokens\.date") as refused:
            encode(folder, text(), chat("a", "b"), date=date)
        assert folder in str(refused.value)
    with pytest.raises(UsageError, match=r"tokens\.date"):
        load_tokenizer(folder, TokenOptions(date="tomorrow"))


def test_a_role_that_the_template_does_not_name_is_refused(saved_tokenizer, tmp_path):
    record = replace(chat("a", "b"), prompt=({"role": "chatbot", "content": "hello"},))
    bad = refusal_of(saved_tokenizer, record)
    assert (bad.reason, "'chatbot'" in bad.detail) == ("schema", True)
    named = TEMPLATE.replace("{{ m.role }}", "{{ 'user' if m.role == 'chatbot' else m.role }}")
    assert encode_one(save_tokenizer(tmp_path, template=named), record)


def test_what_is_odd_about_rows_is_counted(saved_tokenizer):
    for record, note in (
        (text(rejected=" how are you"), "pairs_with_equal_completions"),
        (text(chosen=" how<s>"), "rows_with_special_tokens_in_text"),
    ):
        assert encode_one(saved_tokenizer, record)[1][note] == 1
    scores = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (None, None), (-2.0, -1.0)]
    records = [replace(text(), scores=pair) for pair in scores]
    candidates = replace(text(), scores=(1.0, 2.0), roles=(Role.CANDIDATE,) * 2)
    *_, notes = encode(saved_tokenizer, *records, candidates)
    assert notes["pairs_whose_rejected_score_is_higher"] == 2


def test_another_template_shows_in_the_fingerprint_and_nothing_else_does(saved_tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE + " ")
    options = (TokenOptions(), TokenOptions(chat_template=str(tmp_path / "t.jinja")))
    base, changed = (tokenizer_fingerprint(load_tokenizer(saved_tokenizer, o)) for o in options)
    assert {name for name in base if base[name] != changed[name]} == {"tokenizer.chat_template"}


# Shows the reasoning of the last message alone, and writes an empty one where it has none.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set parts = m.content.split('</think>') %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ parts[0].replace('<think>', '').strip('\n') if parts | length > 1 }}\n</think>\n\n"
    "{{ parts[-1].lstrip('\n') }}{% else %}{{ parts[-1].lstrip('\n') }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# What ends a turn of text, a turn that calls tools, who writes it, and what "yes" becomes behind
# the prompt that the template opens the turn with.
STOPS = {
    "qwen base": ("<|im_end|>", "<|im_end|>", "template", "yes<|im_end|>"),
    "gemma": ("<end_of_turn>", "<end_of_turn>", "template", "yes<end_of_turn>"),
    "glm 4": ("<|user|>", "<|observation|>", "template", "\nyes<|user|>"),
    "gpt-oss": (
        *("<|return|>", "<|call|>", "template"),
        "<|channel|>final<|message|>yes<|return|>",
    ),
    "phi 3": ("<|end|>", "<|end|>", "template", "yes<|end|>"),
    "deepseek": ("<|eos|>", "<|eos|>", "template", "yes<|eos|>"),
    "llama 2 without an end": ("</s>", "</s>", "tokenizer", " yes</s>"),
}
CALLS = {  # a completion that calls search(q=1), as each template writes it, up to its stop
    "qwen base": '<tool_call>\n{"name": "search", "arguments": {"q": 1}}\n</tool_call>',
    "glm 4": 'search\n{"q": 1}',
    "gpt-oss": ' to=functions.search<|channel|>commentary<|message|>{"q": 1}',
    "deepseek": '<|calls|>search\n{"q": 1}<|/calls|>',
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    thinking = {"specials": CHATML_SPECIALS, "template": THINKING, "eos": "<|im_end|>"}
    return {
        name: byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)
        for name, family in (FAMILIES | {"thinking": thinking}).items()
    }


def said(*texts):
    """Completions of one message each."""
    return conversation(*((bot(text),) for text in texts))


def call(arguments):
    function = {"name": "search", "arguments": arguments}
    return (bot("") | {"tool_calls": [{"function": function}]},)


def stops_of(folder, **options):
    """What a fingerprint says of the stops of a folder's tokenizer."""
    return StopTokens.of(tokenizer_fingerprint(load_tokenizer(folder, TokenOptions(**options))))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_ends_with_the_stop_of_its_template(families, family):
    folder, (turn, tool_calls, source, yes) = families[family], STOPS[family]
    (_, *completions), _ = texts_of(folder, said("yes", "a\nno"))
    assert completions == [yes, yes.replace("yes", "a\nno")]
    stops = stops_of(folder)
    assert (stops.turn.text, stops.tool_calls.text, stops.turn.source) == (turn, tool_calls, source)
    assert stops == load_tokenizer(folder, TokenOptions()).stops
    ids, eos = encode_one(folder, said("yes"))[0].completions[0], FAMILIES[family]["eos"]
    assert decoder(folder, stops.tokens)(ids, True) == yes.removesuffix(turn)
    plain = conversation(" yes", f" no{eos} ", prompt="Is it?")
    assert texts_of(folder, plain)[0][1:] == [f" yes{eos}", f" no{eos}"]
    if family in CALLS:
        arguments = '{"q": 1}' if family == "deepseek" else {"q": 1}
        (_, completion), _ = texts_of(folder, conversation(call(arguments)))
        assert completion == CALLS[family] + tool_calls


@pytest.mark.parametrize("written", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>"])
def test_a_stop_that_the_data_already_hold_is_not_learned_twice(families, written):
    (_, completion), _ = texts_of(families["qwen base"], said(f"yes{written}"))
    assert completion == "yes<|im_end|>"
    (_, completion), _ = texts_of(families["glm 4"], said("yes<|endoftext|>"))
    assert completion == "\nyes<|user|>"


@pytest.mark.parametrize("family", ["gpt-oss", "glm 4", "gemma"])
def test_a_completion_that_was_cut_ends_with_no_stop_of_any_kind(families, family):
    stops = {*STOPS[family][:2], FAMILIES[family]["eos"]}
    reply = (*call({"q": 1}), {"role": "tool", "content": "one"})
    record = conversation((*(reply if family in CALLS else (bot("yes"), user("why"))), bot("so")))
    (prompt, whole), _ = texts_of(families[family], record)
    tokenizer = load_tokenizer(families[family], TokenOptions())
    length, more = (
        len(tokenizer.backend.encode(text, add_special_tokens=False)) for text in (prompt, whole)
    )
    for room in range(1, more):
        for row in encode(families[family], record, max_length=length + room)[0]:
            (ids,) = row.completions
            assert row.cut[0] > 0
            assert tokenizer.backend.id_to_token(ids[-1]) not in stops
            assert whole.startswith(tokenizer.hf.decode(ids))


def test_a_stop_that_only_some_turns_end_with_is_found_in_the_row(tmp_path):
    odd = CHATML.replace("{% endfor %}<|im_end|>", "{% endfor %}{{ m.end or '<|im_end|>' }}")
    specials = [*CHATML_SPECIALS, "<|eom|>"]
    folder = byte_tokenizer(tmp_path, specials, template=odd, eos="<|endoftext|>")
    (_, text), _ = texts_of(folder, conversation((bot("yes") | {"end": "<|eom|>"},)))
    assert text == "yes<|eom|>"


def test_nothing_is_added_or_taken_when_no_stop_is_wanted(families):
    (_, text), _ = texts_of(families["qwen base"], said("yes"), eos="never")
    assert text == "yes<|im_end|>\n"
    record = conversation(" yes", prompt="Is it?")
    assert texts_of(families["qwen base"], record, eos="never")[0][1] == " yes"
    assert stops_of(families["gemma"], eos="never") == StopTokens(None, None, None)


def prefilled(prefill, *completions):
    """A prompt that ends so, and completions each of one text or of messages."""
    turns = ((bot(one),) if isinstance(one, str) else one for one in completions)
    return conversation(*turns, prompt=(USER, bot(prefill)))


def opened_texts(folder, record):
    """The prompt, which stays as it is, and its completions."""
    found, notes = texts_of(folder, record)
    assert not notes["rows_whose_template_changes_the_prompt"]
    return found


BY_HAND = {
    "qwen base": ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure,", "<|im_end|>"),
    "glm 4": ("[gMASK]<sop><|user|>\nhi<|assistant|>\nSure,", "<|user|>"),
    "llama 2 without an end": ("<s>[INST] hi [/INST] Sure,", "</s>"),
    "thinking": (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSure,",
        "<|im_end|>",
    ),
}


@pytest.mark.parametrize("family", BY_HAND)
def test_the_prompts_last_turn_stays_open_and_is_continued(families, family):
    opened, end = BY_HAND[family]
    found = opened_texts(families[family], prefilled("Sure,", " here", " no"))
    assert found == [opened, f" here{end}", f" no{end}"]


ASKED = (user("why"), bot("so"))
WHY = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso<|im_end|>"


def test_what_follows_the_prefill_is_written_as_its_template_writes_it(families):
    for completion, opened, written in (
        ((bot(" here"), *ASKED), "Sure,", f" here<|im_end|>\n{WHY}"),
        (call({"q": 1}), "Sure,", CALLS["qwen base"] + "<|im_end|>"),
        (ASKED, "Sure,<|im_end|>\n", WHY),  # the user answers, which closes the turn
    ):
        prompt, said = opened_texts(families["qwen base"], prefilled("Sure,", completion))
        assert prompt.endswith(f"<|im_start|>assistant\n{opened}")
        assert said == written
    both = prefilled("Sure,", " here", ASKED)
    assert refusal_of(families["qwen base"], both).reason == "schema"


def test_a_prefill_that_the_template_hides_is_refused(tmp_path, families):
    hidden = CHATML.replace("{{ m.content }}", "{{ m.content.split('#')[-1] }}")
    folder = byte_tokenizer(tmp_path, CHATML_SPECIALS, template=hidden, eos="<|endoftext|>")
    assert refusal_of(folder, prefilled("Sure,", " here # there")).reason == "template_error"
    assert opened_texts(folder, prefilled("Sure,", " here"))[1] == " here<|im_end|>"
    # This template takes reasoning for such only once it has ended, and never in earlier turns.
    ended = prefilled("<think>\nLet me", " see\n</think>\n\n42")
    for item in (ended, prefilled("Sure,", (bot(" here"), *ASKED))):
        assert refusal_of(families["thinking"], item).reason == "template_error"
