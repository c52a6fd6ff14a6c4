"""What ends a completion, with templates in the style of the families people train.

A token is a byte or a special token, so that ids are compared as the text they stand for.
"""

import pytest

from align.schemas.cache import Stops
from align.schemas.config import TokenOptions
from align.schemas.rows import Record, Role
from align.stages.data.encode import Encoder
from align.stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, FAMILIES, PLAIN, byte_tokenizer

# What ends a turn of text, a turn that calls tools, and who writes it.
STOPS = {
    "qwen base": ("<|im_end|>", "<|im_end|>", "template"),
    "gemma": ("<end_of_turn>", "<end_of_turn>", "template"),
    "glm 4": ("<|user|>", "<|observation|>", "template"),
    "gpt-oss": ("<|return|>", "<|call|>", "template"),
    "llama 3": ("<|eot_id|>", "<|eot_id|>", "template"),
    "phi 3": ("<|end|>", "<|end|>", "template"),
    "deepseek": ("<|eos|>", "<|eos|>", "template"),
    "llama 2 without an end": ("</s>", "</s>", "tokenizer"),
    "words only": ("</s>", "</s>", "tokenizer"),
}
# What "yes" becomes behind the prompt that the template opens the turn with.
COMPLETIONS = {
    "qwen base": "yes<|im_end|>",
    "gemma": "yes<end_of_turn>",
    "glm 4": "\nyes<|user|>",
    "gpt-oss": "<|channel|>final<|message|>yes<|return|>",
    "llama 3": "yes<|eot_id|>",
    "phi 3": "yes<|end|>",
    "deepseek": "yes<|eos|>",
    "llama 2 without an end": " yes</s>",
    "words only": "yes\n</s>",
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


def chat(*completions, prompt=({"role": "user", "content": "hi"},)):
    roles = (Role.CANDIDATE,) * len(completions)
    return Record(0, 0, prompt, completions, roles, (None,) * len(completions))


def say(text):
    return ({"role": "assistant", "content": text},)


def call(arguments):
    function = {"name": "search", "arguments": arguments}
    return ({"role": "assistant", "content": "", "tool_calls": [{"function": function}]},)


def encode(folder, record, **options):
    """The prompt and its completions as the texts of their tokens."""
    rules = TokenOptions(**options)
    tokenizer = load_tokenizer(folder, rules)
    result = Encoder(tokenizer, rules).encode([record])
    assert not result.rejected, result.rejected
    (row,) = result.rows
    return [tokenizer.hf.decode(ids) for ids in (row.prompt, *row.completions)], result.notes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_ends_with_the_stop_that_its_template_writes(families, family):
    (_, *completions), notes = encode(families[family], chat(say("yes"), say("a\nno")))
    assert completions == [
        COMPLETIONS[family],
        COMPLETIONS[family].replace("yes", "a\nno"),
    ]
    assert not notes["completions_that_end_with_another_special_token"]
    stops = Stops.of(tokenizer_fingerprint(load_tokenizer(families[family], TokenOptions())))
    assert (stops.turn.text, stops.tool_calls.text, stops.turn.source) == STOPS[family]


@pytest.mark.parametrize("family", CALLS)
def test_a_completion_that_calls_tools_ends_with_the_stop_of_such_turns(families, family):
    arguments = '{"q": 1}' if family == "deepseek" else {"q": 1}
    (_, completion), notes = encode(families[family], chat(call(arguments)))
    assert completion == CALLS[family] + STOPS[family][1]
    assert not notes["completions_that_end_with_another_special_token"]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_ends_with_the_tokenizers_eos_under_any_template(families, family):
    record = chat(" yes", f" no{FAMILIES[family]['eos']} ", prompt="Is it?")
    (_, *completions), _ = encode(families[family], record)
    assert completions == [f" {said}{FAMILIES[family]['eos']}" for said in ("yes", "no")]


@pytest.mark.parametrize("written", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>"])
def test_a_stop_that_the_data_already_hold_is_not_learned_twice(families, written):
    (_, completion), _ = encode(families["qwen base"], chat(say(f"yes{written}")))
    assert completion == "yes<|im_end|>"
    (_, completion), _ = encode(families["glm 4"], chat(say("yes<|endoftext|>")))
    assert completion == "\nyes<|user|>"


@pytest.mark.parametrize("family", ["qwen base", "gpt-oss", "glm 4", "gemma"])
def test_a_completion_that_was_cut_ends_with_no_stop_of_any_kind(families, family):
    stops = {*STOPS[family][:2], FAMILIES[family]["eos"]}
    turns = (*say("yes"), {"role": "user", "content": "why"}, *say("so"))
    if family in CALLS:
        turns = (*call({"q": 1}), {"role": "tool", "content": "one"}, *say("so"))
    (prompt, whole), _ = encode(families[family], chat(turns))
    rules = TokenOptions()
    tokenizer = load_tokenizer(families[family], rules)
    length = len(tokenizer.backend.encode(prompt, add_special_tokens=False))
    for room in range(1, len(tokenizer.backend.encode(whole, add_special_tokens=False))):
        rules = TokenOptions(max_length=length + room)
        result = Encoder(tokenizer, rules).encode([chat(turns)])
        for row in result.rows:
            (ids,) = row.completions
            assert row.cut[0] > 0
            assert tokenizer.backend.id_to_token(ids[-1]) not in stops
            assert whole.startswith(tokenizer.hf.decode(ids))


def test_a_stop_that_only_some_turns_end_with_is_found_in_the_row_and_counted(tmp_path):
    odd = CHATML.replace("{% endfor %}<|im_end|>", "{% endfor %}{{ m.end or '<|im_end|>' }}")
    folder = byte_tokenizer(
        tmp_path, [*CHATML_SPECIALS, "<|eom|>"], template=odd, eos="<|endoftext|>"
    )
    completion = ({"role": "assistant", "content": "yes", "end": "<|eom|>"},)
    (_, text), notes = encode(folder, chat(completion))
    assert text == "yes<|eom|>"
    assert notes["completions_that_end_with_another_special_token"] == 1


def test_a_template_that_refuses_every_probe_leaves_the_eos(tmp_path):
    picky = "{{ raise_exception('no') if messages[0].content == 'question' }}" + PLAIN
    folder = byte_tokenizer(tmp_path, ["</s>"], template=picky, eos="</s>")
    (_, text), _ = encode(folder, chat(say("yes")))
    assert text == "yes\n</s>"


def test_nothing_is_added_or_taken_when_no_stop_is_wanted(families):
    (_, text), _ = encode(families["qwen base"], chat(say("yes")), eos="never")
    assert text == "yes<|im_end|>\n"
    fields = tokenizer_fingerprint(load_tokenizer(families["gemma"], TokenOptions(eos="never")))
    assert Stops.of(fields) == Stops(None, None, None)


def test_stops_are_read_back_from_a_fingerprint_as_they_were(families):
    for folder in families.values():
        tokenizer = load_tokenizer(folder, TokenOptions())
        assert Stops.of(tokenizer_fingerprint(tokenizer)) == tokenizer.stops


@pytest.mark.parametrize("family", ["gemma", "llama 3", "deepseek"])
def test_a_bos_that_the_template_writes_survives_the_cutting_of_its_prompt(families, family):
    """Gemma's tokenizer adds one as well, the others' do not."""
    bos = FAMILIES[family]["bos"]
    (whole, _), _ = encode(families[family], chat(say("yes")))
    assert whole.startswith(bos)
    assert whole.count(bos) == 1
    (cut, _), notes = encode(families[family], chat(say("yes")), max_prompt_length=4)
    tokenizer = load_tokenizer(families[family], TokenOptions())
    ids = tokenizer.backend.encode(whole, add_special_tokens=False).ids
    assert cut == tokenizer.hf.decode([ids[0], *ids[-3:]])
    assert notes["rows_with_prompt_truncated"] == 1
