"""The traps that concern tokens, each against an obvious oracle."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from align.schemas.config import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Record, Role
from align.stages.data.encode import Encoder, cut_completion
from align.stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["hello world, how are you today?", "the answer is forty two", "no-one knows it"]


def save_tokenizer(folder, *, template=CHATML, bos="<s>", eos="<|im_end|>", adds_bos=True):
    """A byte-level BPE without any rule of its own but the one BOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(WORDS * 50, trainer)
    if adds_bos:
        bpe.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=specials,
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tok"))


def text(prompt="hello world,", chosen=" how are you", rejected=" no-one knows", **more):
    return Record(
        file=0,
        row=0,
        prompt=prompt,
        completions=(chosen, rejected),
        roles=(Role.CHOSEN, Role.REJECTED),
        scores=(None, None),
        **more,
    )


def chat(*completions, prompt=({"role": "user", "content": "hello world,"},), **more):
    turns = tuple(({"role": "assistant", "content": c},) for c in completions)
    return replace(text(), prompt=prompt, completions=turns, **more)


def encode(folder, *records, **options):
    chosen = TokenOptions(**options)
    tokenizer = load_tokenizer(folder, chosen)
    return Encoder(tokenizer, chosen).encode(records), tokenizer


def only(folder, record, **options):
    result, tokenizer = encode(folder, record, **options)
    assert not result.rejected, result.rejected
    return result.rows[0], tokenizer, result.notes


def test_prompt_and_completion_ids_are_the_tokens_of_the_full_text(saved_tokenizer):
    row, tokenizer, _ = only(saved_tokenizer, text())
    for completion, words in zip(row.completions, (" how are you", " no-one knows"), strict=True):
        whole = tokenizer.backend.encode("hello world," + words, add_special_tokens=False).ids
        assert row.prompt[1:] + completion[:-1] == whole


def test_there_is_one_bos_and_it_is_first(saved_tokenizer):
    for record in (text(), text(prompt="<s>hello world,"), chat("how are you", "no-one")):
        row, tokenizer, _ = only(saved_tokenizer, record)
        bos = tokenizer.hf.bos_token_id
        assert row.prompt[0] == bos
        assert [*row.prompt, *row.completions[0]].count(bos) == 1


def test_bos_follows_the_tokenizers_own_rule_unless_set(saved_tokenizer, tmp_path):
    shy = save_tokenizer(tmp_path, adds_bos=False)
    bos = load_tokenizer(shy, TokenOptions()).hf.bos_token_id
    assert only(shy, text())[0].prompt[0] != bos
    assert only(shy, text(), bos="always")[0].prompt[0] == bos
    assert only(saved_tokenizer, text(), bos="never")[0].prompt[0] != bos


@pytest.mark.parametrize(
    "completion", [" how are you", " how are you<|im_end|>", " how are you<|im_end|><|im_end|>"]
)
def test_eos_ends_a_completion_exactly_once(saved_tokenizer, completion):
    row, tokenizer, _ = only(saved_tokenizer, text(chosen=completion))
    eos = tokenizer.hf.eos_token_id
    assert row.completions[0][-1] == eos
    assert row.completions[0].count(eos) == 1


def test_what_a_template_writes_after_eos_is_dropped(saved_tokenizer):
    row, tokenizer, _ = only(saved_tokenizer, chat("how are you", "no-one"))
    assert row.completions[0][-1] == tokenizer.hf.eos_token_id
    assert row.completions[0].count(tokenizer.hf.eos_token_id) == 1
    assert tokenizer.backend.decode(row.completions[0][:-1]) == "how are you"


def test_eos_is_left_alone_when_asked(saved_tokenizer):
    row, tokenizer, _ = only(saved_tokenizer, text(), eos="never")
    assert tokenizer.hf.eos_token_id not in row.completions[0]


