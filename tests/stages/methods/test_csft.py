"""Conditional training: good and bad completions alike, each behind its token."""

import pytest

from align.schemas.rows import Role
from align.stages.methods.sft import CsftOptions, control_texts
from align.stages.methods.table import METHODS
from support.method_steps import branches, take

D, U = Role.DESIRABLE, Role.UNDESIRABLE


def test_bad_completions_are_learned_as_good_ones_are():
    taken = take(METHODS["csft"], branches([-6.0, -2.0], num_tokens=[4, 1], roles=[D, U]))
    assert taken.losses.tolist() == [6.0, 2.0]
    assert taken.loss == pytest.approx(8 / 5)  # over all five tokens
    assert taken.gradient.tolist() == pytest.approx([-1 / 5, -1 / 5])
    assert taken.means == pytest.approx({"nll/desirable": 1.5, "nll/undesirable": 2.0})


def test_each_label_has_its_text():
    texts = control_texts(CsftOptions(good_token="<good>", bad_token="<bad>"))
    assert texts == {D: "<good>", U: "<bad>"}
