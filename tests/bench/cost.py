"""What both stages cost in GPU-hours at size, beside trainers that keep the reference: computed.

Nothing here is measured. A forward pass costs 2 N operations a token and a forward and a backward
pass 6 N, for N parameters; the GPU does MFU of its 989 TFLOP/s (H100, bfloat16, dense). The sides
are given the same MFU, so the table shows what is computed, not how well. Attention's own products,
checkpointing, padding and the memory of activations are left out on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import sides

PEAK = 989e12  # operations a second
MFU_FORWARD, MFU_TRAINING = 0.55, 0.40
PROMPT, COMPLETION = 300, 300  # tokens
EPOCHS = 3
FORWARD, TRAINING = 2, 6  # operations a parameter and token
WEIGHT_BYTES, STATE_BYTES = 2, 16  # bfloat16; with gradient, float32 copy and two moments: 16
HOUR = 3600
CASES = ((8e9, 60_000), (8e9, 10_000_000), (70e9, 1_000_000))


@dataclass(frozen=True)
class Cost:
    """GPU-hours of a run, and bytes of weights and optimizer state that it holds."""

    scoring: float
    training: float
    state_bytes: float

    @property
    def total(self) -> float:
        """GPU-hours of both."""
        return self.scoring + self.training


def of_align(parameters: float, pairs: int, *, kl: bool) -> Cost:
    """Scored once, with all completions of a prompt in one tree; then the policy alone."""
    scored = pairs * (PROMPT + (4 if kl else 2) * COMPLETION)
    training = EPOCHS * _epoch(parameters, pairs, kl=kl, prompts=1)
    return Cost(_forward(parameters, scored), training, parameters * STATE_BYTES)


def of_online(parameters: float, pairs: int, *, kl: bool, shared_prompt: bool) -> Cost:
    """The reference runs beside the policy in each epoch."""
    prompts = 1 if shared_prompt else 2
    each = prompts * PROMPT + 2 * COMPLETION  # a pair, and as much again for KTO's mismatched one
    scored = EPOCHS * pairs * each * (2 if kl else 1)
    training = EPOCHS * _epoch(parameters, pairs, kl=kl, prompts=prompts)
    return Cost(_forward(parameters, scored), training, parameters * (STATE_BYTES + WEIGHT_BYTES))


def _epoch(parameters: float, pairs: int, *, kl: bool, prompts: int) -> float:
    """Gradients for the pair, a forward pass alone for what KTO's z is the mean of.

    `prompts`: how often a prompt is computed for both of its completions.
    """
    tokens = pairs * (prompts * PROMPT + 2 * COMPLETION)
    learned = TRAINING * parameters * tokens / (MFU_TRAINING * PEAK * HOUR)
    return learned + (_forward(parameters, tokens) if kl else 0)


def _forward(parameters: float, tokens: float) -> float:
    return FORWARD * parameters * tokens / (MFU_FORWARD * PEAK * HOUR)


def main() -> None:
    # Runs are those on one cache, in the last columns.
    runs = sides.options_of(__doc__, runs=10).runs
    beside = ("reference beside it, prompts shared", "reference beside it, as usual")
    heads = ("model x pairs", "method", "scoring, once", "training", "both", *beside, "saved")
    many = (f"{runs} runs", f"{runs} runs, prompts shared", f"{runs} runs, as usual")
    print(f"| {' | '.join((*heads, *many, 'state', 'state beside it'))} |")
    print("|---|---|" + "---:|" * 11)
    for parameters, pairs in CASES:
        for method, kl in (("DPO", False), ("KTO", True)):
            print(row(parameters, pairs, method, kl=kl, runs=runs))


def row(parameters: float, pairs: int, method: str, *, kl: bool, runs: int) -> str:
    """One line of the table, in GPU-hours and GB."""
    ours = of_align(parameters, pairs, kl=kl)
    theirs, sharing = (
        of_online(parameters, pairs, kl=kl, shared_prompt=shared) for shared in (False, True)
    )
    many = ours.scoring + runs * ours.training
    cells = [
        f"{parameters / 1e9:.0f}B x {pairs:,}",
        method,
        *map(shown, (ours.scoring, ours.training, ours.total, sharing.total, theirs.total)),
        f"{1 - ours.total / sharing.total:.0%}, {1 - ours.total / theirs.total:.0%}",
        *map(shown, (many, runs * sharing.total, runs * theirs.total)),
        *(f"{one.state_bytes / 1e9:,.0f} GB" for one in (ours, theirs)),
    ]
    return f"| {' | '.join(cells)} |"


def shown(value: float) -> str:
    """Hours with a decimal where there are few."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
