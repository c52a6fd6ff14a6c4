"""Preference training as a textbook writes it: one row at a time, both models in memory."""

import copy

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from support.rounding import EPSILON, NATS, apart

BETA, LAM = 0.1, 0.1
CLIP, DISTANCE = 0.02, 0.01  # of grpo: epsilon and beta
GOOD, MISMATCHED = {0, 2}, 5  # roles: chosen and desirable; mismatched


def rows_of(cache):
    """Every stored row by its id."""
    tables = [pq.read_table(path).to_pylist() for path in sorted((cache / "data").iterdir())]
    return {row["row_id"]: row for table in tables for row in table}


def token_logps(model, prompt, completion):
    ids = torch.tensor([[*prompt, *completion]])
    logps = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
    return logps.gather(1, torch.tensor(completion)[:, None]).double().flatten()


def logp(model, prompt, completion, turns=None):
    logps = token_logps(model, prompt, completion)
    return sum(one for one, turn in zip(logps, turns or [1] * len(logps), strict=True) if turn > 0)


class Row:
    """Its own completions, and of each the first mismatched partner."""

    def __init__(self, row, model, reference):
        self.row, self.models = row, (model, reference)
        self.own = [index for index, role in enumerate(row["role"]) if role != MISMATCHED]
        self.is_good = [row["role"][index] in GOOD for index in self.own]

    def ratio(self, index):
        sides = [logp(model, *self._tokens(index)) for model in self.models]
        return sides[0] - sides[1].detach()

    def token_ratios(self, index):
        prompt, completion, _ = self._tokens(index)
        policy, reference = (token_logps(model, prompt, completion) for model in self.models)
        return policy - reference.detach()

    def mismatched_ratios(self):
        with torch.no_grad():
            return [self.ratio(index + len(self.own)) for index in self.own]

    def odds(self, index):
        prompt, completion, turns = self._tokens(index)
        count = sum(turn > 0 for turn in turns) if turns else len(completion)
        mean = logp(self.models[0], prompt, completion, turns) / count
        return mean, mean - torch.log(-torch.expm1(mean))

    def _tokens(self, index):
        turns = self.row.get("completion_turns")
        ids = self.row["prompt_ids"], self.row["completion_ids"][index]
        return (*ids, turns[index] if turns else None)


def dpo(rows):
    return [-logsigmoid(BETA * (row.ratio(0) - row.ratio(1))) for row in rows]


def kto(rows):
    mismatched = [ratio for row in rows for ratio in row.mismatched_ratios()]
    z = max(0.0, float(sum(mismatched)) / len(mismatched))
    signed = [
        (1 if good else -1, row.ratio(i)) for row in rows for i, good in enumerate(row.is_good)
    ]
    return [1 - torch.sigmoid(BETA * sign * (ratio - z)) for sign, ratio in signed]


def orpo(rows):
    sides = [(row.odds(0), row.odds(1)) for row in rows]
    return [-mean - LAM * logsigmoid(odds - worse) for (mean, odds), (_, worse) in sides]


def grpo(rows):
    """A loss for every token: the ratio is to what the candidates were drawn by, at any step."""
    losses = []
    for row in rows:
        scores = torch.tensor(row.row["score"][: len(row.own)], dtype=torch.float64)
        for index, gain in enumerate((scores - scores.mean()) / (scores.std() + 1e-4)):
            ratios = row.token_ratios(index)
            p = ratios.exp()
            gained = torch.minimum(gain * p, gain * p.clamp(1 - CLIP, 1 + CLIP))
            losses += (DISTANCE * (1 / p - 1 + ratios) - gained).unbind()
    return losses


LOSSES = {"dpo": dpo, "kto": kto, "orpo": orpo, "grpo": grpo}


def train(model, loss, steps, *, lr, max_norm):
    """Updates the model once for each list of stored rows; returns the losses."""
    reference, losses = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=EPSILON, weight_decay=0.0)
    for rows in steps:
        items = loss([Row(row, model, reference) for row in rows])
        losses.append(torch.stack(items).mean())
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [value.item() for value in losses]


def weights_beside(model, learned, cache, method, steps):
    """Takes the steps of a training anew; its losses and weights must be those of the loop.

    `learned` is the session of the training and what it recorded. Returns the weights of the loop.
    """
    session, recorded = learned
    stored, lr = rows_of(cache), 1e-3
    with session.feed.steps(0) as batches:
        # Alone and with a large budget a step is one micro-batch.
        rows = [[stored[row] for row in next(batches).own[0].row_ids] for _ in range(steps)]
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = train(model, LOSSES[method], rows, lr=lr, max_norm=1.0)
    # Of the slope in a margin, beta / 2, a twentieth of its error is left.
    found = [metrics["loss"] for _, metrics in recorded.steps]
    assert found == pytest.approx(losses, rel=1e-5, abs=NATS / 20)
    weights = dict(model.named_parameters())
    for name, tensor in session.engine.weights().items():
        assert (tensor - weights[name].detach()).abs().max() <= apart(steps * lr), name
    return weights
