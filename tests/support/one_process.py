"""What preparing has to end in, worked out in one process and in memory."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from align.schemas.row_table import Rows
from align.stages.data.encode import Encoder, InputCounts
from align.stages.data.records import records_in
from align.stages.data.row_keys import key_rows
from align.stages.pairing.long_form import merge_same_prompts
from align.stages.storage.cache_work import printable
from support.encoded_rows import plain
from support.read_rows import parted


@dataclass(frozen=True)
class Prepared:
    """Everything that preparing decides."""

    rows: list  # in key order
    places: list  # of the rows before those of one prompt are joined
    can_be_paired: bool
    rejected: list
    rows_per_file: dict
    reasons: dict


def prepared_at_once(job):
    """Reads all rows and sorts them with Python's sort."""
    config, intake, parts = job.config, InputCounts(), []
    encoder = Encoder(job.tokenizer, config.tokens)
    for number, file in enumerate(job.inputs):
        found = encoder.encode(records_in(file, job.shape, job.files[number]))
        rows, rejected = parted(found)
        parts.append(key_rows(rows, carried=job.shape.carried))
        intake.rows_per_file[number] += len(rows) + len(rejected)
        intake.rejected += rejected
    keyed = _sorted(Rows.concat(parts))
    prompts = Counter(keyed.range_keys[keyed.row_of_branch].tolist())
    can_be_paired = 2 * max(prompts.values(), default=0) <= prompts.total()
    can_be_paired &= len({*keyed.completion_key.tolist()}) > 1
    places = keyed.range_keys.tolist()
    if job.shape.name == "scored_long":
        side = config.tokens.prompt_side
        keyed = merge_same_prompts(keyed, intake.notes, prompt_side=side)
    rejected = [
        replace(one, detail=printable(one.detail))
        for one in sorted(intake.rejected, key=lambda one: (job.files.index(one.file), one.row))
    ]
    reasons = Counter(one.reason for one in rejected)
    rows = _copies(plain(keyed))
    per_file = dict(intake.rows_per_file)
    return Prepared(rows, places, can_be_paired, rejected, per_file, dict(reasons))


def _sorted(rows):
    """By place, by digest, and of equal rows by file and number."""
    ids, places = rows.ids(), rows.range_keys.tolist()

    def key(at):
        return places[at], ids[at], int(rows.file[at]), int(rows.row[at])

    order = sorted(range(len(places)), key=key)
    return rows.take(np.array(order, dtype=np.int64))


def _copies(rows):
    seen, numbered = Counter(), []
    for row in rows:
        numbered.append(row._replace(copy=seen[row.row_id]))
        seen[row.row_id] += 1
    return numbered
