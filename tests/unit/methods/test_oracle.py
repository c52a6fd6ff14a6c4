"""Every method against its formula, written a second time in plain float64."""

from collections import namedtuple

import numpy as np
import pytest

from align.stages.methods.objective import is_good
from align.stages.methods.table import METHODS, options_of
from support.method_steps import MISMATCHED, each, random_completions, take

pytestmark = pytest.mark.numeric

# Of the good or of the bad completions; `seen` is r as the pre-pass of the step found it.
Side = namedtuple("Side", "lp ref n r m s seen")


def S(x):  # noqa: N802 - as the formulas call it
    return 1 / (1 + np.exp(-x))


def LS(x):  # noqa: N802
    return -np.log(1 + np.exp(-x))


def odds(m):
    return np.log(np.exp(m) / (1 - np.exp(m)))


def smoothed(x, o):
    return -(1 - o.label_smoothing) * LS(x) - o.label_smoothing * LS(-x)


def kl(p, q):
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def robust(up, down, o):
    b, e, gap = o.beta, o.label_smoothing, up.r - down.r
    return (-(1 - e) * LS(b * gap) + e * LS(-b * gap)) / (1 - 2 * e)


def discopop(up, down, o):
    x = o.beta * (up.r - down.r)
    g = S(x / o.tau)
    return (1 - g) * -LS(x) + g * np.exp(-x)


def ipo(up, down, o):
    by = (up.n, down.n) if o.normalize == "mean" else (1, 1)
    return (up.r / by[0] - down.r / by[1] - 1 / (2 * o.beta)) ** 2


def nll(up, o):
    return -up.m if o.nll_scope == "pair" else -up.lp * len(up.lp) / up.n.sum()


def slic(up, down, o):
    imitated = up.lp if o.normalize == "sum" else up.m
    return np.maximum(0, o.delta - up.lp + down.lp) - o.lam * imitated


def weighed(up, down, o):
    return o.desirable_weight * up, o.undesirable_weight * down


def bco(up, down, o):
    d = o.beta * np.mean([up.seen, down.seen])
    return -LS(o.beta * up.r - d), -LS(-(o.beta * down.r - d))


Z = max(0, np.mean(MISMATCHED))
# One loss of each pair, or two: of the desirable and of the undesirable completion.
ORACLES = {
    "dpo": lambda up, down, o: smoothed(o.beta * (up.r - down.r), o),
    "cdpo": lambda up, down, o: smoothed(o.beta * (up.r - down.r), o),
    "robust": robust,
    "exo": lambda up, down, o: kl(S(o.beta * (up.r - down.r)), 1 - o.label_smoothing),
    "hinge": lambda up, down, o: np.maximum(0, 1 - o.beta * (up.r - down.r)),
    "discopop": discopop,
    "ipo": ipo,
    "dpo_norm": lambda up, down, o: smoothed(o.beta * (up.r / up.n - down.r / down.n), o),
    "nca": lambda up, down, o: -LS(o.beta * up.r) - (LS(-o.beta * up.r) + LS(-o.beta * down.r)) / 2,
    "bco_pair": lambda up, down, o: -LS(o.beta * up.r) - LS(-o.beta * down.r),
    "sppo": lambda up, down, o: (up.r - 0.5 / o.beta) ** 2 + (down.r + 0.5 / o.beta) ** 2,
    "apo_zero": lambda up, down, o: 1 - S(o.beta * up.r) + S(o.beta * down.r),
    "apo_down": lambda up, down, o: S(o.beta * up.r) + 1 - S(o.beta * (up.r - down.r)),
    "aot": lambda up, down, o: smoothed(
        o.beta * (np.sort(up.lp - down.lp) - np.sort(up.ref - down.ref)), o
    ),
    "aot_unpaired": lambda up, down, o: smoothed(o.beta * (np.sort(up.r) - np.sort(down.r)), o),
    "rpo_sq": lambda up, down, o: (o.beta * (up.r - down.r) - o.eta * (up.s - down.s)) ** 2,
    "rpo_bwd_kl": lambda up, down, o: kl(S(o.eta * (up.s - down.s)), S(o.beta * (up.r - down.r))),
    "rpo_fwd_kl": lambda up, down, o: kl(S(o.beta * (up.r - down.r)), S(o.eta * (up.s - down.s))),
    "orpo": lambda up, down, o: nll(up, o) - o.lam * LS(odds(up.m) - odds(down.m)),
    "simpo": lambda up, down, o: smoothed(o.beta * (up.m - down.m - o.gamma_ratio), o),
    "cpo": lambda up, down, o: smoothed(o.beta * (up.lp - down.lp), o) + o.alpha * nll(up, o),
    "slic": slic,
    "kto": lambda up, down, o: weighed(S(-o.beta * (up.r - Z)), S(-o.beta * (Z - down.r)), o),
    "kto_zero": lambda up, down, o: weighed(S(-o.beta * up.r), S(o.beta * down.r), o),
    "kto_logsigmoid": lambda up, down, o: weighed(
        -LS(o.beta * (up.r - Z)), -LS(o.beta * (Z - down.r)), o
    ),
    "apo_zero_unpaired": lambda up, down, o: (S(-o.beta * up.r), S(o.beta * down.r)),
    "bco": bco,
    "sft": lambda up, down, o: -up.lp,
    "csft": lambda up, down, o: (-up.lp, -down.lp),
    "reward": lambda up, down, o: -LS(up.lp - down.lp),
    "reward_binary": lambda up, down, o: (-LS(up.lp), -LS(-down.lp)),
}
# Those whose losses come sorted; what a row of them brings is only told by their sum.
SORTED = {"aot", "aot_unpaired"}

