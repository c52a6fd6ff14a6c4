"""Every method against its formula, written a second time in plain float64."""

from collections import namedtuple
from dataclasses import asdict

import numpy as np
import pytest

from align.stages.methods.recipe import is_good
from align.stages.methods.table import METHODS, options_of
from support.method_steps import MISMATCHED, each, random_branches, take

pytestmark = pytest.mark.numeric

# Of the good or of the bad branches; `seen` is r as a survey before the step found it.
Side = namedtuple("Side", "lp ref n r m s seen")


def S(x):  # noqa: N802 - as the formulas call it
    return 1 / (1 + np.exp(-x))


def LS(x):  # noqa: N802
    return -np.log(1 + np.exp(-x))


def odds(m):
    return np.log(np.exp(m) / (1 - np.exp(m)))


def dpo(up, down, o):
    gap = up.r - down.r
    return -(1 - o.label_smoothing) * LS(o.beta * gap) - o.label_smoothing * LS(-o.beta * gap)


def robust(up, down, o):
    b, e, gap = o.beta, o.label_smoothing, up.r - down.r
    return (-(1 - e) * LS(b * gap) + e * LS(-b * gap)) / (1 - 2 * e)


def exo(up, down, o):
    q, e = S(o.beta * (up.r - down.r)), o.label_smoothing
    return q * (np.log(q) - np.log(1 - e)) + (1 - q) * (np.log(1 - q) - np.log(e))


def hinge(up, down, o):
    return np.maximum(0, 1 - o.beta * (up.r - down.r))


def discopop(up, down, o):
    x = o.beta * (up.r - down.r)
    g = S(x / o.tau)
    return (1 - g) * -LS(x) + g * np.exp(-x)


def ipo(up, down, o):
    by = (up.n, down.n) if o.normalize == "mean" else (1, 1)
    return (up.r / by[0] - down.r / by[1] - 1 / (2 * o.beta)) ** 2


def dpo_norm(up, down, o):
    e, x = o.label_smoothing, o.beta * (up.r / up.n - down.r / down.n)
    return -(1 - e) * LS(x) - e * LS(-x)


def nca(up, down, o):
    b = o.beta
    return -LS(b * up.r) - 0.5 * LS(-b * up.r) - 0.5 * LS(-b * down.r)


def bco_pair(up, down, o):
    return -LS(o.beta * up.r) - LS(-o.beta * down.r)


def sppo(up, down, o):
    return (up.r - 1 / (2 * o.beta)) ** 2 + (down.r + 1 / (2 * o.beta)) ** 2


def apo_zero(up, down, o):
    return 1 - S(o.beta * up.r) + S(o.beta * down.r)


def apo_down(up, down, o):
    return S(o.beta * up.r) + 1 - S(o.beta * (up.r - down.r))


def aot(up, down, o):
    d = np.sort(up.lp - down.lp) - np.sort(up.ref - down.ref)
    return -(1 - o.label_smoothing) * LS(o.beta * d) - o.label_smoothing * LS(-o.beta * d)


def aot_unpaired(up, down, o):
    d = np.sort(up.r) - np.sort(down.r)
    return -(1 - o.label_smoothing) * LS(o.beta * d) - o.label_smoothing * LS(-o.beta * d)


def rpo_sq(up, down, o):
    return (o.beta * (up.r - down.r) - o.eta * (up.s - down.s)) ** 2


def rpo_bwd_kl(up, down, o):
    return kl(S(o.eta * (up.s - down.s)), S(o.beta * (up.r - down.r)))


def rpo_fwd_kl(up, down, o):
    return kl(S(o.beta * (up.r - down.r)), S(o.eta * (up.s - down.s)))


def kl(p, q):
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def reward(up, down, _):
    return -LS(up.lp - down.lp)


def nll(up, o):
    return -up.m if o.nll_scope == "pair" else -up.lp * len(up.lp) / up.n.sum()


def orpo(up, down, o):
    return nll(up, o) - o.lam * LS(odds(up.m) - odds(down.m))


def simpo(up, down, o):
    e, x = o.label_smoothing, o.beta * (up.m - down.m) - o.beta * o.gamma_ratio
    return -(1 - e) * LS(x) - e * LS(-x)


def cpo(up, down, o):
    e, x = o.label_smoothing, o.beta * (up.lp - down.lp)
    return -(1 - e) * LS(x) - e * LS(-x) + o.alpha * nll(up, o)


def slic(up, down, o):
    imitated = up.lp if o.normalize == "sum" else up.m
    return np.maximum(0, o.delta - up.lp + down.lp) - o.lam * imitated


def kto(up, down, o):
    z, b = max(0, np.mean(MISMATCHED)), o.beta
    high, low = o.desirable_weight, o.undesirable_weight
    return high * (1 - S(b * (up.r - z))), low * (1 - S(b * (z - down.r)))


def kto_zero(up, down, o):
    high, low = o.desirable_weight, o.undesirable_weight
    return high * (1 - S(o.beta * up.r)), low * (1 - S(-o.beta * down.r))


def kto_logsigmoid(up, down, o):
    z, b = max(0, np.mean(MISMATCHED)), o.beta
    return -o.desirable_weight * LS(b * (up.r - z)), -o.undesirable_weight * LS(b * (z - down.r))


