"""One table of tokenizers that differ in their BOS, EOS, padding and the stops of their templates.

A token is a byte or a special token, so what is cut and kept was written down by hand.
"""

import json
import re
from dataclasses import dataclass, replace

import pytest

from align.schemas.config import ModelOptions
from align.schemas.data_options import TokenOptions
from align.schemas.rows import Role
from align.stages.data.preview import lines_of
from align.stages.data.row_keys import key_rows
from align.stages.data.tokenizer import decoder, load_tokenizer
from align.stages.model.generate import own_stops
from align.stages.model.save import stop_generation_at
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, byte_tokenizer
from support.read_rows import bot, conversation, encode_one, texts_of, user
from support.turn_templates import ALPACA, LLAMA_3

TINY = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Its stop is only the head of the next turn.
HEADED = (
    "{% for m in messages %}{{ eos_token }}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token }}[assistant]{% endif %}"
)
HEADERS = ["<|start_header_id|>", "<|end_header_id|>"]
LLAMA_SPECIALS = ["<|begin_of_text|>", *HEADERS, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]
ASKED_CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ASKED_ALPACA = "### Instruction:\nhi\n\n### Response:\n"


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and what the prompts "hello world" and "hi" of a user come to with it."""

    tokenizer: dict
    text_stop: str
    turn_stop: str
    text: str
    chat: str
    text_cut: tuple[str, str]  # to four tokens: on the left, and on the right
    chat_cut: tuple[str, str]
    generation: tuple[str, ...] = ()  # what the model's own settings stop at


TABLE = {
    "a BOS that is added, EOS and padding apart": Kind(
        {"specials": ["<s>", "</s>", "<pad>"], "template": TINY, "bos": "<s>", "eos": "</s>"}
        | {"pad": "<pad>", "adds_bos": True},
        text_stop="</s>",
        turn_stop="</s>",
        text="<s>hello world",
        chat="<s>[user]hi</s>[assistant]",
        text_cut=("<s>rld", "<s>hel"),
        chat_cut=("<s>nt]", "<s>[us"),
        generation=("</s>",),
    ),
    "a BOS that the template alone writes": Kind(
        {"specials": ["<s>", "</s>"], "template": TINY, "bos": "<s>", "eos": "</s>"},
        text_stop="</s>",
        turn_stop="</s>",
        text="hello world",
        chat="<s>[user]hi</s>[assistant]",
        text_cut=("orld", "hell"),
        chat_cut=("<s>nt]", "<s>[us"),
    ),
    "Qwen: no BOS": Kind(
        {"specials": CHATML_SPECIALS, "template": CHATML, "eos": "<|im_end|>"}
        | {"pad": "<|endoftext|>"},
        text_stop="<|im_end|>",
        turn_stop="<|im_end|>",
        text="hello world",
        chat=ASKED_CHATML,
        text_cut=("orld", "hell"),
        chat_cut=("ant\n", "<|im_start|>use"),
        generation=("<|im_end|>", "<|endoftext|>"),
    ),
    "Qwen base: no BOS, EOS is the padding and ends no turn": Kind(
        {"specials": CHATML_SPECIALS, "template": CHATML, "eos": "<|endoftext|>"}
        | {"pad": "<|endoftext|>"},
        text_stop="<|endoftext|>",
        turn_stop="<|im_end|>",
        text="hello world",
        chat=ASKED_CHATML,
        text_cut=("orld", "hell"),
        chat_cut=("ant\n", "<|im_start|>use"),
        generation=("<|endoftext|>",),
    ),
    "SmolLM: BOS opens each turn and is not added, EOS is the padding": Kind(
        {"specials": CHATML_SPECIALS, "template": CHATML, "bos": "<|im_start|>"}
        | {"eos": "<|im_end|>", "pad": "<|im_end|>"},
        text_stop="<|im_end|>",
        turn_stop="<|im_end|>",
        text="hello world",
        chat=ASKED_CHATML,
        text_cut=("orld", "hell"),
        chat_cut=("<|im_start|>nt\n", "<|im_start|>use"),
        generation=("<|im_end|>",),
    ),
    "Llama 3: several EOS": Kind(
        {"specials": LLAMA_SPECIALS, "template": LLAMA_3, "bos": "<|begin_of_text|>"}
        | {"eos": "<|eot_id|>", "pad": "<|end_of_text|>", "adds_bos": True},
        text_stop="<|eot_id|>",
        turn_stop="<|eot_id|>",
        text="<|begin_of_text|>hello world",
        chat="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        text_cut=("<|begin_of_text|>rld", "<|begin_of_text|>hel"),
        chat_cut=(
            "<|begin_of_text|><|end_header_id|>\n\n",
            "<|begin_of_text|><|start_header_id|>us",
        ),
        generation=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "GPT-2: BOS, EOS and padding are one, and the template writes no stop": Kind(
        {"specials": ["<|endoftext|>"], "template": ALPACA, "bos": "<|endoftext|>"}
        | {"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
        text_stop="<|endoftext|>",
        turn_stop="<|endoftext|>",
        text="hello world",
        chat=ASKED_ALPACA,
        text_cut=("orld", "hell"),
        chat_cut=("se:\n", "### "),
    ),
    "BOS, EOS and padding are one, and open each turn": Kind(
        {"specials": ["<|endoftext|>"], "template": HEADED, "bos": "<|endoftext|>"}
        | {"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
        text_stop="<|endoftext|>",
        turn_stop="<|endoftext|>",
        text="hello world",
        chat="<|endoftext|>[user]hi<|endoftext|>[assistant]",
        text_cut=("orld", "hell"),
        chat_cut=("<|endoftext|>nt]", "<|endoftext|>[us"),
        generation=("<|endoftext|>",),
    ),
    "no BOS, no padding, and the template writes no stop": Kind(
        {"specials": ["</s>"], "template": ALPACA, "eos": "</s>"},
        text_stop="</s>",
        turn_stop="</s>",
        text="hello world",
        chat=ASKED_ALPACA,
        text_cut=("orld", "hell"),
        chat_cut=("se:\n", "### "),
        generation=("</s>",),
    ),
}
TEXT = replace(
    conversation(" yes", " no"), prompt="hello world", roles=(Role.CHOSEN, Role.REJECTED)
)
CHAT = replace(TEXT, prompt=(user("hi"),), completions=((bot("yes"),), (bot("no"),)))


@pytest.fixture(scope="module", params=TABLE, ids=lambda name: re.sub(r"\W+", "-", name))
def kind(request):
    return TABLE[request.param]


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), **kind.tokenizer, added=["xyz"])


def test_a_prompt_has_its_bos_and_a_completion_ends_once_with_its_stop(kind, folder):
    texts, _ = texts_of(folder, TEXT)
    assert texts == [kind.text, f" yes{kind.text_stop}", f" no{kind.text_stop}"]
    end = ending_of(kind)
    assert texts_of(folder, CHAT)[0] == [kind.chat, f"yes{end}", f"no{end}"]


def ending_of(kind):
    """What the template and the stop rule put behind an answer."""
    tail = "\n\n" if kind.tokenizer["template"] == ALPACA else ""
    return f"{tail}{kind.turn_stop}"


def test_a_token_across_the_boundary_goes_to_the_completions_of_its_row(kind, folder):
    """The token "xyz", of which one of the completions has the second and the third letter."""
    bos, stop = kind.text.removesuffix("hello world"), kind.text_stop
    text = replace(TEXT, prompt="hello x", completions=("yz, yes", "y, no"))
    assert texts_of(folder, text)[0] == [f"{bos}hello ", f"xyz, yes{stop}", f"xy, no{stop}"]
    open_turn = (user("hi"), bot("x"))
    chat = replace(CHAT, prompt=open_turn, completions=((bot("yz"),), (bot("y"),)))
    end = ending_of(kind)
    assert texts_of(folder, chat)[0] == [kind.chat, f"xyz{end}", f"xy{end}"]
    # A character of several tokens belongs to one side.
    wide = replace(TEXT, prompt="hello", completions=("😀 yes", "é no"))
    assert texts_of(folder, wide)[0] == [f"{bos}hello", f"😀 yes{stop}", f"é no{stop}"]


def test_a_cut_prompt_keeps_its_bos_and_side(kind, folder):
    tokenizer = load_tokenizer(folder, TokenOptions())
    bos = kind.tokenizer.get("bos")
    for record, cuts in ((TEXT, kind.text_cut), (CHAT, kind.chat_cut)):
        whole = len(encode_one(folder, record)[0].prompt)
        for side, cut in zip(("left", "right"), cuts, strict=True):
            options = {"max_prompt_length": 4, "prompt_side": side}
            assert texts_of(folder, record, **options)[0][0] == cut
            row, _ = encode_one(folder, record, **options)
            assert row.prompt_cut == whole - 4
            rows = key_rows([row], carried=())
            _, shown, *_ = map(str, lines_of(rows, tokenizer, file="x", prompt_side=side))
            missing = f"({whole - 4} tokens cut)"
            if side == "right":
                assert shown.endswith(missing)
            else:
                kept = f"[{bos}] " if bos and cut.startswith(bos) else ""
                assert shown.startswith(f"  prompt, 4 tokens: {kept}{missing} ")


def test_decoded_text_comes_to_the_same_ids(kind, folder):
    tokenizer = load_tokenizer(folder, TokenOptions())
    decode = decoder(folder, tokenizer.stops.tokens)
    for record, prompt in ((TEXT, kind.text), (CHAT, kind.chat)):
        row, _ = encode_one(folder, record)
        bos = kind.tokenizer.get("bos") if kind.tokenizer.get("adds_bos") else ""
        assert decode(row.prompt, False) == prompt.removeprefix(bos)
        again, _ = encode_one(folder, replace(TEXT, prompt=decode(row.prompt, False)))
        assert again.prompt == row.prompt
        said = decode(row.completions[0], True)
        assert re.fullmatch(r" ?yes(\n\n)?", said)


def test_a_model_stops_at_its_own_stops_and_those_of_completions(kind, folder, tmp_path):
    tokenizer = load_tokenizer(folder, TokenOptions())
    number = tokenizer.backend.token_to_id
    stops = {number(kind.text_stop), number(kind.turn_stop)}
    assert tokenizer.stops.tokens == stops
    assert tokenizer.stops.turn.text == kind.turn_stop
    is_written = kind.tokenizer["template"] != ALPACA
    assert tokenizer.stops.turn.source == ("template" if is_written else "tokenizer")
    own = [number(token) for token in kind.generation]
    settings = {"eos_token_id": own[0] if len(own) == 1 else own} if own else {}
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model = ModelOptions(path=str(tmp_path))
    assert own_stops(model) == {*own}
    stop_generation_at(stops, tmp_path, tmp_path)
    assert own_stops(model) == {*own, *stops}
