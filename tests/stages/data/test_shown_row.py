"""The row as a model reads it, beside what the tokenizer itself makes of the same ids."""

import json
import re

import numpy as np
import pytest

from align.schemas.data_options import TokenOptions
from align.schemas.row_keys import key_rows
from align.stages.data.shown_row import coloured, lines_of
from align.stages.data.tokenizer import load_tokenizer
from support import tool_templates
from support.byte_tokenizers import byte_tokenizer
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


def said(line):
    """The text of a line's pieces, with special tokens by their names."""
    pieces = line.partition(": ")[2]
    found = [(one[0], one["special"]) for one in PIECE.finditer(pieces)]
    return "".join(special if special else json.loads(text) for text, special in found)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_shown_is_what_the_tokenizer_decodes_and_marks_what_is_not_learned(folder_of, name):
    folder = folder_of(name)
    tokenizer = load_tokenizer(folder, TokenOptions())
    row, _ = encode_one(folder, conversation((FIRST, AGAIN, LAST), (LAST,), prompt=(ASKED,)))
    rows = key_rows([row], seed=0, carried=()).rows
    _, prompt, several, single = lines_of(rows, tokenizer, file="x", prompt_side="left")
    decode = tokenizer.hf.decode
    ids, (turns, _) = row.completions[0], row.turns
    assert said(prompt) == decode(row.prompt)
    assert said(several) == decode(ids)
    assert said(single) == decode(row.completions[1])
    learned = np.array(turns) > 0
    assert f"{len(ids)} tokens, {learned.sum()} learned" in several
    # Each stretch that is not learned stands in brackets of its own.
    edges = np.flatnonzero(np.diff(learned, prepend=True, append=True))
    stretches = [decode(ids[start:stop]) for start, stop in edges.reshape(-1, 2).tolist()]
    shown = re.findall(r"(?<=[ :])\(not learned: (.*?)\)(?= \"| \[|$)", several.partition(": ")[2])
    assert [said(f": {one}") for one in shown] == stretches
    assert "\x1b" not in f"{prompt}{several}{single}"


def test_colours_follow_what_is_learned_and_never_the_text_of_the_data(folder_of):
    folder = folder_of("qwen base")
    tokenizer = load_tokenizer(folder, TokenOptions())
    record = conversation((FIRST, AGAIN, LAST), (bot("long" * 40),), prompt=(ASKED,))
    size = len(encode_one(folder, record)[0].prompt) + 100
    row, _ = encode_one(folder, record, max_length=size)
    rows = key_rows([row], seed=0, carried=()).rows
    title, prompt, several, cut = lines_of(rows, tokenizer, file="x", prompt_side="left")
    bare = re.compile("\x1b\\[[0-9]*m")
    for line in (title, prompt, several, cut):
        assert bare.sub("", coloured(line)) == line

    def of(colour, line):
        marked = re.findall(f"\x1b\\[{colour}m(.*?)\x1b\\[0m", coloured(line))
        return said(f": {''.join(marked)}")

    decode, learned = tokenizer.hf.decode, np.array(row.turns[0]) > 0
    ids = np.array(row.completions[0])
    assert coloured(title) == title
    assert of(2, prompt) == decode(row.prompt)
    assert of(32, several) == decode(ids[learned])
    assert of(33, several) == decode(ids[~learned])
    assert re.findall("\x1b\\[31m(.*?)\x1b", coloured(cut)) == [f"({row.cut[1]} tokens cut)"]
    assert "\x1b[31m" not in coloured(several)
