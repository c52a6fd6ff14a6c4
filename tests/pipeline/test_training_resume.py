"""What a run may go on from, and what has to be as it was."""

import shutil

from support.trainings import contents, learned, refused, require_same, weights

RESUME = ("--resume", "auto")


def test_other_settings_are_refused_by_name(course, broken_run):
    changes = ("--lr", 2e-3, "--batch-size", 5, "--method", "kto_zero", "--seed", 1)
    more = ("--set", "method.beta=0.5", "--lora")
    said = refused(course, 4, broken_run, *RESUME, *changes, *more)
    for line in (
        "train.lr: begun with 0.001, now 0.002",
        "train.batch_size: begun with 4, now 5",
        "train.method: begun with 'kto', now 'kto_zero'",
        "train.seed: begun with 0, now 1",
        "lora.enabled: begun with False, now True",
        "method.beta: begun with 0.1, now 0.5",
    ):
        assert f"  {line}\n" in said
    assert said.count(": begun with ") == 8  # two options of KTO are not there any more


def test_what_changes_nothing_that_is_learned_may_be_changed(course, broken_run):
    free = ("--tokens-per-batch", 99_999, "--save-every", 1, "--keep-last", 3, "--eval-every", 5)
    course.run(broken_run, *RESUME, *free, "--set", "train.log_every=2")
    assert weights(broken_run) == weights(course.whole())
    assert [line["step"] for line in learned(broken_run)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    steps = sorted(path.name for path in (broken_run / "checkpoints").glob("step-*"))
    assert steps == ["step-00000004", "step-00000005", "step-00000006"]


def test_another_cache_is_refused(course, broken_run, world):
    cache = broken_run.with_name("other-cache")
    made = ("--model", course.model, "--output", cache, "--no-mlflow", "--set", "cache.seed=1")
    assert course.server.run("precompute-ref", world.data.paired, *made).code == 0
    said = refused(course, 4, broken_run, *RESUME, "--cache", cache)
    assert "The run was begun on the cache " in said
    assert "Pass the --cache it was begun with" in said


def test_a_cache_that_was_moved_is_the_same_cache(course, broken_run):
    cache = shutil.copytree(course.cache, broken_run.with_name("moved-cache"))
    course.run(broken_run, *RESUME, "--cache", cache)
    assert weights(broken_run) == weights(course.whole())


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_used(course, broken_run):
    newest = broken_run / "checkpoints" / "step-00000004"
    victim = max(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    answer = course.run(broken_run, *RESUME)
    assert "step-00000004 is damaged" in answer.err
    assert "an older one is tried" in answer.err
    assert "continuing after step 2" in answer.err
    assert len(list((broken_run / "checkpoints").glob(".bad-step-00000004-*"))) == 1
    require_same(broken_run, course.whole())


def test_an_unfinished_run_is_not_begun_again(course, broken_run):
    said = refused(course, 2, broken_run)
    assert "holds an unfinished run, with a checkpoint of step 4" in said
    assert "Continue it with --resume auto, choose another --output" in said


def test_resume_begins_where_there_is_nothing_and_ends_where_all_is_done(course, tmp_path):
    run = tmp_path / "run"
    begun = course.run(run, *RESUME)
    assert "going on" not in begun.err
    assert weights(run) == weights(course.whole())
    before = contents(run)
    again = course.run(run, *RESUME)
    assert "6 steps done already: this run is finished, nothing was trained" in again.out
    assert contents(run) == before
    assert "holds a finished run" in refused(course, 2, run)


def test_a_finished_run_can_be_made_longer(course, tmp_path):
    run = shutil.copytree(course.whole(), tmp_path / "run")
    answer = course.run(run, *RESUME, "--max-steps", 8)
    assert "train.max_steps: begun with 6, now 8" in answer.err
    assert "continuing after step 6" in answer.err
    assert max(line["step"] for line in learned(run)) == 8
    assert weights(run) != weights(course.whole())
