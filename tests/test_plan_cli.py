"""`align plan`, `align train --dry-run` and what is said before each run."""

from support.command import align, refusal


def test_a_plan_names_all_that_a_training_needs(course):
    answer = align("plan", "--method", "dpo", "--cache", course.cache, "--gpu", "24g", "--gpus", 2)
    assert answer.code == 0, answer
    for said in ("steps", "tokens", "KL pairs", "zero3-offload, lora", "> zero1", "Fits: "):
        assert said in answer.out
    again = align(
        *("plan", "--method", "dpo", "--cache", course.cache),
        *("--tokens-per-second", 100, "--price", 3),
    )
    assert "100 tokens/s" in again.out
    assert "GPU hours at 3.00" in again.out


def test_a_dry_run_says_the_same_and_makes_nothing(course, tmp_path):
    words = ("--method", "dpo", "--cache", course.cache, "--output", tmp_path / "run")
    plan, dry = align("plan", *words), align("train", *words, "--dry-run")
    assert (dry.code, dry.out) == (0, plan.out)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_is_of_as_many_ranks_as_a_launcher_started(course, tmp_path, monkeypatch):
    words = ("train", "--method", "dpo", "--cache", course.cache, "--output", tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        answer = align(*words, "--dry-run")
        assert answer.code == 0, answer
        assert ("2 ranks" in answer.out) == (rank == "0")
    assert answer.out == ""


def test_a_run_begins_with_its_plan_in_short_and_its_speed_is_taken(course, tmp_path):
    answer = course.run(tmp_path / "run", "--max-steps", 2)
    assert "plan: 2 steps of" in answer.err
    assert "of the optimizer, beside activations" in answer.err
    words = ("plan", "--method", "dpo", "--cache", course.cache, "--like", tmp_path / "run")
    assert "without evaluations" in align(*words).out


def test_what_cannot_be_planned_is_refused(course, tmp_path):
    words = ("plan", "--method", "dpo", "--cache", course.cache)
    assert "--gpu big: expected a size" in refusal(2, *words, "--gpu", "big")
    both = ("--tokens-per-second", 5, "--like", tmp_path)
    assert "Leave out one of them" in refusal(2, *words, *both)
    assert "metrics.jsonl" in refusal(2, *words, "--like", tmp_path)
    assert "No method" in refusal(2, "plan", "--rows", 5)
    assert "No policy" in refusal(2, "plan", "--method", "dpo", "--rows", 5)