def test_a_truncated_completion_does_not_end_with_eos(saved_tokenizer):
    full, tokenizer, _ = only(saved_tokenizer, text())
    limit = len(full.prompt) + len(full.completions[0]) - 1  # room for all but EOS
    row, _, notes = only(saved_tokenizer, text(), max_length=limit)
    assert row.completions[0] == full.completions[0][:-1]
    assert tokenizer.hf.eos_token_id not in row.completions[0]
    assert row.cut[0] == 1
    assert notes["rows_with_completion_truncated"] == 1


def test_a_cut_that_falls_behind_an_inner_eos_takes_it_away_too():
    assert cut_completion([5, 9, 9, 7], 3, {9}) == [5]
    assert cut_completion([5, 9, 7, 7], 3, {9}) == [5, 9, 7]
    assert cut_completion([5, 9], 2, {9}) == [5, 9]


def test_a_long_prompt_loses_its_beginning_but_never_its_bos(saved_tokenizer):
    full, tokenizer, _ = only(saved_tokenizer, text())
    row, _, notes = only(saved_tokenizer, text(), max_prompt_length=3)
    assert row.prompt == [tokenizer.hf.bos_token_id, *full.prompt[-2:]]
    assert row.prompt_cut == len(full.prompt) - 3
    assert notes["rows_with_prompt_truncated"] == 1
    right, _, _ = only(saved_tokenizer, text(), max_prompt_length=3, prompt_side="right")
    assert right.prompt == full.prompt[:3]


def test_a_prompt_that_leaves_no_room_is_rejected_not_emptied(saved_tokenizer):
    full, _, _ = only(saved_tokenizer, text())
    result, _ = encode(saved_tokenizer, text(), max_length=len(full.prompt))
    assert [bad.reason for bad in result.rejected] == ["too_long"]
    assert not result.rows


def test_a_token_across_the_boundary_goes_to_the_completion_and_is_counted(saved_tokenizer):
    # " world" is one token, and the boundary falls inside it.
    record = text(prompt="hello wor", chosen="ld, how are you", rejected="k is the answer")
    row, tokenizer, notes = only(saved_tokenizer, record)
    assert notes["rows_with_a_token_across_the_boundary"] == 1
    prompt_text = tokenizer.backend.decode(row.prompt[1:])
    assert "hello wor".startswith(prompt_text)
    for completion, words in zip(row.completions, record.completions, strict=True):
        whole = tokenizer.backend.decode([*row.prompt[1:], *completion[:-1]])
        assert whole == "hello wor" + words


def test_strict_boundaries_quarantine_such_a_row(saved_tokenizer):
    record = text(prompt="hello wor", chosen="ld, how are you", rejected="k is the answer")
    result, _ = encode(saved_tokenizer, record, boundary="strict")
    assert [bad.reason for bad in result.rejected] == ["boundary"]


def test_a_clean_boundary_is_not_reported(saved_tokenizer):
    assert "rows_with_a_token_across_the_boundary" not in only(saved_tokenizer, text())[2]


def test_a_character_of_several_tokens_belongs_to_one_side(saved_tokenizer):
    row, tokenizer, notes = only(
        saved_tokenizer, text(prompt="hello", chosen="😀 you", rejected=" no")
    )
    assert tokenizer.backend.decode(row.prompt[1:]) == "hello"
    assert tokenizer.backend.decode(row.completions[0][:-1]) == "😀 you"
    assert "rows_with_a_token_across_the_boundary" not in notes


def test_a_template_that_rewrites_the_prompt_is_counted(tmp_path):
    thinking = CHATML.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"
    )
    folder = save_tokenizer(tmp_path, template=thinking)
    row, tokenizer, notes = only(folder, chat("how are you", "no-one"))
    assert notes["rows_whose_template_changes_the_prompt"] == 1
    assert tokenizer.backend.decode(row.completions[0][:-1]) == "how are you"


def test_a_template_that_fails_rejects_the_row_and_no_other(tmp_path):
    picky = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    folder = save_tokenizer(tmp_path, template=picky)
    bad = chat("a", "b", prompt=({"role": "user", "content": "bad"},))
    result, _ = encode(folder, bad, chat("a", "b"))
    assert [row.reason for row in result.rejected] == ["template_error"]
    assert len(result.rows) == 1


