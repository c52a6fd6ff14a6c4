"""Training on completions of several messages: what is not learned is in no loss and no length."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import plain_loop
from support.read_rows import bot, user
from support.rounding import EPSILON
from support.training_world import ALONE, job_of, learn, scored, session_of

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = {"warmup": 0.0, "schedule": "constant", "max_steps": 2, "batch_size": 4, "epsilon": EPSILON}
QUESTIONS = [f"How much is {number} and one?" for number in range(12)]


def said(number, word):
    """Two answers with a question between them, of lengths that differ from row to row."""
    first = bot(f"It is {word}" + " indeed" * (number % 3))
    return [first, user(f"Sure of {number}?"), bot(f"Yes, {word}" + "!" * (number % 4))]


def pairs():
    rows = [
        {
            "prompt": [user(question)],
            "chosen": said(number, "more"),
            "rejected": said(number, "less") if number % 2 else [bot("I do not know.")],
        }
        for number, question in enumerate(QUESTIONS)
    ]
    return pa.Table.from_pylist(rows)


@pytest.fixture(scope="module")
def cache(training_world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    pq.write_table(pairs(), folder / "plain.parquet")
    return scored(folder, "plain", model=training_world.model, kl_pairs=1, token_logps=True)


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo"])
def test_training_on_turns_ends_in_the_weights_of_a_plain_loop(training_world, cache, method):
    turns = [one for row in plain_loop.rows_of(cache).values() for one in row["completion_turns"]]
    assert any(number < 1 for one in turns for number in one)
    learned = learn(job_of(cache, method, **STEPS), ALONE)
    plain_loop.weights_beside(training_world.model, learned, cache, method, 2)


def test_a_step_counts_learned_tokens_and_fills_its_batches_by_all(cache):
    session = session_of(job_of(cache, "dpo", **STEPS), ALONE)
    stored = plain_loop.rows_of(cache)
    with session.feed.steps(0) as batches:
        for batch in batches:
            rows = [stored[row] for micro in batch.own for row in micro.row_ids]
            learned = [
                [sum(n > 0 for n in turns) for turns in row["completion_turns"][:2]] for row in rows
            ]
            assert batch.tokens == sum(map(sum, learned))
            assert batch.chosen_tokens == sum(chosen for chosen, _ in learned)
            whole = sum(len(row["prompt_ids"]) + sum(row["num_tokens"][:2]) for row in rows)
            assert sum(tree.num_tokens for micro in batch.own for tree in micro.trees) == whole
