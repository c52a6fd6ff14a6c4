"""What ends a completion, with templates in the style of the families people train.

A token is a byte or a special token, so that ids are compared as the text they stand for.
"""

import pytest

from align.schemas.cache import Stops
from align.schemas.config import TokenOptions
from align.stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, FAMILIES, PLAIN, byte_tokenizer
from support.encoded_texts import conversation, encode, texts_of
from support.read_rows import bot, user

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
    "words only": ("</s>", "</s>", "tokenizer", "yes\n</s>"),
}
CALLS = {  # a completion that calls search(q=1), as each template writes it, up to its stop
    "qwen base": '<tool_call>\n{"name": "search", "arguments": {"q": 1}}\n</tool_call>',
    "glm 4": 'search\n{"q": 1}',
    "gpt-oss": ' to=functions.search<|channel|>commentary<|message|>{"q": 1}',
    "deepseek": '<|calls|>search\n{"q": 1}<|/calls|>',
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return {
        name: byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)
        for name, family in FAMILIES.items()
    }


def said(*texts):
    """Completions of one message each."""
    return conversation(*((bot(text),) for text in texts))


def call(arguments):
    function = {"name": "search", "arguments": arguments}
    return (bot("") | {"tool_calls": [{"function": function}]},)


def stops_of(folder, **options):
    """What a fingerprint says of the stops of a folder's tokenizer."""
    return Stops.of(tokenizer_fingerprint(load_tokenizer(folder, TokenOptions(**options))))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_ends_with_the_stop_that_its_template_writes_and_text_with_the_eos(
    families, family
):
    folder, (turn, tool_calls, source, yes) = families[family], STOPS[family]
    (_, *completions), notes = texts_of(folder, said("yes", "a\nno"))
    assert completions == [yes, yes.replace("yes", "a\nno")]
    assert not notes["completions_that_end_with_another_special_token"]
    stops = stops_of(folder)
    assert (stops.turn.text, stops.tool_calls.text, stops.turn.source) == (turn, tool_calls, source)
    assert stops == load_tokenizer(folder, TokenOptions()).stops
    eos = FAMILIES[family]["eos"]
    plain = conversation(" yes", f" no{eos} ", prompt="Is it?")
    assert texts_of(folder, plain)[0][1:] == [f" yes{eos}", f" no{eos}"]
    if family in CALLS:
        arguments = '{"q": 1}' if family == "deepseek" else {"q": 1}
        (_, completion), notes = texts_of(folder, conversation(call(arguments)))
        assert completion == CALLS[family] + tool_calls
        assert not notes["completions_that_end_with_another_special_token"]


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
        for row in encode(families[family], record, max_length=length + room).rows:
            (ids,) = row.completions
            assert row.cut[0] > 0
            assert tokenizer.backend.id_to_token(ids[-1]) not in stops
            assert whole.startswith(tokenizer.hf.decode(ids))


def test_a_stop_that_only_some_turns_end_with_is_found_in_the_row_and_counted(tmp_path):
    odd = CHATML.replace("{% endfor %}<|im_end|>", "{% endfor %}{{ m.end or '<|im_end|>' }}")
    specials = [*CHATML_SPECIALS, "<|eom|>"]
    folder = byte_tokenizer(tmp_path, specials, template=odd, eos="<|endoftext|>")
    (_, text), notes = texts_of(folder, conversation((bot("yes") | {"end": "<|eom|>"},)))
    assert text == "yes<|eom|>"
    assert notes["completions_that_end_with_another_special_token"] == 1


def test_nothing_is_added_or_taken_when_no_stop_is_wanted(families):
    (_, text), _ = texts_of(families["qwen base"], said("yes"), eos="never")
    assert text == "yes<|im_end|>\n"
    record = conversation(" yes", prompt="Is it?")
    assert texts_of(families["qwen base"], record, eos="never")[0][1] == " yes"
    assert stops_of(families["gemma"], eos="never") == Stops(None, None, None)


def test_a_template_that_refuses_every_probe_leaves_the_eos(tmp_path):
    picky = "{{ raise_exception('no') if messages[0].content == 'question' }}" + PLAIN
    folder = byte_tokenizer(tmp_path, ["</s>"], template=picky, eos="</s>")
    assert texts_of(folder, said("yes"))[0][1] == "yes\n</s>"


@pytest.mark.parametrize("family", ["gemma", "deepseek"])
def test_a_bos_that_the_template_writes_survives_the_cutting_of_its_prompt(families, family):
    """Gemma's tokenizer adds one as well, the other's does not."""
    bos = FAMILIES[family]["bos"]
    (whole, _), _ = texts_of(families[family], said("yes"))
    assert whole.startswith(bos)
    assert whole.count(bos) == 1
    (cut, _), notes = texts_of(families[family], said("yes"), max_prompt_length=4)
    tokenizer = load_tokenizer(families[family], TokenOptions())
    ids = tokenizer.backend.encode(whole, add_special_tokens=False).ids
    assert cut == tokenizer.hf.decode([ids[0], *ids[-3:]])
    assert notes["rows_with_prompt_truncated"] == 1
