"""What both stages cost in GPU-hours at size, beside trainers that keep the reference: computed.

Nothing here is measured. A forward pass costs 2 N operations a token and a forward and a backward
pass 6 N, for N parameters; the GPU does MFU of its 989 TFLOP/s (H100, bfloat16, dense). The sides
are given the same MFU, so the table shows what is computed, not how well. Attention's own products,
checkpointing, padding and the memory of activations are left out on both sides.
"""

import sides

PEAK = 989e12  # operations a second
FORWARD, TRAINING = 2 / 0.55, 6 / 0.40  # operations a parameter and token, by MFU
PROMPT, COMPLETION = 300, 300  # tokens
EPOCHS = 3
STATE, REFERENCE = 16, 2  # bytes: bfloat16 with gradient, float32 copy and two moments; bfloat16
CASES = ((8e9, 60_000), (8e9, 10_000_000), (70e9, 1_000_000))


def main():
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


def row(parameters, pairs, method, *, kl, runs):
    """One line of the table, in GPU-hours and GB."""
    hour = 3600 * PEAK / (parameters * pairs)  # what a token of each pair is multiplied by
    # Ours is scored once, with all completions of a prompt in one tree; then the policy is alone.
    scoring = FORWARD * (PROMPT + (4 if kl else 2) * COMPLETION) / hour
    training = EPOCHS * epoch(PROMPT + 2 * COMPLETION, kl=kl) / hour
    # Theirs runs beside the policy in each epoch, also on KTO's mismatched pairs.
    sharing, theirs = (
        EPOCHS * (epoch(tokens, kl=kl) + (2 if kl else 1) * FORWARD * tokens) / hour
        for tokens in (PROMPT + 2 * COMPLETION, 2 * (PROMPT + COMPLETION))
    )
    ours = scoring + training
    cells = [
        f"{parameters / 1e9:.0f}B x {pairs:,}",
        method,
        *map(shown, (scoring, training, ours, sharing, theirs)),
        f"{1 - ours / sharing:.0%}, {1 - ours / theirs:.0%}",
        *map(shown, (scoring + runs * training, runs * sharing, runs * theirs)),
        *(f"{parameters * size / 1e9:,.0f} GB" for size in (STATE, STATE + REFERENCE)),
    ]
    return f"| {' | '.join(cells)} |"


def epoch(tokens, *, kl):
    """Gradients for the pair, a forward pass alone for what KTO's z is the mean of."""
    return tokens * (TRAINING + (FORWARD if kl else 0))


def shown(value):
    """Hours with a decimal where there are few."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