def apo_zero_unpaired(up, down, o):
    return 1 - S(o.beta * up.r), S(o.beta * down.r)


def bco(up, down, o):
    d = o.beta * np.mean([up.seen, down.seen])
    return -LS(o.beta * up.r - d), -LS(-(o.beta * down.r - d))


def csft(up, down, _):
    return -up.lp, -down.lp


def reward_binary(up, down, _):
    return -LS(up.lp), -LS(-down.lp)


def sft(up, _, __):
    return -up.lp


PAIRED = [robust, exo, hinge, discopop, ipo, dpo_norm, nca, bco_pair, sppo, apo_zero, apo_down]
PAIRED += [dpo, orpo, simpo, cpo, slic, aot, aot_unpaired, rpo_sq, rpo_bwd_kl, rpo_fwd_kl, reward]
LABELLED = [kto, kto_zero, kto_logsigmoid, apo_zero_unpaired, bco, csft, reward_binary]
ORACLES = {oracle.__name__: oracle for oracle in [*PAIRED, *LABELLED, sft]} | {"cdpo": dpo}
# Those whose losses come sorted; what a row of them brings is only told by their sum.
SORTED = {"aot", "aot_unpaired"}
# Those of groups look at single tokens: see test_policy_gradient.
HERE = {name: method for name, method in METHODS.items() if method.rows != "grouped"}

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
WORDS = {"normalize": ["mean", "sum"], "nll_scope": ["pair", "global_tokens"]}
# They choose what is shown to a method.
OUTSIDE = {"kl_per_step", "kl_use", "good_token", "bad_token"}


def settings_of(method):
    """The defaults, other numbers in every option, and every word of an option of words."""
    known = asdict(method.options())
    numbers = {name: value for name, value in OTHERS.items() if name in known}
    words = [{name: word} for name in WORDS if name in known for word in WORDS[name]]
    return [{}, *([numbers] if numbers else []), *words]


CASES = {
    f"{name} {values}": (method, values)
    for name, method in HERE.items()
    for values in settings_of(method)
}


def side(whole, which, seen):
    lp, ref, n, s = (
        values.detach().numpy()[which.numpy()]
        for values in (whole.logps, whole.reference, whole.num_tokens, whole.scores)
    )
    return Side(lp, ref, n, lp - ref, lp / n, s, seen[which.numpy()])


def oracle_losses(method, whole, options, seen=None):
    if seen is None:
        seen = (whole.logps.detach() - whole.reference).numpy()
    good = is_good(whole)
    up, down = side(whole, good, seen), side(whole, ~good, seen)
    losses = ORACLES[method.name](up, down, options)
    if isinstance(losses, tuple):
        return np.stack(losses, axis=1).ravel()
    return losses - getattr(options, "sft_weight", 0) * up.m


def oracle_loss(method, whole, options, seen=None):
    losses = oracle_losses(method, whole, options, seen)
    tokens = whole.num_tokens.numpy()
    of_good = tokens[is_good(whole).numpy()].sum()
    counts = {"tokens": tokens.sum(), "chosen_tokens": of_good}
    return losses.sum() / counts.get(method.items, len(losses))


@each(CASES)
def test_a_method_is_its_formula(method, values):
    whole = random_branches(method.rows, 50)
    options = options_of(method, values)
    taken = take(method, whole, cuts=(11, 30), mismatched=MISMATCHED, options=options)
    expected = oracle_losses(method, whole, options)
    if method.name not in SORTED:
        np.testing.assert_allclose(taken.losses.numpy(), expected, rtol=1e-10, atol=1e-12)
    assert len(taken.losses) == len(expected)
    assert taken.loss == pytest.approx(oracle_loss(method, whole, options), rel=1e-10)


@each(CASES)
def test_the_gradient_is_the_slope_of_the_formula(method, values):
    whole = random_branches(method.rows, 6, seed=1)
    options = options_of(method, values)
    how = {"mismatched": MISMATCHED, "options": options}
    gradient = take(method, whole, **how, assignment=[[4, 1], [], [0, 3, 5], [2]]).gradient.numpy()
    logps = whole.logps.detach().numpy()
    seen = logps - whole.reference.numpy()
    for branch, here in enumerate(logps.copy()):
        slopes = []
        for nudge in (1e-6, -1e-6):
            logps[branch] = here + nudge
            slopes.append(oracle_loss(method, whole, options, seen))
        logps[branch] = here
        slope = (slopes[0] - slopes[1]) / 2e-6
        assert gradient[branch] == pytest.approx(slope, rel=1e-5, abs=1e-7)


@each({name: (method,) for name, method in HERE.items()})
def test_every_option_of_a_method_reaches_its_loss(method):
    whole = random_branches(method.rows, 50)
    before = take(method, whole, mismatched=MISMATCHED).losses
    for name in asdict(method.options()).keys() - OUTSIDE:
        values = [OTHERS[name]] if name in OTHERS else WORDS[name]
        others = [options_of(method, {name: value}) for value in values]
        after = [take(method, whole, mismatched=MISMATCHED, options=one) for one in others]
        assert any((before != other.losses).any() for other in after), name
