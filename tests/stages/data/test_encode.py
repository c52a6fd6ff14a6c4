"""The traps that concern tokens, each against an obvious oracle."""

from dataclasses import replace

import pytest

from align.schemas.config import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Record, Role
from align.stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, byte_tokenizer
from support.encoded_texts import encode, encode_one, refusal_of, texts_of
from support.read_rows import bot, user

TEMPLATE = "{{ bos_token }}" + CHATML


def save_tokenizer(folder, *, template=TEMPLATE, adds_bos=True):
    """A token is a byte, a special token or " world"."""
    named = {"bos": "<s>", "eos": "<|im_end|>", "adds_bos": adds_bos, "added": [" world"]}
    return byte_tokenizer(folder, ["<s>", *CHATML_SPECIALS], template=template, **named)


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tok"))


def text(prompt="hello world,", chosen=" how are you", rejected=" no-one knows"):
    return Record(
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


def test_there_is_one_bos_and_it_is_first_where_the_tokenizer_or_a_setting_asks(
    saved_tokenizer, tmp_path
):
    bos = tokenizer_of(saved_tokenizer).hf.bos_token_id
    for record in (text(), text(prompt="<s>hello world,"), chat("how are you", "no-one")):
        row, _ = encode_one(saved_tokenizer, record)
        assert row.prompt[0] == bos
        assert [*row.prompt, *row.completions[0]].count(bos) == 1
    shy = save_tokenizer(tmp_path, adds_bos=False)
    assert encode_one(shy, text())[0].prompt[0] != bos
    whole, short = (encode_one(shy, chat("a", "b"), max_prompt_length=n)[0].prompt for n in (0, 4))
    assert short == [bos, *whole[-3:]]  # which the template wrote
    assert encode_one(shy, text(), bos="always")[0].prompt[0] == bos
    assert encode_one(saved_tokenizer, text(), bos="never")[0].prompt[0] != bos


def test_what_is_too_long_loses_the_stop_or_the_beginning_but_never_its_bos_or_all(
    saved_tokenizer,
):
    full, _ = encode_one(saved_tokenizer, text())
    limit = len(full.prompt) + len(full.completions[0]) - 1  # room for all but EOS
    row, notes = encode_one(saved_tokenizer, text(), max_length=limit)
    assert (row.completions[0], row.cut[0]) == (full.completions[0][:-1], 1)
    assert notes["rows_with_completion_truncated"] == 1
    row, notes = encode_one(saved_tokenizer, text(), max_prompt_length=3)
    assert row.prompt == [full.prompt[0], *full.prompt[-2:]]
    assert row.prompt_cut == len(full.prompt) - 3
    assert notes["rows_with_prompt_truncated"] == 1
    right, _ = encode_one(saved_tokenizer, text(), max_prompt_length=3, prompt_side="right")
    assert right.prompt == full.prompt[:3]
    bad = refusal_of(saved_tokenizer, text(), max_length=len(full.prompt))
    assert bad.reason == "too_long"


def test_a_token_across_the_boundary_goes_to_the_completion_and_is_counted(saved_tokenizer):
    # " world" is one token, and the boundary falls inside it.
    record = text(prompt="hello wor", chosen="ld, how are you", rejected="k is the answer")
    row, notes = encode_one(saved_tokenizer, record)
    assert notes["rows_with_a_token_across_the_boundary"] == 1
    decode = tokenizer_of(saved_tokenizer).backend.decode
    assert "hello wor".startswith(decode(row.prompt[1:]))
    for completion, words in zip(row.completions, record.completions, strict=True):
        assert decode([*row.prompt[1:], *completion[:-1]]) == "hello wor" + words
    assert refusal_of(saved_tokenizer, record, boundary="strict").reason == "boundary"
    # A character of several tokens belongs to one side.
    whole = text(prompt="hello", chosen="😀 you", rejected=" no")
    (prompt, completion, _), notes = texts_of(saved_tokenizer, whole, boundary="strict")
    assert (prompt, completion) == ("<s>hello", "😀 you<|im_end|>")


def test_a_template_that_rewrites_the_prompt_is_counted_and_one_that_fails_rejects_its_row(
    tmp_path,
):
    opened = "<|im_start|>assistant\n{% endif %}"
    thinking = TEMPLATE.replace(opened, opened.replace("{%", "<think>{%"))
    folder = save_tokenizer(tmp_path, template=thinking)
    (_, completion, _), notes = texts_of(folder, chat("how are you", "no-one"))
    assert notes["rows_whose_template_changes_the_prompt"] == 1
    assert completion == "how are you<|im_end|>"
    picky = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    folder = save_tokenizer(tmp_path, template=picky)
    result = encode(folder, chat("a", "b", asked="bad"), chat("a", "b"))
    assert [row.reason for row in result.rejected] == ["template_error"]
    assert len(result.rows) == 1


def test_a_template_that_asks_for_the_date_is_given_the_one_in_the_settings(tmp_path):
    dated = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    folder = save_tokenizer(tmp_path, template=dated)
    with pytest.raises(UsageError, match=r"tokens\.date"):
        tokenizer_of(folder).require_template(folder)
    (prompt, *_), _ = texts_of(folder, chat("a", "b"), date="2026-02-03")
    assert "03 Feb 2026" in prompt
    with pytest.raises(UsageError, match="YYYY-MM-DD"):
        load_tokenizer(folder, TokenOptions(date="tomorrow"))


def test_a_role_that_the_template_does_not_name_is_refused(saved_tokenizer, tmp_path):
    record = replace(chat("a", "b"), prompt=({"role": "chatbot", "content": "hello"},))
    bad = refusal_of(saved_tokenizer, record)
    assert (bad.reason, "'chatbot'" in bad.detail) == ("schema", True)
    named = TEMPLATE.replace("{{ m.role }}", "{{ 'user' if m.role == 'chatbot' else m.role }}")
    assert encode_one(save_tokenizer(tmp_path, template=named), record)


def test_what_is_odd_about_rows_is_counted(saved_tokenizer):
    for record, note, count in (
        (text(rejected=" how are you"), "pairs_with_equal_completions", 1),
        (
            text(chosen="hello world, how are you", rejected="\nhello world, no"),
            "completions_that_repeat_their_prompt",
            2,
        ),
        (text(chosen=" how<s>"), "rows_with_special_tokens_in_text", 1),
    ):
        assert encode_one(saved_tokenizer, record)[1][note] == count
    scores = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (None, None), (-2.0, -1.0)]
    records = [replace(text(), scores=pair) for pair in scores]
    candidates = replace(text(), scores=(1.0, 2.0), roles=(Role.CANDIDATE,) * 2)
    notes = encode(saved_tokenizer, *records, candidates).notes
    assert notes["pairs_whose_rejected_score_is_higher"] == 2


def test_another_template_shows_in_the_fingerprint_and_nothing_else_does(saved_tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE + " ")
    options = (TokenOptions(), TokenOptions(chat_template=str(tmp_path / "t.jinja")))
    base, changed = (tokenizer_fingerprint(load_tokenizer(saved_tokenizer, o)) for o in options)
    assert {name for name in base if base[name] != changed[name]} == {"tokenizer.chat_template"}
