"""What `make test-kernels` changes in every process of a test: its threads, and its rounding.

ALIGN_TEST_THREADS is a number of threads. ALIGN_TEST_NOISE is how many times float32's unit in the
last place log-probs, scores and gradients are off at most, as another processor's may be: the same
for the same shape and place, so that what is computed twice is still the same twice.
"""

import os

import torch

from align.stages.engine import deepspeed_engine
from align.stages.model import logprobs, policy, reward_model
from align.stages.model.head import fused_head, fused_head_backward

EPSILON = torch.finfo(torch.float32).eps
THREADS = int(os.environ.get("ALIGN_TEST_THREADS") or 0)
NOISE = float(os.environ.get("ALIGN_TEST_NOISE") or 0)


def noise_like(values, seed):
    """Numbers from -1 to 1 for the places of a tensor, drawn by a hash of place, size and seed."""
    mixed = torch.arange(values.numel(), device=values.device) + values.numel() * 0x5851F42D + seed
    for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        mixed = mixed * factor
        mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    places = ((mixed >> 11) & 0xFFFFF).to(torch.float32)
    return (places / 0x80000 - 1).view(values.shape)


def off(values, seed=0):
    """Each value off by some last places of its own."""
    return values * (1 + NOISE * EPSILON * noise_like(values, seed))


def off_gradient(gradient):
    """Each element that is not 0 off by some last places of a typical one: the terms cancel."""
    bits = gradient.detach().float().contiguous().view(torch.int32)
    seed = (bits & 0x7FFFFF).sum()  # the mantissas, so that twice a gradient is off twice as far
    typical = gradient.norm() / gradient.count_nonzero().clamp_min(1).sqrt()
    shift = NOISE * EPSILON * typical * noise_like(gradient, seed)
    return torch.where(gradient == 0, gradient, gradient + shift.to(gradient.dtype))


def disturb():
    """Puts the noise where stage 1 and stage 2 compute."""
    score_targets, exact_rows = fused_head.score_targets, logprobs._exact_rows
    batch_scores, open_engine = reward_model.batch_scores, deepspeed_engine.open_engine

    def noisy_targets(*given, **named):
        scored = score_targets(*given, **named)
        scored.logps.copy_(off(scored.logps))
        return scored

    def noisy_engine(trained, *given, **named):
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.register_hook(off_gradient)
        return open_engine(trained, *given, **named)

    fused_head.score_targets = fused_head_backward.score_targets = noisy_targets
    logprobs._exact_rows = lambda *given, **named: torch.stack(
        [off(row, seed=1 + number) for number, row in enumerate(exact_rows(*given, **named))]
    )
    reward_model.batch_scores = lambda *given: off(batch_scores(*given), seed=2)
    policy.batch_scores = reward_model.batch_scores
    deepspeed_engine.open_engine = noisy_engine


torch.set_num_threads(THREADS or int(os.environ.get("OMP_NUM_THREADS", "1")))
if NOISE:
    disturb()
