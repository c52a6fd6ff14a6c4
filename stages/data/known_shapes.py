"""Every shape of rows that is known: a line each, from which all else is derived."""

from __future__ import annotations

from functools import partial

from . import public_rows as public
from .data_shape import DataShape
from .foreign_rows import read_alpaca_eval, read_ultrafeedback
from .preference_rows import read_labelled, read_pair, read_scored, read_single

_SAFE = ("prompt", "response_0", "response_1")
# A shape of others: by its columns, without a name for each of them.
_PAIR = ("prompt", "chosen", "rejected")
_pairs = partial(DataShape, has_labels=True, is_public=True, becomes=_PAIR)
_LABEL = ("prompt and completion", "label")
_labels = partial(DataShape, has_labels=True, is_single=True, is_public=True, becomes=_LABEL)
# Two answers, and what says which of them won.
_SIDES, _WON = ("chosen or rejected", "chosen or rejected"), "the winner"
_winner = partial(DataShape, has_labels=True, is_public=True, one_meaning=True)

DATA_SHAPES = (
    DataShape(
        "paired",
        ("chosen", "rejected"),
        read_pair,
        scores=("chosen_score", "rejected_score"),
        has_labels=True,
    ),
    DataShape(
        "unpaired",
        ("prompt", "completion", "label"),
        read_labelled,
        has_labels=True,
        is_single=True,
    ),
    DataShape("scored", ("prompt", "completions"), read_scored, scores=("scores",)),
    DataShape("scored_long", ("prompt", "completion", "score"), read_single, is_single=True),
    DataShape("UltraFeedback", ("instruction", "completions"), read_ultrafeedback, is_foreign=True),
    DataShape(
        "AlpacaEval",
        ("instruction", "output"),
        read_alpaca_eval,
        is_foreign=True,
        is_single=True,
        may_have=("input",),
    ),
    DataShape("Nectar", ("prompt", "answers"), public.read_nectar, is_foreign=True),
    _pairs(
        "UltraFeedback binarized",
        ("prompt", "messages", "chosen", "rejected"),
        public.read_binarized,
        becomes=("prompt", "chosen", "chosen", "rejected"),
        scores=("chosen_score", "rejected_score"),
    ),
    _pairs(
        "Orca",
        ("question", "chosen", "rejected", "system"),
        public.read_answered,
        becomes=(*_PAIR, "system"),
    ),
    _pairs(
        "Argilla",
        ("instruction", "chosen_response", "rejected_response"),
        public.read_answered,
        may_have=("input", "history"),
    ),
    _pairs("StackExchange", ("question", "response_j", "response_k"), public.read_answered),
    _pairs("UltraInteract", ("trajectory", "chosen", "rejected"), public.read_messages_pair),
    _labels("ShareGPT", ("conversations", "label"), public.read_messages_label),
    _pairs(
        "NeMo RL",
        ("context", "completions"),
        public.read_nemo,
        becomes=("prompt", "chosen and rejected"),
    ),
    _winner(
        "AlpacaFarm",
        ("instruction", "output_1", "output_2", "preference"),
        public.read_alpaca_farm,
        becomes=("prompt", *_SIDES, _WON),
        may_have=("input",),
    ),
    _pairs(
        "OpenAI",
        ("input", "preferred_output", "non_preferred_output"),
        public.read_openai,
        becomes=("prompt and tools", "chosen", "rejected"),
    ),
    _pairs("LLaMA-Factory", ("conversations", "chosen", "rejected"), public.read_messages_pair),
    _pairs("axolotl", ("messages", "chosen", "rejected"), public.read_messages_pair),
    _pairs(
        "ms-swift",
        ("messages", "rejected_response"),
        public.read_rejected_response,
        becomes=("prompt and chosen", "rejected"),
    ),
    _pairs(
        "ms-swift",
        ("messages", "rejected_messages"),
        public.read_rejected_messages,
        becomes=("prompt and chosen", "prompt and rejected"),
    ),
    _labels("ms-swift", ("messages", "label"), public.read_messages_label),
    _labels("LLaMA-Factory", ("messages", "kto_tag"), public.read_messages_label),
    _labels("LLaMA-Factory", ("conversations", "kto_tag"), public.read_messages_label),
    _pairs(
        "LLaMA-Factory",
        ("instruction", "input", "chosen", "rejected"),
        public.read_alpaca_pair,
        becomes=("prompt", *_PAIR),
        may_have=("history",),
        one_meaning=True,
    ),
    _pairs(
        "Orca",
        ("input", "chosen", "rejected", "system"),
        public.read_answered,
        becomes=(*_PAIR, "system"),
    ),
    _labels(
        "LLaMA-Factory",
        ("instruction", "output", "kto_tag"),
        public.read_alpaca_label,
        becomes=("prompt", "completion", "label"),
        may_have=("input", "history"),
    ),
    _winner(
        "SHP",
        ("history", "human_ref_A", "human_ref_B", "labels"),
        public.read_shp,
        becomes=("prompt", *_SIDES, _WON),
    ),
    _winner(
        "WebGPT",
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        public.read_webgpt,
        becomes=("prompt", *_SIDES, "the winner and scores", "the winner and scores"),
    ),
    _winner(
        "HelpSteer2",
        ("prompt", "response_1", "response_2", "preference_strength"),
        public.read_helpsteer,
        becomes=("prompt", *_SIDES, "the winner and margin"),
        gives=("margin",),
    ),
    _winner(
        "HelpSteer3",
        ("context", "response1", "response2", "overall_preference"),
        public.read_helpsteer,
        becomes=("prompt", *_SIDES, "the winner and margin"),
        gives=("margin",),
    ),
    _winner(
        "arena",
        ("conversation_a", "conversation_b", "winner"),
        public.read_arena,
        becomes=("prompt with chosen or rejected", "prompt with chosen or rejected", _WON),
    ),
    _winner(
        "arena",
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie"),
        public.read_arena_turns,
        becomes=("prompt", *_SIDES, _WON, _WON, _WON),
    ),
    _winner(
        "PKU-SafeRLHF",
        (*_SAFE, "better_response_id"),
        public.read_saferlhf,
        becomes=("prompt", *_SIDES, _WON),
    ),
    _winner(
        "PKU-SafeRLHF",
        (*_SAFE, "safer_response_id"),
        public.read_saferlhf,
        becomes=("prompt", *_SIDES, _WON),
    ),
    _winner(
        "PKU-SafeRLHF",
        (*_SAFE, "better_response_id", "safer_response_id"),
        public.read_saferlhf,
        refusal="Two columns name a winner: --map safer_response_id= leaves the better answer, "
        "--map better_response_id= the safer one.",
    ),
    DataShape(
        "HelpSteer",
        ("prompt", "response", "helpfulness"),
        read_single,
        is_public=True,
        refusal="Each answer has scores of its own: `align select` makes pairs of them with "
        "--map completion=response --map score=helpfulness, or with another of its scores.",
    ),
)