OTHERS = {
    "beta": 0.37,
    "label_smoothing": 0.15,
    "tau": 0.4,
    "lam": 0.6,
    "alpha": 0.3,
    "gamma_ratio": 0.05,
    "delta": 6.0,
    "desirable_weight": 1.3,
    "undesirable_weight": 0.7,
    "sft_weight": 0.25,
    "eta": 1.7,
}
WORDS = {
    "normalize": ["mean", "sum"],
    "nll_scope": ["pair", "global_tokens"],
    "sft_normalize": ["mean", "sum"],
}
# They choose what is shown to a method.
OUTSIDE = {"kl_per_step", "kl_use", "good_token", "bad_token"}


def settings_of(method):
    """The defaults, other numbers in every option, and every word of an option of words."""
    known = dict(method.options())
    assert known.keys() <= OTHERS.keys() | WORDS.keys() | OUTSIDE, method.name
    numbers = {name: value for name, value in OTHERS.items() if name in known}
    words = [{name: word} for name in WORDS if name in known for word in WORDS[name]]
    return [{}, *([numbers] if numbers else []), *(numbers | word for word in words)]


def side(whole, which, seen):
    lp, ref, n, s = (
        values.detach().numpy()[which.numpy()]
        for values in (whole.logps, whole.reference, whole.num_tokens, whole.scores)
    )
    return Side(lp, ref, n, lp - ref, lp / n, s, seen[which.numpy()])


def oracle_losses(method, whole, options, seen):
    good = is_good(whole)
    up, down = side(whole, good, seen), side(whole, ~good, seen)
    losses = ORACLES[method.name](up, down, options)
    if isinstance(losses, tuple):
        return np.stack(losses, axis=1).ravel()
    if not hasattr(options, "sft_weight"):
        return losses
    return losses - options.sft_weight * (up.m if options.sft_normalize == "mean" else up.lp)


def oracle_loss(method, whole, losses):
    tokens = whole.num_tokens.numpy()
    of_good = tokens[is_good(whole).numpy()].sum()
    counts = {"tokens": tokens.sum(), "chosen_tokens": of_good}
    return losses.sum() / counts.get(method.items, len(losses))


@each(
    {
        f"{name} {values}": (method, values)
        for name, method in METHODS.items()
        if method.rows != "grouped"  # those look at single tokens: see test_policy_gradient
        for values in settings_of(method)
    }
)
def test_loss_and_gradient_are_the_formula_and_its_slope(method, values):
    whole, options = random_completions(method.rows, 12), options_of(method, values)
    how = {"mismatched": MISMATCHED, "options": options}
    taken = take(method, whole, **how, assignment=[[4, 11, 1], [], [6, 0, 3, 10, 5], [9, 2, 8, 7]])
    logps = whole.logps.detach().numpy()
    seen = logps - whole.reference.numpy()
    expected = oracle_losses(method, whole, options, seen)
    if method.name not in SORTED:
        np.testing.assert_allclose(taken.losses.numpy(), expected, rtol=1e-10, atol=1e-12)
    assert len(taken.losses) == len(expected)
    assert taken.loss == pytest.approx(oracle_loss(method, whole, expected), rel=1e-10)
    for branch, here in enumerate(logps.copy()):
        around = []
        for nudge in (1e-6, -1e-6):
            logps[branch] = here + nudge
            losses = oracle_losses(method, whole, options, seen)
            around.append(oracle_loss(method, whole, losses))
        logps[branch] = here
        slope = (around[0] - around[1]) / 2e-6
        assert taken.gradient[branch].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
