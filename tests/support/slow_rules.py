"""AdamW written out in float64, one parameter at a time."""

from functools import cache

import torch

from support.engine_ranks import OPTIONS, STEPS, WEIGHTS, global_tokens, rows_of
from support.tiny_policy import TinyPolicy


def adamw(weight, gradient, state, lr, decay):
    b1, b2 = OPTIONS.beta1, OPTIONS.beta2
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = b1 * state.get("m", 0 * weight) + (1 - b1) * gradient
    v = state["v"] = b2 * state.get("v", 0 * weight) + (1 - b2) * gradient**2
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + OPTIONS.epsilon)
    return weight - lr * (step + decay * weight)


@cache
def slowly():
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
            parameter.data = adamw(parameter.data, parameter.grad, state, lr, decay)
            parameter.grad = None
    return dict(policy.model.named_parameters()), norms


def require_steps(found, *, rtol=0.0, atol=WEIGHTS):
    """The weights after six steps are those of the slow rule."""
    for key, parameter in slowly()[0].items():
        weight = torch.tensor(found[key][1], dtype=torch.float64)
        torch.testing.assert_close(weight, parameter.detach(), rtol=rtol, atol=atol)
