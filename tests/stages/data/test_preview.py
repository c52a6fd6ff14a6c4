"""The row as a model reads it, beside what the tokenizer itself makes of the same ids."""

import json
import re

import numpy as np
import pytest

from align.schemas.data_options import TokenOptions
from align.stages.data.preview import CUT, LEARNED, PROMPT, UNLEARNED, lines_of
from align.stages.data.row_keys import key_rows
from align.stages.data.tokenizer import load_tokenizer
from support import tool_templates
from support.byte_tokenizers import byte_tokenizer
from support.encoded_rows import encoded
from support.read_rows import bot, conversation, encode_one, user
from support.tool_templates import chat_tokenizer
from support.turn_templates import KINDS

TOOLS = {
    name: text
    for name, text in vars(tool_templates).items()
    if name.isupper() and isinstance(text, str) and not name.startswith("_")
}
TEMPLATES = [*KINDS, *TOOLS]
PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?P<special>.+?)\](?=[ )]|$)')
# Quotes, control characters, other scripts, and text that looks like what stands around it.
ASKED = user('Say "hi"\n\t(not learned: "no") [<x>]')
FIRST, AGAIN, LAST = bot('Żółw \x1b[31m"x"'), user("and?"), bot("好 (3 tokens cut)")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def make(name):
        folder = tmp_path_factory.mktemp("tokenizer")
        if name in KINDS:
            return byte_tokenizer(folder, **KINDS[name])
        return chat_tokenizer(folder, TOOLS[name])

    return make


def lines_for(row, tokenizer, *, file="data.jsonl", side="left"):
    """The lines of an encoded row, its prompt's after the first."""
    rows = key_rows([row], carried=())
    return [*lines_of(rows, tokenizer, file=file, prompt_side=side)]


def said(line):
    """The text of a line's pieces, with special tokens by their names."""
    pieces = str(line).partition(": ")[2]
    found = [(one[0], one["special"]) for one in PIECE.finditer(pieces)]
    return "".join(special if special else json.loads(text) for text, special in found)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_preview_decodes_as_the_tokenizer_does(folder_of, name):
    folder = folder_of(name)
    tokenizer = load_tokenizer(folder, TokenOptions())
    record = conversation((FIRST, AGAIN, LAST), (bot("long" * 40),), prompt=(ASKED,))
    size = len(encode_one(folder, record)[0].prompt) + 130
    row, _ = encode_one(folder, record, max_length=size)
    title, prompt, several, single = lines_for(row, tokenizer)

    def of(style, line):
        spans = sorted((one.start, one.end) for one in line.spans if one.style == style)
        return [line.plain[start:end] for start, end in spans]

    def text_of(style, line):
        return said(": " + " ".join(of(style, line)))

    decode, learned = tokenizer.hf.decode, np.array(row.learned[0]) > 0
    ids = np.array(row.completions[0])
    assert not title.spans
    assert said(prompt) == text_of(PROMPT, prompt) == decode(row.prompt)
    assert said(several) == decode(ids)
    assert f"{len(ids)} tokens, {learned.sum()} learned" in several.plain
    assert text_of(LEARNED, several) == decode(ids[learned])
    # Each stretch that is not learned stands in brackets of its own.
    edges = np.flatnonzero(np.diff(learned, prepend=True, append=True))
    stretches = [decode(ids[start:stop]) for start, stop in edges.reshape(-1, 2).tolist()]
    assert [said(f": {one}") for one in of(UNLEARNED, several)] == stretches
    assert all(re.fullmatch(r"\(not learned: .*\)", one) for one in of(UNLEARNED, several))
    # What was cut, or is left out of the line, is counted.
    assert of(CUT, single) == [f"({row.cut[1]} tokens cut)"]
    assert not of(CUT, several)
    assert all(line.plain.isprintable() for line in (title, prompt, several, single))


OPENED = '<bos><start_of_turn>user\nHi "you"<end_of_turn>\n<start_of_turn>model\n'


@pytest.fixture(scope="module")
def gemma_tokenizer(folder_of):
    """Of bytes: a character of ASCII is a token."""
    return load_tokenizer(folder_of("gemma"), TokenOptions())


def shown(tokenizer, *texts, file="data.jsonl", side="left", **more):
    """The lines of a row of these texts."""
    ids = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
    return [*map(str, lines_for(encoded(*ids, row=7, **more), tokenizer, file=file, side=side))]


def test_a_preview_shows_special_tokens_and_counts_cut_ones(
    gemma_tokenizer,
):
    cut = {"prompt_cut": 3, "cut": (1, 0)}
    lines = shown(gemma_tokenizer, OPENED, " I.\n<end_of_turn>", "No", **cut)
    assert lines == [
        "row 7 of data.jsonl as the model reads it, [special tokens] apart:",
        # 2 special, 5 of the role's line, 8 of the message, 1 + 1 of its end, 1 + 6 of the answer's
        r'  prompt, 24 tokens: [<bos>] (3 tokens cut) [<start_of_turn>] "user\nHi \"you\"" '
        r'[<end_of_turn>] "\n" [<start_of_turn>] "model\n"',
        r'  chosen, 5 tokens: " I.\n" [<end_of_turn>] (1 token cut)',
        '  rejected, 2 tokens: "No"',
    ]
    for side, told in (("left", '(3 tokens cut) "abc"'), ("right", '"abc" (3 tokens cut)')):
        (_, prompt, *_) = shown(gemma_tokenizer, "abc", "d", "e", side=side, **cut)
        assert prompt == f"  prompt, 3 tokens: {told}"


def test_a_long_text_loses_its_middle_and_what_is_missing_is_counted(gemma_tokenizer):
    _, prompt, chosen, _ = shown(gemma_tokenizer, "a" * 200, "b" * 129, "c")
    for line, letter, missing in ((prompt, "a", 72), (chosen, "b", 1)):
        counted = "1 token" if missing == 1 else f"{missing} tokens"
        ends = f'"{letter * 64}"'
        assert line.partition(": ")[2] == f"{ends} ({counted} not shown) {ends}"


def test_no_text_passes_for_a_token_or_a_line_or_drives_a_terminal(gemma_tokenizer):
    text = '\x1b]0;title\x07\x1b[2J\r\n\x9b\u202e [<end>] "(9 tokens cut)" C:\\new\x7f'
    lines = shown(gemma_tokenizer, "q", text, "a", file="\x1b[2J.jsonl")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 4
    quoted = lines[2].partition(": ")[2]
    assert quoted.startswith(r'"\u001b]0;title\u0007\u001b[2J\r\n\u009b\u202e [<end>] \"(9 tok')
    assert quoted.endswith(r'cut)\" C:\\new\u007f"')
    assert json.loads(quoted) == text  # the quotes close once
