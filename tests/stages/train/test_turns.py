"""Training on completions of several messages: what is not learned is in no loss and no length."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import UsageError
from support import plain_loop
from support.read_rows import bot, user
from support.rounding import EPSILON
from support.training_world import ALONE, START, facts, job_of, learn, scored, session_of

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = {"warmup": 0.0, "schedule": "constant", "max_steps": 2, "batch_size": 4, "epsilon": EPSILON}
QUESTIONS = [f"How much is {number} and one?" for number in range(12)]
MARKED = {"loss": False}


def said(number, word, mark=None):
    """Two answers with a question between them, of lengths that differ from row to row."""
    first = bot(f"It is {word}" + " indeed" * (number % 3)) | (mark or {})
    return [first, user(f"Sure of {number}?"), bot(f"Yes, {word}" + "!" * (number % 4))]


def pairs(**marks):
    rows = [
        {
            "prompt": [user(question)],
            "chosen": said(number, "more", marks.get("chosen")),
            "rejected": said(number, "less") if number % 2 else [bot("I do not know.")],
            "chosen_score": 1.0,
            "rejected_score": 0.0,
        }
        for number, question in enumerate(QUESTIONS)
    ]
    return pa.Table.from_pylist(rows)


@pytest.fixture(scope="module")
def caches(training_world, tmp_path_factory):
    """The same pairs as caches in which other turns are learned, and some made in other ways."""
    folder = tmp_path_factory.mktemp("turns")
    pq.write_table(pairs(), folder / "plain.parquet")
    pq.write_table(pairs(chosen=MARKED), folder / "marked.parquet")
    made = {"model": training_world.model, "kl_pairs": 1}

    def cache(output, name="plain", *, token_logps=True, **tokens):
        return scored(folder, name, output=output, token_logps=token_logps, **made, **tokens)

    return {
        "assistant": cache("assistant"),
        "last": cache("last", learn="last"),
        "all": cache("all", learn="all"),
        "marked": cache("marked", "marked"),
        "sums": cache("sums", token_logps=False),
    }


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo"])
def test_training_on_turns_ends_in_the_weights_of_a_plain_loop(training_world, caches, method):
    cache = caches["assistant"]
    turns = [one for row in plain_loop.rows_of(cache).values() for one in row["completion_turns"]]
    assert any(number < 1 for one in turns for number in one)
    learned = learn(job_of(cache, method, **STEPS), ALONE)
    plain_loop.weights_beside(training_world.model, learned, cache, method, 2)


def test_a_step_counts_learned_tokens_and_fills_its_batches_by_all(caches):
    session = session_of(job_of(caches["assistant"], "dpo", **STEPS), ALONE)
    stored = plain_loop.rows_of(caches["assistant"])
    with session.feed.steps(START.cursor) as batches:
        for batch in batches:
            rows = [stored[row] for micro in batch.own for row in micro.row_ids]
            learned = [
                [sum(n > 0 for n in turns) for turns in row["completion_turns"][:2]] for row in rows
            ]
            assert batch.tokens == sum(map(sum, learned))
            assert batch.chosen_tokens == sum(chosen for chosen, _ in learned)
            whole = sum(len(row["prompt_ids"]) + sum(row["num_tokens"][:2]) for row in rows)
            assert sum(tree.num_tokens for micro in batch.own for tree in micro.trees) == whole


def losses_of(cache, method, options, **settings):
    job = job_of(cache, method, options=options, **STEPS, **settings)
    _, recorded = learn(job, ALONE)
    return [facts(metrics) for _, metrics in recorded.steps]


# Methods and modifiers for each way to read sums, lengths, tokens and partners.
READERS = [
    ("kto", {}),
    ("ipo", {}),
    ("simpo", {}),
    ("orpo", {}),
    ("sft", {}),
    ("dpo", {"ld_alpha": 0.5}),
    ("dpo", {"humanline": True}),
    ("dpo", {"wpo": True}),
    ("grpo", {}),
    ("ppo", {}),
]


@pytest.mark.parametrize(("method", "options"), READERS, ids=str)
def test_what_is_chosen_after_caching_gives_the_losses_of_a_cache_made_for_it(
    caches, method, options
):
    chosen = {
        learn: losses_of(caches["assistant"], method, options, learn=learn)
        for learn in ("last", "all", "cached")
    }
    assert chosen["last"] == losses_of(caches["last"], method, options)
    assert chosen["all"] == losses_of(caches["all"], method, options)
    assert chosen["cached"] == losses_of(caches["last"], method, options, learn="assistant")
    second = {steps[1]["loss"] for steps in chosen.values()}
    assert len(second) == len(chosen)


def test_a_cache_of_marks_serves_other_choices_but_never_what_they_exclude(caches):
    """Of the marked cache the last turn is what is learned of the chosen answers."""
    cached, last = (
        losses_of(caches["marked"], "dpo", {}, learn=learn) for learn in ("cached", "last")
    )
    assert cached[1]["loss"] != last[1]["loss"]  # of the rejected answers both turns were learned
    assert last == losses_of(caches["last"], "dpo", {})


@pytest.mark.parametrize(
    ("cache", "learn", "said"),
    [
        ("sums", "last", "--set tokens.learn=last"),
        ("all", "last", "knows no turns"),
        ("all", "assistant", "knows no turns"),
    ],
)
def test_a_choice_that_the_cache_cannot_serve_is_refused(caches, cache, learn, said):
    with pytest.raises(UsageError, match=said):
        session_of(job_of(caches[cache], "dpo", learn=learn), ALONE)


def test_a_choice_that_leaves_a_completion_nothing_to_learn_is_refused(training_world, tmp_path):
    """The last turn of some answers is marked; what is learned there is an earlier one."""
    rows = pairs().to_pylist()
    rows[3]["chosen"][-1] |= MARKED
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "late.parquet")
    cache = scored(
        tmp_path, "late", output="cache", model=training_world.model, kl_pairs=0, token_logps=True
    )
    assert losses_of(cache, "dpo", {})
    with pytest.raises(UsageError, match=r"train\.learn=last.* 1 rows"):
        session_of(job_of(cache, "dpo", learn="last"), ALONE)


def test_nothing_is_reused_across_what_is_learned_and_one_turn_is(caches, training_world, tmp_path):
    """Of twelve pairs six have a rejected answer of one turn, and each is a partner once."""
    stored = {name: plain_loop.rows_of(caches[name]) for name in ("assistant", "last", "all")}

    def sums(name):
        rows = sorted(stored[name].values(), key=lambda row: row["prompt_ids"])
        return [row["ref_logp"][:2] for row in rows]

    several, last, everything = map(sums, ("assistant", "last", "all"))
    for number, (one, other, every) in enumerate(zip(several, last, everything, strict=True)):
        assert one[0] != other[0] != every[0], number
        assert (one[1] == every[1]) == (one[1] == other[1])
    assert sum(one[1] == other[1] for one, other in zip(several, last, strict=True)) == 6
