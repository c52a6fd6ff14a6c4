"""The row as a model reads it, beside what the tokenizer itself makes of the same ids."""

import json

import pytest

from align.schemas.data_options import TokenOptions
from align.stages.data.preview import lines_of
from align.stages.data.row_keys import key_rows
from align.stages.data.tokenizer import load_tokenizer
from support import tool_templates
from support.byte_tokenizers import byte_tokenizer
from support.encoded_rows import encoded
from support.tool_templates import chat_tokenizer
from support.turn_templates import KINDS

TOOLS = {
    name: text
    for name, text in vars(tool_templates).items()
    if name.isupper() and isinstance(text, str) and not name.startswith("_")
}


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


def test_no_text_passes_for_a_token_or_a_line_or_drives_a_terminal(gemma_tokenizer):
    text = '\x1b]0;title\x07\x1b[2J\r\n\x9b\u202e [<end>] "(9 tokens cut)" C:\\new\x7f'
    lines = shown(gemma_tokenizer, "q", text, "a", file="\x1b[2J.jsonl")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 4
    quoted = lines[2].partition(": ")[2]
    assert quoted.startswith(r'"\u001b]0;title\u0007\u001b[2J\r\n\u009b\u202e [<end>] \"(9 tok')
    assert quoted.endswith(r'cut)\" C:\\new\u007f"')
    assert json.loads(quoted) == text  # the quotes close once
