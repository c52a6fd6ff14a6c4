"""What preparing has to end in, worked out in one process and in memory."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from align.schemas.row_keys import InputCounts, KeyedRows, key_rows
from align.stages.data.encode import Encoder
from align.stages.data.records import records_in
from align.stages.pairing.kl_partners import choose_partners
from align.stages.pairing.long_form import merge_same_prompts
from align.stages.storage.cache.commits import printable
from support.encoded_rows import plain
from support.read_rows import parted


@dataclass(frozen=True)
class Prepared:
    """Everything that preparing decides."""

    rows: list  # in ring order
    partners: list  # for each k
    offsets: tuple  # of the units
    rejected: list
    rows_per_file: dict
    reasons: dict


def prepared_at_once(job):
    """Reads all rows, sorts them with Python's sort, pairs them and cuts them into units."""
    config, intake, parts = job.config, InputCounts(), []
    encoder = Encoder(job.tokenizer, config.tokens)
    for number, file in enumerate(job.inputs):
        records, rejected = parted(records_in(file, job.shape, job.files[number]))
        encoded = encoder.encode(records)
        parts.append(key_rows(encoded.rows, seed=config.cache.seed, carried=job.shape.carried))
        intake.rows_per_file[number] += len(records) + len(rejected)
        intake.rejected += [*rejected, *encoded.rejected]
    keyed = _sorted(KeyedRows.concat(parts))
    if job.shape.kind == "scored_long":
        side = config.tokens.prompt_side
        keyed = merge_same_prompts(keyed, intake.notes, prompt_side=side)
    rows = _copies(plain(keyed))
    partners = _partners(keyed, config.cache.kl_pairs)
    rejected = [
        replace(one, detail=printable(one.detail))
        for one in sorted(intake.rejected, key=lambda one: (job.files.index(one.file), one.row))
    ]
    reasons = Counter(one.reason for one in rejected)
    offsets = _offsets(rows, config.cache)
    return Prepared(rows, partners, offsets, rejected, dict(intake.rows_per_file), dict(reasons))


def _sorted(keyed):
    """By place, by digest, and of equal rows as they came."""
    ids = keyed.rows.row_id.tobytes()
    places = keyed.ring_keys.tolist()
    order = sorted(range(len(places)), key=lambda at: (places[at], ids[16 * at : 16 * at + 16], at))
    return keyed.take(np.array(order, dtype=np.int64))


def _copies(rows):
    seen, numbered = Counter(), []
    for row in rows:
        numbered.append(row._replace(copy=seen[row.row_id]))
        seen[row.row_id] += 1
    return numbered


def _partners(keyed, pairs):
    prompts = np.repeat(keyed.ring_keys, np.diff(keyed.rows.branch_offsets))
    partners = [np.zeros(len(prompts), dtype=np.int64) for _ in range(pairs)]
    choose_partners(prompts, keyed.completion_keys, partners)
    return [each.tolist() for each in partners]


def _offsets(rows, cache):
    offsets, held = [0], 0
    for place, row in enumerate(rows):
        weight = len(row.prompt) + (1 + cache.kl_pairs) * sum(len(each[0]) for each in row.branches)
        is_full = place - offsets[-1] == cache.rows_per_shard
        if place > offsets[-1] and (is_full or held + weight > cache.tokens_per_shard):
            offsets.append(place)
            held = 0
        held += weight
    return (*offsets, len(rows))