def test_a_template_that_asks_for_the_date_is_given_the_one_in_the_settings(tmp_path):
    dated = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}" + CHATML.replace("{{ bos_token }}", "")
    folder = save_tokenizer(tmp_path, template=dated)
    with pytest.raises(UsageError, match="asks what day it is"):
        load_tokenizer(folder, TokenOptions()).require_template(folder)
    row, tokenizer, _ = only(folder, chat("a", "b"), date="2026-02-03")
    assert "03 Feb 2026" in tokenizer.backend.decode(row.prompt)
    with pytest.raises(UsageError, match="expected YYYY-MM-DD"):
        load_tokenizer(folder, TokenOptions(date="tomorrow"))


def test_a_pair_of_equal_completions_is_kept_and_counted(saved_tokenizer):
    assert (
        only(saved_tokenizer, text(rejected=" how are you"))[2]["pairs_with_equal_completions"] == 1
    )
    assert only(saved_tokenizer, text())[2]["pairs_with_equal_completions"] == 0


def test_a_role_that_the_template_does_not_name_is_refused(saved_tokenizer, tmp_path):
    record = chat("a", "b", prompt=({"role": "chatbot", "content": "hello"},))
    result, _ = encode(saved_tokenizer, record)
    (bad,) = result.rejected
    assert (bad.reason, "know the role 'chatbot'" in bad.detail) == ("schema", True)
    named = CHATML.replace("{{ m.role }}", "{{ 'user' if m.role == 'chatbot' else m.role }}")
    assert len(encode(save_tokenizer(tmp_path, template=named), record)[0].rows) == 1


def test_completions_that_repeat_a_prompt_of_text_are_counted(saved_tokenizer):
    record = text(chosen="hello world, how are you", rejected="\nhello world, no")
    assert only(saved_tokenizer, record)[2]["completions_that_repeat_their_prompt"] == 2
    assert not only(saved_tokenizer, text())[2]["completions_that_repeat_their_prompt"]


def test_special_tokens_in_the_data_are_counted(saved_tokenizer):
    assert (
        only(saved_tokenizer, text(chosen=" how<|im_start|>"))[2][
            "rows_with_special_tokens_in_text"
        ]
        == 1
    )
    assert "rows_with_special_tokens_in_text" not in only(saved_tokenizer, text())[2]


def test_every_option_and_the_template_show_in_the_fingerprint(saved_tokenizer, tmp_path):
    base = tokenizer_fingerprint(load_tokenizer(saved_tokenizer, TokenOptions()))
    other = tmp_path / "t.jinja"
    other.write_text(CHATML + " ")
    changed = tokenizer_fingerprint(
        load_tokenizer(saved_tokenizer, TokenOptions(chat_template=str(other)))
    )
    differing = {name for name in base if base[name] != changed[name]}
    assert differing == {"tokenizer.chat_template"}


def test_conversations_need_a_template(tmp_path):
    folder = save_tokenizer(tmp_path, template=None)
    with pytest.raises(UsageError, match="no chat template"):
        load_tokenizer(folder, TokenOptions()).require_template(folder)


def test_a_folder_without_a_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match="no such model folder"):
        load_tokenizer(str(tmp_path / "none"), TokenOptions())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no tokenizer can be loaded"):
        load_tokenizer(str(tmp_path / "empty"), TokenOptions())


def test_pairs_against_their_scores_are_counted(saved_tokenizer):
    scores = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (None, None), (-2.0, -1.0)]
    records = [replace(text(), scores=pair) for pair in scores]
    candidates = replace(text(), scores=(1.0, 2.0), roles=(Role.CANDIDATE,) * 2)
    encoder = Encoder(load_tokenizer(saved_tokenizer, TokenOptions()), TokenOptions())
    notes = encoder.encode([*records, candidates]).notes
    assert notes["pairs_whose_rejected_score_is_higher"] == 2
