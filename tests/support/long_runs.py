"""Folders of trainings that nobody ran: their numbers are drawn, so they may be long."""

import json
import math
import random

import numpy as np

from align.pipeline.options.settings import as_yaml
from align.schemas.batches import EvalSample
from align.schemas.config import Config
from align.schemas.rows import Role
from align.schemas.train_options import TrainOptions
from align.stages.report.eval_table import evaluation_csv
from align.stages.storage.run.run_folder import RunFolder

BEGAN = 1_795_000_000  # seconds since 1970
SECONDS_PER_STEP = 7


def write_long_run(root, *, steps, evaluated=8, **train):
    """A run with a line each ten steps and some evaluations, each with its table."""
    drawn = random.Random(steps)
    folder = RunFolder(root)
    folder.prepare()
    folder.config.write_bytes(
        as_yaml(Config(train=TrainOptions(**{"method": "kto", **train}))).encode()
    )
    lines = []
    for step in range(10, steps + 1, 10):
        share = step / steps
        noise = drawn.gauss(0, 1)
        lines.append(
            {
                "step": step,
                "time": BEGAN + SECONDS_PER_STEP * step,
                "loss": 0.5 - 0.3 * share + 0.05 * noise,
                "rewards/accuracies": min(1, max(0, round(0.5 + 0.4 * share + 0.1 * noise, 1))),
                "rewards/chosen": share + 0.2 * noise,
                "rewards/rejected": -share + 0.2 * drawn.gauss(0, 1),
                "rewards/margins": 2 * share + 0.3 * noise,
                "kl/raw": 0.02 * share + 0.01 * noise,
                "kl/clamped": max(0, 0.02 * share + 0.01 * noise),
                "grad_norm": math.exp(1.2 * noise) * (300 if step == steps // 2 else 1),
                "lr": 5e-6 * min(1, 10 * share) * (1 + math.cos(math.pi * share)) / 2,
                "speed/tokens_per_second": 12_000 + 300 * noise,
                "memory/peak_mib": 20_000,
            }
        )
    for step in sorted({round(steps * part / evaluated) for part in range(evaluated + 1)}):
        share = step / steps
        lines.append(
            {
                "step": step,
                "time": BEGAN + SECONDS_PER_STEP * step + 1,
                "eval/loss": 0.5 - 0.3 * share + 0.25 * share**3,
                "eval/rewards/accuracies": 0.5 + 0.35 * share - 0.1 * share**3,
                "eval/rewards/margins": 1.6 * share,
            }
        )
        _write_table(folder, step)
    lines.sort(key=lambda line: line["time"])
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def _write_table(folder, step):
    drawn = np.random.default_rng(step)
    samples = [
        EvalSample(
            row=row,
            row_id=f"row{row}",
            prompt_key=f"prompt{row}",
            role=role,
            num_tokens=int(drawn.integers(5, 200)),
            logp=-20.0 + sign * 1e-3 * step * drawn.random() + drawn.normal(),
            reference_logp=-20.0,
            reward=sign * 1e-3 * step * drawn.random() + 0.1 * drawn.normal(),
            prompt=None,
            completion=None,
        )
        for row in range(80)
        for role, sign in ((Role.CHOSEN, 1), (Role.REJECTED, -1))
    ]
    path = folder.evaluation(step)
    path.parent.mkdir(exist_ok=True)
    path.write_text(evaluation_csv(samples, "log-ratios", decode=None))
