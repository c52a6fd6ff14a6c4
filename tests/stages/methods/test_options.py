import math
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from align.schemas.errors import UsageError
from align.stages.methods.table import METHODS, find_method, options_of
from support.method_steps import BY_NAME, each

DEFAULTS = {
    "dpo": {"beta": 0.1, "label_smoothing": 0},
    "cdpo": {"beta": 0.1, "label_smoothing": 0.2},
    "robust": {"beta": 0.1, "label_smoothing": 0.1},
    "exo": {"beta": 0.1, "label_smoothing": 0.001},
    "hinge": {"beta": 0.1},
    "discopop": {"beta": 0.05, "tau": 0.05},
    "ipo": {"beta": 0.1, "normalize": "mean"},
    "dpo_norm": {"beta": 5, "label_smoothing": 0},
    "nca": {"beta": 0.1},
    "bco_pair": {"beta": 0.1},
    "sppo": {"beta": 0.1},
    "apo_zero": {"beta": 0.1},
    "apo_down": {"beta": 0.1},
    "orpo": {"lam": 0.1, "nll_scope": "pair"},
    "simpo": {"beta": 10, "gamma_ratio": 0.3, "label_smoothing": 0},
    "cpo": {"beta": 0.1, "alpha": 1, "label_smoothing": 0, "nll_scope": "pair"},
    "slic": {"delta": 1, "lam": 0.1, "normalize": "sum"},
    "kto": {
        "beta": 0.1,
        "desirable_weight": 1,
        "undesirable_weight": 1,
        "kl_per_step": 0,
        "kl_use": "rotate",
    },
    "kto_zero": {"beta": 0.1, "desirable_weight": 1, "undesirable_weight": 1},
    "apo_zero_unpaired": {"beta": 0.1},
    "aot": {"beta": 0.1, "label_smoothing": 0},
    "aot_unpaired": {"beta": 0.1, "label_smoothing": 0},
    "rpo_sq": {"beta": 0.1, "eta": 1},
    "rpo_bwd_kl": {"beta": 0.1, "eta": 1},
    "rpo_fwd_kl": {"beta": 0.1, "eta": 1},
    "bco": {"beta": 0.1},
    "grpo": {"beta": 0.01, "epsilon": 0.2, "normalize": "tokens"},
    "ppo": {
        "epsilon": 0.5,
        "lam": 0.95,
        "gamma": 0.99,
        "vf": 0.01,
        "kl": 0.1,
        "value_clip": 0,
    },
    "sft": {},
    "csft": {"good_token": "<|good|>", "bad_token": "<|bad|>"},
    "reward": {},
    "reward_binary": {},
}
DEFAULTS["kto_logsigmoid"] = DEFAULTS["kto"]
REFERENCED_PAIRS = [
    name for name, own in METHODS.items() if own.rows == "paired" and "reference" in own.needs
]


@each(BY_NAME)
def test_defaults_are_those_of_the_papers(method):
    imitation = {"sft_weight": 0} if method.name in REFERENCED_PAIRS else {}
    assert asdict(options_of(method, {})) == DEFAULTS[method.name] | imitation
    assert options_of(method, {}) == method.options()


@each(BY_NAME)
def test_every_method_explains_itself(method):
    assert METHODS[method.name] is method
    assert method.summary
    assert method.use.endswith(".")
    assert "https://" in method.source
    assert "https://" in method.loss.__doc__
    assert all(field.metadata["description"] for field in fields(method.options))
    with pytest.raises(FrozenInstanceError):
        method.options().beta = 1


@each(
    {
        f"{name}.{field.name}": (method, field)
        for name, method in METHODS.items()
        for field in fields(method.options)
    }
)
def test_no_option_takes_what_it_cannot_use(method, field):
    texts = () if field.type == "str" else ("nonsense",)
    for value in (math.nan, math.inf, -1.0, -1, True, None, [], *texts):
        with pytest.raises(UsageError, match=rf"method\.{field.name}\b"):
            options_of(method, {field.name: value})


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("dpo", {"beta": 0}, "method.beta: expected a number above 0"),
        ("dpo", {"label_smoothing": 0.5}, "expected a number of at least 0 and below 0.5"),
        ("exo", {"label_smoothing": 0}, "expected a number above 0 and below 0.5"),
        ("kto", {"beat": 1}, "kto: unknown key 'method.beat'. Did you mean 'beta'?"),
        ("kto", {"kl_use": "rotat"}, "method.kl_use: expected rotate or all"),
        (
            "kto",
            {"desirable_weight": "auot"},
            "expected a number above 0 or auto",
        ),
        ("kto", {"kl_per_step": 1.5}, "method.kl_per_step: expected a whole number of at least 0"),
        ("orpo", {"beta": 0.1}, "orpo: unknown key 'method.beta'. Known: lam, nll_scope"),
        ("grpo", {"epsilon": 0}, "method.epsilon: expected a number above 0 and below 1"),
        ("grpo", {"epsilon": 1.5}, "method.epsilon: expected a number above 0 and below 1"),
        ("grpo", {"normalize": "token"}, "method.normalize: expected tokens or sequence"),
        ("ppo", {"lam": 1.1}, "method.lam: expected a number of at least 0 and at most 1"),
        ("ppo", {"gamma": 1.1}, "method.gamma: expected a number of at least 0 and at most 1"),
        ("ppo", {"epsilon": 1}, "method.epsilon: expected a number above 0 and below 1"),
    ],
)
def test_a_refusal_says_which_option_and_what_it_may_be(name, values, said):
    with pytest.raises(UsageError) as refusal:
        options_of(METHODS[name], values)
    assert said in str(refusal.value)


def test_whole_numbers_and_auto_are_taken_where_they_make_sense():
    options = options_of(METHODS["kto"], {"beta": 1, "desirable_weight": "auto"})
    assert (options.beta, options.desirable_weight) == (1.0, "auto")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kot", "Did you mean 'kto' or 'aot'?"),
        ("apo", "Did you mean 'apo_zero' or 'apo_down' or 'apo_zero_unpaired'?"),
        ("KTO", "Did you mean 'kto'?"),
        ("ppo_clip", "method 'ppo_clip': no such method."),
        ("", "Known: dpo, cdpo"),
    ],
)
def test_an_unknown_method_is_refused_with_the_nearest(name, said):
    with pytest.raises(UsageError) as refusal:
        find_method(name)
    assert said in str(refusal.value)
