"""Optimizers written out in float64, one parameter at a time."""

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


def adafactor(weight, gradient, state, lr, decay):
    t = state["t"] = state.get("t", 0) + 1
    kept, square = 1 - t**-0.8, gradient**2 + 1e-30
    if weight.ndim < 2:
        v = state["v"] = kept * state.get("v", 0) + (1 - kept) * square
    else:
        row = state["row"] = kept * state.get("row", 0) + (1 - kept) * square.mean(1)
        column = state["column"] = kept * state.get("column", 0) + (1 - kept) * square.mean(0)
        v = torch.outer(row, column) / row.mean()
    update = gradient / v.sqrt()
    update = update / max(1.0, update.square().mean().sqrt().item())
    return weight - lr * (update + decay * weight)


def slowly(rule):
    """The six steps in float64, one parameter at a time; vectors have no weight decay."""
    policy = TinyPolicy(dtype=torch.float64)
    states = {parameter: {} for parameter in policy.parameters()}
    for step, (_, _, lr) in enumerate(STEPS):
        rows = rows_of(step)
        (-policy(rows).sum() / global_tokens(rows)).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIONS.max_grad_norm)
        for parameter, state in states.items():
            decay = OPTIONS.weight_decay if parameter.ndim > 1 else 0.0
            how = {"is_inner": parameter is policy.model.hidden.weight} if rule is muon else {}
            parameter.data = rule(parameter.data, parameter.grad, state, lr, decay, **how)
            parameter.grad = None
    return dict(policy.model.named_parameters())


RULES = {"adamw": adamw, "lion": lion, "muon": muon, "adafactor": adafactor}


def require_steps(name, found):
    """The weights after six steps are those of the slow rule."""
    for key, parameter in slowly(RULES[name]).items():
        weight = torch.tensor(found[key][1], dtype=torch.float64)
        torch.testing.assert_close(weight, parameter.detach(), rtol=0, atol=WEIGHTS)
