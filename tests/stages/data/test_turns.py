"""Where a completion begins and ends, with templates in the style of families people train.

A token is a byte or a special token, so that ids are compared as the text they stand for.
"""

import pytest

from align.schemas.cache import Stops
from align.schemas.config import TokenOptions
from align.stages.data.tokenizer import decoder, load_tokenizer, tokenizer_fingerprint
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, FAMILIES, byte_tokenizer
from support.encoded_texts import USER, conversation, encode, encode_one, refusal_of, texts_of
from support.read_rows import bot, user

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
    ids, eos = encode_one(folder, said("yes"))[0].completions[0], FAMILIES[family]["eos"]
    assert decoder(folder, stops.tokens)(ids, True) == yes.removesuffix(turn)
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
    "gemma": (
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nSure,",
        "<end_of_turn>",
    ),
    "glm 4": ("[gMASK]<sop><|user|>\nhi<|assistant|>\nSure,", "<|user|>"),
    "gpt-oss": (
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>Sure,",
        "<|return|>",
    ),
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
    bad = refusal_of(families["qwen base"], both)
    assert (bad.reason, "others answer it" in bad.detail) == ("schema", True)


def test_a_prefill_that_the_template_does_not_show_is_refused_and_not_mangled(tmp_path, families):
    hidden = CHATML.replace("{{ m.content }}", "{{ m.content.split('#')[-1] }}")
    folder = byte_tokenizer(tmp_path, CHATML_SPECIALS, template=hidden, eos="<|endoftext|>")
    assert refusal_of(folder, prefilled("Sure,", " here # there")).reason == "template_error"
    assert opened_texts(folder, prefilled("Sure,", " here"))[1] == " here<|im_end|>"
    # This template takes reasoning for such only once it has ended, and never in earlier turns.
    ended = prefilled("<think>\nLet me", " see\n</think>\n\n42")
    for item in (ended, prefilled("Sure,", (bot(" here"), *ASKED))):
        assert refusal_of(families["thinking"], item).reason == "template_error"
