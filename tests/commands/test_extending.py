"""The method that docs/extending.md adds works."""

from align.stages.methods import losses
from align.stages.methods.table import METHODS
from support.command import align, success
from support.pages import page, programs_under
from support.refusals import require_names


def test_a_method_is_added_as_its_page_shows(here, training_world):
    (loss,) = programs_under(page("docs/extending.md"), "A method")
    exec(loss, vars(losses))  # as at the end of the file
    try:
        explained = align("methods", "square").out
        require_names(explained, "(b D - t)^2", "target of the reward margin")
        cache = ("--cache", training_world.pairs, "--output", "run", "--no-mlflow")
        answer = success("train", "--method", "square", *cache, "--batch-size", 4, "--max-steps", 2)
        assert "2 steps" in answer.out
    finally:
        del METHODS["square"], losses.square
