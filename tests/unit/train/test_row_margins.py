"""The margin of each training row in each epoch, and which rows are learned by them."""

import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from align.schemas.batches import RowMargins
from align.schemas.errors import CorruptionError
from align.stages.engine.distributed import joined_world
from align.stages.report.row_margins import (
    cut_margins,
    join_margins,
    learned_rows,
    margins_line,
    read_margins,
)
from support import plain_loop
from support.refusals import refuses
from support.rounding import NATS
from support.training_world import job_of, learn

EPOCHS = 2


@torch.no_grad()
def margin_of(row, models):
    """The mean reward of its good completions less that of its bad ones, one by one."""
    plain = plain_loop.Row(row, *models)
    sides = {True: [], False: []}
    for index, good in zip(plain.own, plain.is_good, strict=True):
        sides[good].append(plain_loop.BETA * float(plain.ratio(index)))
    means = [sum(side) / len(side) if side else 0.0 for side in (sides[True], sides[False])]
    return means[0] - means[1]


@pytest.mark.numeric
@pytest.mark.parametrize(("cache", "method"), [("pairs", "dpo"), ("labels", "kto")])
def test_every_row_has_a_margin_at_each_visit_by_plain_passes_of_both_models(
    training_world, moved, cache, method
):
    """A policy that does not move has the same margin at every visit."""
    folder = getattr(training_world, cache)
    how = {"model": str(moved), "other_reference": True, "lr": 0.0, "epochs": EPOCHS}
    with joined_world() as world:
        _, recorded = learn(job_of(folder, method, row_margins=True, **how), world)
    models = [
        AutoModelForCausalLM.from_pretrained(one).eval() for one in (moved, training_world.model)
    ]
    expected = {name: margin_of(row, models) for name, row in plain_loop.rows_of(folder).items()}
    seen = {}
    for step, epoch, rows in recorded.margins:
        assert 0 < step <= len(recorded.margins)
        for row_id, margin in zip(rows.row_ids, rows.margins, strict=True):
            seen[row_id, epoch] = margin
        assert not any(rows.are_ties)
    assert len(seen) == sum(len(one.row_ids) for *_, one in recorded.margins)  # each once an epoch
    assert {row_id for row_id, _ in seen} == expected.keys()
    assert {epoch for _, epoch in seen} == set(range(EPOCHS))
    for (row_id, _), margin in seen.items():
        assert margin == pytest.approx(expected[row_id], abs=4 * plain_loop.BETA * NATS)
    # Before the first update a policy that is the reference ties in every row.
    with joined_world() as world:
        _, recorded = learn(job_of(folder, method, row_margins=True, lr=0.0, max_steps=1), world)
    assert all(recorded.margins[0][2].are_ties)


def table(*rows):
    """Margins of rows, each given by their signs; 0 is a tie."""
    lines = [
        {"row_id": name, "epoch": at, "step": at * 10 + 1, "margin": 0.5 * sign, "is_tie": not sign}
        for name, signs in rows
        for at, sign in enumerate(signs)
    ]
    return pl.DataFrame(lines)


def test_rows_are_never_learned_or_forgotten_by_what_they_were_at_their_visits():
    margins = table(
        ("late", (-1, 0, 1)),
        ("lost", (1, 1, -1)),
        ("found again", (1, -1, 1)),
        ("tied", (1, 0, 0)),
        ("never", (-1, -1, 0)),
    )
    lost = table(("nan", (float("nan"), float("nan"))))
    found = learned_rows(pl.concat([margins.reverse(), lost]))
    assert found["times"].to_list() == [3, 3, 3, 2, 3, 3]
    named = {name: found.filter(name)["row_id"].to_list() for name in found.columns[2:]}
    assert named == {
        "correct": ["found again", "late"],
        "never": ["nan", "never"],
        "forgotten": ["found again", "lost"],
    }


def test_lines_of_ranks_become_one_table_and_a_damaged_one_is_named(tmp_path):
    paths, whole = [], tmp_path / "rows.parquet"
    for rank, names in enumerate((("b", "d"), ("a",))):
        paths.append(tmp_path / f"{rank}.jsonl")
        rows = RowMargins(names, (1.5,) * len(names), (False,) * len(names))
        lines = [margins_line(rows, epoch=0, step=step) for step in (1, 2, 3)]
        paths[-1].write_bytes(b"\n".join(lines) + b'\n{"row_id": ["cut')
        cut_margins(paths[-1], 2)
    join_margins(paths, whole)
    rows = read_margins(whole).select("step", "row_id").rows()
    assert rows == [(step, one) for step in (1, 2) for one in "abd"]
    for damage in (b"{\n", b'{"row_id": ["a"]}\n'):
        paths[0].write_bytes(damage)
        with refuses(CorruptionError, paths[0]):
            join_margins(paths, whole)
    whole.write_bytes(whole.read_bytes()[:-9])
    with refuses(CorruptionError, whole):
        read_margins(whole)
