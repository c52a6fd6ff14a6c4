"""What the measures of a tree count, on trees small enough to count by hand."""

import pytest

from support.house_measures import (
    base_names_twice,
    import_circles,
    modules_of,
    public_classes_twice,
    table,
)


@pytest.fixture
def modules_in(tmp_path):
    """Makes a tree of files; every folder is a package."""

    def make(**texts):
        for name, text in texts.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name("__init__.py").touch()
            path.write_text(text)
        return modules_of(tmp_path)

    return make


LATE = "def run():\n    from . import a\n"
TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A\n"


@pytest.mark.parametrize(
    ("second", "loaded", "checked"),
    [
        ("from . import a", [["room.a", "room.b"]], [["room.a", "room.b"]]),
        ("from ..room.a import A", [["room.a", "room.b"]], [["room.a", "room.b"]]),
        (
            "try:\n    from .a import A\nexcept ImportError:\n    pass",
            *[[["room.a", "room.b"]]] * 2,
        ),
        (TYPED, [], [["room.a", "room.b"]]),
        (LATE, [], []),
        ("import os", [], []),
    ],
)
def test_modules_that_import_each_other_are_a_circle(modules_in, second, loaded, checked):
    modules = modules_in(room__a="from .b import B", room__b=second)
    assert import_circles(modules, for_types=False) == loaded
    assert import_circles(modules, for_types=True) == checked


def test_a_circle_may_lead_through_many_modules(modules_in):
    one, two, three = "from .b import x", "from .inner.c import x", "from ..a import x"
    modules = modules_in(room__a=one, room__b=two, room__inner__c=three, room__d="from .a import x")
    (circle,) = import_circles(modules, for_types=False)
    assert circle == ["room.a", "room.b", "room.inner.c"]


def test_names_count_twice_if_two_folders_have_them(modules_in):
    modules = modules_in(
        first__units="class Unit: ...\nclass _Own: ...",
        second__units="class Other: ...",
        second__other="class Unit: ...\nclass _Own: ...",
    )
    assert base_names_twice(modules) == {"units": ["first.units", "second.units"]}
    assert public_classes_twice(modules) == {"Unit": ["first.units", "second.other"]}


def test_the_table_counts_lines_of_files_and_of_functions(modules_in, tmp_path):
    modules_in(room__a="def one():\n    def inner():\n        pass\n\n\nx = 1\n", room__b="y = 2\n")
    measured = table(tmp_path)
    assert measured["modules without __init__"] == "2"
    assert measured["lines"] == "7"
    assert measured["lines of a file: median / p90 / longest"] == "4 / 6 / 6"  # of 1 and 6
    assert measured["lines of a function: median / p90 / longest"] == "2 / 3 / 3"  # of 2 and 3
    assert measured["files under 60 lines"] == "2"
