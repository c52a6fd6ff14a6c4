"""KTO in straight lines of PyTorch: both models in memory, one sequence at a time, no `align`.

    python kto_step.py MODEL ROWS.jsonl

MODEL is the reference, a Hugging Face folder, and ROWS has `prompt`, `chosen` and `rejected` as
plain text. All rows make one optimizer step. Its numbers are printed with the names that they have
in the `metrics.jsonl` of `align train`. A test compares both, and the weights after the step.
"""

import argparse
import json
import math
import sys
from array import array
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", type=Path)
parser.add_argument("rows", type=Path)
parser.add_argument("--policy", type=Path, help="initial policy (default: the reference)")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--beta", type=float, default=0.1)
parser.add_argument("--epsilon", type=float, default=1e-8, help="of AdamW")
given = parser.parse_args()


# 1. The rows as token ids.
#
# Prompt and completion are tokenized together. The completion is the tokens after the prompt, and
# ends with one EOS.

tokenizer = AutoTokenizer.from_pretrained(given.model)
SIDES = ("chosen", "rejected")


def encode(row: dict[str, str]) -> dict[str, list[int]]:
    """The token ids of a row's prompt and of its two completions."""
    prompt, ids = row["prompt"], {"prompt": tokenizer(row["prompt"]).input_ids}
    for side in SIDES:
        whole, start = tokenizer(prompt + row[side]).input_ids, len(ids["prompt"])
        if whole[:start] != ids["prompt"]:
            sys.exit(f"A token spans the end of the prompt: {prompt[-20:]!r} + {row[side][:20]!r}")
        ids[side] = [*whole[start:], tokenizer.eos_token_id]
    return ids


texts = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
rows = [(text["prompt"], encode(text)) for text in texts]


# 2. KL completions: each prompt also gets a completion of another prompt.
#
# Rows are ordered by a hash of their prompt, so the order of the file does not matter. Rows of one
# prompt have the same hash, and are ordered by a digest of the whole row.


def sort_key(row: tuple[str, dict[str, list[int]]]) -> tuple[int, bytes]:
    """The key by which rows are sorted."""
    prompt, ids = row
    # A prompt is its text, its tools and its template's options; here it is only text.
    content = json.dumps([prompt, None, {}], separators=(",", ":"))
    key = blake2b(content.encode(), digest_size=16, person=b"align prompt").digest()
    parts = [key + array("i", ids["prompt"]).tobytes()]
    parts += [blake2b(array("i", ids[side]).tobytes(), digest_size=16).digest() for side in SIDES]
    parts += [bytes([0, 1]), array("d", [math.nan, math.nan]).tobytes()]  # roles, no scores
    head = f"{len(parts[0])},2,16,0;".encode()  # bytes, completions, bytes of scores, no columns
    row_digest = blake2b(b"".join((head, *parts)), digest_size=16).digest()
    return int.from_bytes(key[:8], "big"), row_digest


rows.sort(key=sort_key)
prompts = [prompt for prompt, _ in rows for _ in SIDES]
prompt_ids = [ids["prompt"] for _, ids in rows for _ in SIDES]
completions = [ids[side] for _, ids in rows for side in SIDES]
is_desirable = [side == "chosen" for _ in rows for side in SIDES]

# A circular shift by the largest number of completions of one prompt: it always reaches a
# completion of another prompt, the partner.
count, longest = len(completions), max(Counter(prompts).values())
if count >= 64 or 2 * longest > count:
    sys.exit("Give fewer than 64 completions; no prompt may have more than half of them.")
partners = [(j + longest) % count for j in range(count)]


def differ(j: int, other: int) -> bool:
    """Whether a completion may be scored under the prompt of another one."""
    return prompts[j] != prompts[other] and completions[j] != completions[other]


# If the partner has the same text, the completion exchanges partners with the next one that can.
for j in range(count):
    for other in [*range(j + 1, count), *range(j)]:
        mine, theirs = partners[j], partners[other]
        if completions[mine] != completions[j]:
            break
        if differ(theirs, j) and differ(mine, other):
            partners[j], partners[other] = theirs, mine
if not all(differ(j, partners[j]) for j in range(count)):
    sys.exit("Too many completions are the same text: some completion has no partner.")

pairs = list(zip(prompt_ids, completions, strict=True))
mismatched = [(prompt_ids[j], completions[partners[j]]) for j in range(count)]


# 3. The reference's log-probs of all completions and KL completions.

reference = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)


def logp(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """The log-prob of all tokens of a completion, (): the logits before a token predict it."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    of_tokens = log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])
    return of_tokens.double().sum()


with torch.no_grad():
    reference_logps = [logp(reference, *pair) for pair in pairs]
    mismatched_reference_logps = [logp(reference, *pair) for pair in mismatched]


# 4. The steps.
#
#     r    = log policy(y | x) - log reference(y | x)
#     z    = max(0, mean of r over the KL completions), without a gradient
#     loss = mean of  1 - sigmoid(beta (r - z))  if y is desirable
#                     1 - sigmoid(beta (z - r))  if it is not

folder = given.policy or given.model
policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), lr=given.lr, eps=given.epsilon, weight_decay=0.0)
history = []
for step in range(1, given.steps + 1):
    with torch.no_grad():
        mismatched_logps = [logp(policy, *pair) for pair in mismatched]
    kl = (torch.stack(mismatched_logps) - torch.stack(mismatched_reference_logps)).mean()
    z = kl.clamp(min=0)

    ratios = torch.stack([logp(policy, *pair) for pair in pairs]) - torch.stack(reference_logps)
    signs = torch.tensor([1.0 if good else -1.0 for good in is_desirable], dtype=torch.float64)
    loss = (1 - torch.sigmoid(given.beta * signs * (ratios - z))).mean()

    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()

    rewards = given.beta * ratios.detach()
    numbers = {
        "step": step,
        "loss": loss.item(),
        "kl/raw": float(kl),
        "kl/clamped": float(z),
        "rewards/chosen": float(rewards[signs > 0].mean()),
        "rewards/rejected": float(rewards[signs < 0].mean()),
        "grad_norm": float(norm),
    }
    history.append(numbers)
    print("  ".join(f"{name} {value:.6g}" for name, value in numbers.items()))
