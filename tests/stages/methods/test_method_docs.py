import json

from align.stages.methods.method_docs import plain_table, render_method, render_table
from align.stages.methods.table import METHODS
from support.method_steps import BY_NAME, each


def test_the_table_names_every_method_with_its_formula_and_source():
    text = render_table(list(METHODS.values()))
    lines = [line for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
    assert sorted(line.split()[0] for line in lines) == sorted(METHODS)
    assert all(method.summary in text and method.source in text for method in METHODS.values())


@each(BY_NAME)
def test_a_method_is_told_with_every_option_and_its_default(method):
    text = render_method(method)
    options = text.partition("options, ")[2].splitlines()
    for name, default in vars(method.options()).items():
        (line,) = [line for line in options if line.startswith(f"  {name} ")]
        shown = default if isinstance(default, str) else f"{default:g}"
        assert line.split()[1] == shown
    assert method.use in " ".join(text.split())


def test_needs_and_choices_are_told():
    text = " ".join(render_method(METHODS["kto"]).split())
    assert "needs the reference's log-probs and those of mismatched completions" in text
    assert "mean over all branches of an optimizer step" in text
    assert "[a number above 0 or auto]" in text
    assert "[rotate or all]" in text
    assert "needs no reference" in render_table([METHODS["orpo"]])


def test_a_kind_of_rows_without_methods_has_no_heading():
    assert "labelled:" not in render_table([METHODS["dpo"]])


def test_the_plain_table_is_json_and_holds_the_same():
    (told,) = json.loads(json.dumps(plain_table([METHODS["kto"]])))
    assert told["name"] == "kto"
    assert told["needs"] == ["reference", "mismatched"]
    assert told["mean_over"] == "branches"
    weight = told["options"][1]
    assert (weight["name"], weight["default"]) == ("desirable_weight", 1.0)
    assert weight["values"] == "a number above 0 or auto"
