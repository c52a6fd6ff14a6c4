import json

import pytest

from align.stages.methods.method_docs import plain_table, render_method, render_table
from align.stages.methods.table import METHODS

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def test_the_table_names_every_method_with_its_formula_and_source():
    lines = render_table(list(METHODS.values())).splitlines()
    firsts = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert sorted(firsts) == sorted(METHODS)
    text = "\n".join(lines)
    for method in METHODS.values():
        assert method.summary in text
        assert method.source in text
    assert max(map(len, lines)) <= 88


@every_method
def test_a_method_is_told_with_every_option_and_its_default(method):
    text = render_method(method)
    options = text.partition("options, ")[2].splitlines()
    for name, default in vars(method.options()).items():
        (line,) = [line for line in options if line.startswith(f"  {name} ")]
        shown = default if isinstance(default, str) else f"{default:g}"
        assert line.split()[1] == shown
    assert method.use in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 88


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
    assert told["options"][1] == {
        "name": "desirable_weight",
        "default": 1.0,
        "values": "a number above 0 or auto",
        "help": "weight of desirable branches; auto: as heavy in all as the other label",
    }
