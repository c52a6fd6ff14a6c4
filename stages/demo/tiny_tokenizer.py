"""Trains a small byte-level BPE tokenizer with a chat template on generated text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .preferences import draw_preferences, transcript

BOS, EOS, PAD, TURN = "<|bos|>", "<|im_end|>", "<|pad|>", "<|im_start|>"

# The newline stands between turns, so a conversation ends with EOS and not with a newline.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set has_system = messages and messages[0]['role'] == 'system' %}
{%- set turns = messages[1:] if has_system else messages %}
{%- if has_system or tools %}
{{- '<|im_start|>system\\n' }}
{%- if has_system %}{{ messages[0]['content'] }}{% endif %}
{%- if tools %}
{{- '\\n\\n' if has_system else '' }}{{ 'You can use these tools:' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{%- endif %}
{{- '<|im_end|>' }}
{%- endif %}
{%- for message in turns %}
{{- '\\n' if has_system or tools or not loop.first else '' }}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"""

_VOCAB_SIZE = 1024
_TRAINING_ROWS = 1500
_TRAINING_SEED = 7_001


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Trains the tokenizer and saves it in a folder that `AutoTokenizer` loads."""
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_train(), bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD, TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def _texts() -> Iterator[str]:
    for preference in draw_preferences(_TRAINING_ROWS, seed=_TRAINING_SEED):
        yield transcript(preference.prompt)
        for answer in preference.answers:
            yield f" {answer.text}"
