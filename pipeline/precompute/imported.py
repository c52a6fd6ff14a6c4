"""`align import-ref`: log-probs that another program wrote, as the known scores of a new cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.cache import IMPORTED
from ...schemas.columns import offsets_of
from ...schemas.errors import BadDataError, CorruptionError, FingerprintError, UsageError
from ...schemas.json_codec import digest
from ...schemas.row_table import Rows
from ...schemas.rows import Reference, Role
from ...stages.data.encode import Encoder
from ...stages.data.files import digested, open_inputs, rows_of
from ...stages.data.row_keys import EncodedRow, key_rows
from ...stages.data.text_rows import read_text_rows
from ...stages.score.reuse import completion_key, completion_keys
from ...stages.score.score import KnownScores
from ...stages.tracking.progress import Progress
from .opening import CacheJob
from .verify import score_again

# Log-probs as TRL, open-instruct and Megatron-Bridge name them; TRL's ids, and roles.
LOGPS = re.compile("(?:ref_)?(.*)_(?:logps|logprob_sum)")
COLUMNS = {
    "chosen": ("chosen_ids", (Role.CHOSEN,)),
    "rejected": ("rejected_ids", (Role.REJECTED,)),
    "ref": ("completion_ids", (Role.DESIRABLE, Role.UNDESIRABLE)),
    "KL": ("KL_completion_ids", ()),
}
# Megatron-Bridge numbers its rows, and scores one token for each side of a row that it cannot use.
NUMBER, COUNTS = "pair_id", ("ref_chosen_num_tokens", "ref_rejected_num_tokens")


class ImportedReference:
    """A reference, and a table with its log-probs of some completions.

    They are found by token ids if the table has any, else by the row's number in the data file.
    """

    def __init__(self, reference: Reference, table: str, max_length: int) -> None:
        self.open, self.hidden_size = reference.open, reference.hidden_size
        self._reference, self._table, inputs = reference, table, open_inputs([table])
        self._digest = digest([digested(file).sha256 for file in inputs])
        names, named = {*inputs[0].columns}, map(LOGPS.fullmatch, inputs[0].columns)
        found = {one[0]: COLUMNS[one[1]] for one in named if one and one[1] in COLUMNS}
        if not found:
            raise UsageError(f"{table} has no log-probs, such as ref_chosen_logps or ref_logps.")
        self._has_ids, self._logps = "prompt_ids" in names, dict[Any, Any]()
        self._num_rows = 0  # if they are not numbered
        wanted = [*found, *(ids for ids, _ in found.values()), "prompt_ids", NUMBER, *COUNTS]
        rows: Iterator[Any] = (row for file in inputs for row in rows_of(file, wanted))
        try:
            for index, row in enumerate(rows):
                number, self._num_rows = (row[NUMBER], 0) if NUMBER in names else (index, index + 1)
                is_unused = {row.get(name) for name in COUNTS} == {1}
                for name, (ids, roles) in found.items():
                    if self._has_ids:
                        # TRL's collator cuts what it feeds to the model; its data have all ids.
                        prompt = np.array(row["prompt_ids"], np.int32)
                        fed = np.array(row[ids], np.int32)[: max(0, max_length - len(prompt))]
                        self._logps[completion_key(prompt.tobytes(), fed.tobytes())] = row[name]
                    elif not is_unused:
                        self._logps |= {(number, role): row[name] for role in roles}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadDataError(f"{table}: {error!r:.200} in a row. Write it again.") from error

    def find(self, rows: Rows, **_: str) -> KnownScores:
        """The log-probs that the table has of these rows' completions."""
        numbers = rows.row[rows.row_of_completion].tolist()
        by_row: Iterator[Any] = zip(numbers, rows.roles.tolist(), strict=True)
        keys = completion_keys(rows) if self._has_ids else by_row
        logps = np.array([self._logps.get(key) for key in keys], np.float64)  # None becomes NaN
        found = np.isfinite(logps)
        return KnownScores(found, None, np.where(found, logps, 0.0), {})

    def identity(self) -> Mapping[str, str]:
        """The reference's, and the table's digest: no other cache copies these log-probs."""
        return {**self._reference.identity(), IMPORTED: self._digest}

    def require_reproduced(self, job: CacheJob, count: int, progress: Progress) -> None:
        """Refuses a table if the reference does not reproduce its log-probs of a sample.

        Half of the sample are the longest rows, where truncation shows first.
        """
        sizes = np.array([len(repr(row)) for row in read_text_rows(job.inputs, job.shape)])
        if not self._has_ids and (len(job.inputs) > 1 or self._num_rows not in (0, len(sizes))):
            raise UsageError(
                f"{self._table} has no token ids, so it needs one data file with as many rows: it "
                f"has {self._num_rows:,}, and the data {len(sizes):,}."
            )
        longest = np.argsort(-sizes, kind="stable")[: count // 2]
        picked = {*longest.tolist(), *(np.arange(count) * len(sizes) // count).tolist()}
        read = enumerate(read_text_rows(job.inputs, job.shape))
        encoder = Encoder(job.tokenizer, job.config.tokens)
        encoded = encoder.encode(row for index, row in read if index in picked)
        rows = key_rows([one for one in encoded if isinstance(one, EncodedRow)], carried=())
        known = self.find(rows)
        at = np.flatnonzero(known.found)
        if not len(at):
            raise FingerprintError(
                f"{self._table} has none of {len(rows)} sampled rows. Compare its token ids with "
                "`align check DATA --model DIR`: template, BOS, stop token (tokens.eos), length."
            )
        own = offsets_of(np.bincount(rows.row_of_completion[at], minlength=len(rows)))
        rows = rows.with_columns(ref_logp=known.logps).gather(np.arange(len(rows)), at, own)
        dtype, sample = job.fingerprint["model.dtype"], [(self._table, rows)]
        try:
            worst, num = score_again(sample, self.open(), dtype)
        except CorruptionError as error:
            raise FingerprintError(
                f"{error} Usual causes: a mean over tokens, where losses need the sum; bfloat16 "
                "(pass --dtype bfloat16); rows in another order; another template or stop token; "
                "truncation (--max-length); other weights."
            ) from error
        progress.log(f"{self._table}: {num} scored again: largest difference {worst:.2e} nats")
