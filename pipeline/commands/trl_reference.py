"""Caches as the reference of TRL's DPOTrainer and KTOTrainer: `align.trl.CachedReference`.

With `precompute_ref_log_probs`, TRL neither loads a reference nor runs one in its steps: before
training it adds the log-probs to its tokenized data. That one method is replaced here, by a lookup
of the token ids that TRL's collator feeds. TRL itself is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from ...schemas.errors import UsageError, logger
from ...schemas.row_table import digest_of
from ...stages.data.encode import common_length
from ...stages.report.export_trl import scan_trl
from ..jobs.object_inputs import cache_at
from .python_api import AnyPath

# A completion's columns in the table of a cache; the last ones are the names that KTOTrainer has.
SIDES = (
    ("chosen_ids", "ref_chosen_logps", "KL_chosen_ids", "ref_chosen_KL_logps"),
    ("rejected_ids", "ref_rejected_logps", "KL_rejected_ids", "ref_rejected_KL_logps"),
    ("completion_ids", "ref_logps", "KL_completion_ids", "ref_KL_logps"),
)
PRECOMPUTES = "_precompute_ref_logps"  # TRL's method: a tokenized data set, its name, a batch size
SHOWN = 8  # ids in a message


class CachedReference:
    """The reference's log-probs of all completions of one or more caches, found by token ids.

    >>> reference = align.trl.CachedReference("align-cache")
    >>> args = DPOConfig(precompute_ref_log_probs=True)
    >>> trainer = reference.trainer(DPOTrainer, model="sft", args=args, train_dataset=pairs)
    """

    def __init__(self, *caches: AnyPath) -> None:
        self.caches = ", ".join(map(str, caches))
        self._table = pl.concat(map(_completions_of, caches), how="diagonal")
        ids = self._table.select("prompt_ids", "completion_ids").iter_rows()
        self._index = {_digest(*one): index for index, one in enumerate(ids)}

    def trainer(self, kind: type[Any], **settings: Any) -> Any:
        """A trainer of TRL with these arguments, whose reference is this one."""
        args = settings.get("args")
        refused = {
            "args without precompute_ref_log_probs=True": (
                not getattr(args, "precompute_ref_log_probs", False)
            ),
            "ref_model": settings.get("ref_model") is not None,
            "ld_alpha, which weighs single tokens": getattr(args, "ld_alpha", None) is not None,
            f"{kind.__name__}, which is not TRL 1.16's": not hasattr(kind, PRECOMPUTES),
        }
        for what, is_given in refused.items():
            if is_given:
                raise UsageError(f"CachedReference does not take {what}.")

        def precompute(trainer: Any, dataset: Any, name: str, _: int) -> Any:
            return self._with_logps(trainer, dataset, name)

        made = type(kind.__name__, (kind,), {PRECOMPUTES: precompute})(**settings)
        if getattr(made, "calculate_KL", False):
            logger.warning(
                "The KL completions of %s, chosen from all its data, replace TRL's.", self.caches
            )
        return made

    def _with_logps(self, trainer: Any, dataset: Any, name: str) -> Any:
        """The tokenized data set with the columns that TRL would have computed."""
        if not hasattr(dataset, "__len__"):
            raise UsageError(f"TRL's {name} dataset is iterable. Give one that is map-style.")
        found = [
            self._find(fed, f"Row {number} of TRL's {name} dataset")
            for number, row in enumerate(dataset)
            for fed in _fed(trainer.data_collator([row]))
        ]
        completions = self._table[found]
        logps = completions["ref_logps"].to_list()
        if "completion_ids" not in dataset.column_names:
            dataset = dataset.add_column("ref_chosen_logps", logps[::2])
            return dataset.add_column("ref_rejected_logps", logps[1::2])
        dataset = dataset.add_column("ref_logps", logps)
        if "KL_completion_ids" not in dataset.column_names:  # a loss without a KL term
            return dataset
        if "ref_KL_logps" not in completions.columns or completions["ref_KL_logps"].null_count():
            raise UsageError(f"{self.caches} has no KL completions. Make one with --kl-pairs 1.")
        lengths = pl.col("prompt_ids").list.len() + pl.col("KL_completion_ids").list.len()
        longest, limit = completions.select(lengths.max()).item(), trainer.args.max_length
        if limit is not None and longest > limit:
            raise UsageError(
                f"TRL's max_length of {limit} would cut KL completions of {self.caches}: with "
                f"their prompts they have up to {longest} tokens."
            )
        dataset = dataset.remove_columns("KL_completion_ids")
        for column in ("KL_completion_ids", "ref_KL_logps"):
            dataset = dataset.add_column(column, completions[column].to_list())
        return dataset

    def _find(self, fed: tuple[list[int], list[int]], where: str) -> int:
        """The row of the table with these ids; a miss shows the cached ids most like them."""
        index = self._index.get(_digest(*fed))
        if index is not None:
            return index
        wanted = {*fed[0], *fed[1]}
        ids = self._table.select("prompt_ids", "completion_ids").rows()
        shared = [len(wanted & {*one, *other}) / len(wanted | {*one, *other}) for one, other in ids]
        nearest = int(np.argmax(shared))
        prompt, completion = ids[nearest]
        ours, theirs = fed[0] + fed[1], prompt + completion
        first = common_length(ours, theirs)
        shown = slice(first, first + SHOWN)
        raise UsageError(
            f"{where} is not in {self.caches}. Most like it is row {self._table['row_id'][nearest]}"
            f": from token {first} on TRL has {ours[shown]} and the cache {theirs[shown]}, after "
            f"prompts of {len(fed[0])} and {len(prompt)} tokens. Tokenize alike (BOS, EOS, "
            "template, max_length), or make a cache of these data."
        )


def _completions_of(cache: AnyPath) -> pl.DataFrame:
    """A row per completion, with the columns of a labelled one."""
    rows = scan_trl(cache_at(str(cache)))
    names = rows.collect_schema().names()
    if "completions_cut" in names:
        raise UsageError(f"{cache} has groups of scored completions, and TRL takes none.")
    sides = []
    for side in SIDES:
        named = zip(SIDES[-1], side, strict=True)
        columns = {ours: theirs for ours, theirs in named if theirs in names}
        if "completion_ids" in columns:
            sides.append(rows.select("row_id", "prompt_ids", **columns))
    return pl.concat(sides).collect()


def _fed(batch: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and completion of each sequence of a batch, without padding."""
    names = ("input_ids", "attention_mask", "completion_mask")
    for ids, is_token, is_completion in zip(*(batch[name].tolist() for name in names), strict=True):
        length = sum(is_token)
        start = length - sum(is_completion)
        yield ids[:start], ids[start:length]


def _digest(prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    return digest_of(np.array([len(prompt), *prompt, *completion], np.int32).tobytes())
