"""Optimizers written out in float64, one parameter at a time."""

from functools import cache

import torch

from support.engine_ranks import OPTIONS, STEPS, WEIGHTS, global_tokens, rows_of
from support.tiny_policy import TinyPolicy


def lion(weight, gradient, state, lr, decay):
    moment = state.setdefault("moment", torch.zeros_like(weight))
    mixed = OPTIONS.beta1 * moment + (1 - OPTIONS.beta1) * gradient
    assert ((mixed.abs() > 1e-9) | (mixed == 0)).all()  # else its sign may be that of rounding
    direction = torch.sign(mixed)
    state["moment"] = OPTIONS.beta2 * moment + (1 - OPTIONS.beta2) * gradient
    return weight - lr * (direction + decay * weight)


def adamw(weight, gradient, state, lr, decay):
    b1, b2 = OPTIONS.beta1, OPTIONS.beta2
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = b1 * state.get("m", 0 * weight) + (1 - b1) * gradient
    v = state["v"] = b2 * state.get("v", 0 * weight) + (1 - b2) * gradient**2
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + OPTIONS.epsilon)
    return weight - lr * (step + decay * weight)


def muon(weight, gradient, state, lr, decay, *, is_inner):
    """The polynomial of the singular values, which an exact decomposition gives."""
    if not is_inner:
        return adamw(weight, gradient, state, lr, decay)
    m = state["m"] = 0.95 * state.get("m", 0 * weight) + 0.05 * gradient
    left, sizes, right = torch.linalg.svd(0.05 * gradient + 0.95 * m, full_matrices=False)
    sizes = sizes / sizes.norm()
    for _ in range(5):
        sizes = 3.4445 * sizes - 4.7750 * sizes**3 + 2.0315 * sizes**5
    scale = 0.2 * max(weight.shape) ** 0.5
    return weight - lr * (scale * left @ torch.diag(sizes) @ right + decay * weight)


@cache
def slowly(rule):
    """Six steps of whole batches: the weights, and the norm of each gradient.

    Vectors have no weight decay.
    """
    policy, norms = TinyPolicy(dtype=torch.float64), []
    states = {parameter: {} for parameter in policy.parameters()}
    for step, (_, _, lr) in enumerate(STEPS):
        rows = rows_of(step)
        (-policy(rows).sum() / global_tokens(rows)).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIONS.max_grad_norm)
        norms.append(norm.item())
        for parameter, state in states.items():
            decay = OPTIONS.weight_decay if parameter.ndim > 1 else 0.0
            how = {"is_inner": parameter is policy.model.hidden.weight} if rule is muon else {}
            parameter.data = rule(parameter.data, parameter.grad, state, lr, decay, **how)
            parameter.grad = None
    return dict(policy.model.named_parameters()), norms


RULES = {"adamw": adamw, "lion": lion, "muon": muon}


def require_steps(name, found, *, rtol=0.0, atol=WEIGHTS):
    """The weights after six steps are those of the slow rule."""
    for key, parameter in slowly(RULES[name])[0].items():
        weight = torch.tensor(found[key][1], dtype=torch.float64)
        torch.testing.assert_close(weight, parameter.detach(), rtol=rtol, atol=atol)
