"""A reward model as a judge: `align score` over samples, in a folder of its own in the output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...schemas.config import CacheOptions, Config
from ...schemas.data_options import DataOptions
from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...stages.model.reference import HfReward
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.output_folder import SCORES
from ...stages.storage.tables import TableFolder
from ..jobs.object_inputs import local_model
from .judges import Candidate, Columns, Judge, Judging, OthersAreNotDone
from .score_rewards import ROWS, Rewarded, rewards_from_model

GROUP = "group_of_samples"  # the column by which scores find their samples again
OPTIONAL = ("tools", "chat_template_kwargs")


def reward_judge(config: Config) -> Judge:
    """The reward model of the settings, known by the digests of its files."""
    if not config.rewards.model:
        raise UsageError("judge.by reward: name the reward model by --reward-model DIR.")
    model = replace(config.model, path=local_model(config.rewards.model), adapter="")
    name = digest(dict(HfReward(model, own_digests()).identity()))
    return Judge({"judge": name}, partial(_columns, config, name))


def _columns(
    config: Config, name: str, candidates: Sequence[Candidate], judging: Judging
) -> Columns:
    """The score of each sample that is not blank; equal ones of a prompt are scored once."""
    # Each prompt with its different samples, as a row of data.
    groups: dict[str, dict[str, Any]] = {}
    for one in candidates:
        if one.text.strip():
            new = {"prompt": one.row["prompt"], "completions": [], GROUP: len(groups)}
            new |= {column: one.row[column] for column in OPTIONAL if one.row.get(column)}
            group = groups.setdefault(one.prompt_key, new)
            if one.row["completion"] not in group["completions"]:
                group["completions"].append(one.row["completion"])
    lines = "".join(f"{json.dumps(group, ensure_ascii=False)}\n" for group in groups.values())

    # These samples have a folder among those of this model, and reuse the scores of the others.
    answers = TableFolder.at(config.judge.output, "judged").answers(config.judge.answers)
    home = answers / "reward" / name[:16]
    folder = home / hashlib.sha256(lines.encode()).hexdigest()[:16]
    samples, scored = folder / "samples.jsonl", "scored"
    for path in (*reversed([one for one in home.parents if not one.exists()]), home, folder):
        fs.make_folder(path)
    if not samples.exists():
        fs.publish(samples, lines.encode())
    earlier = [path.parent / SCORES for path in sorted(home.glob(f"*/{scored}/{ROWS}"))]
    made = rewards_from_model(
        replace(
            config,
            data=DataOptions(files=[str(samples)], carry=[GROUP], max_bad_frac=1.0),
            cache=CacheOptions(
                reuse=[str(one) for one in earlier if one.parent.parent != folder],
                reuse_known=config.cache.reuse_known,
            ),
            rewards=replace(config.rewards, output=str(folder / scored)),
            scoring=replace(config.scoring, executor="inline"),  # a judge has parts alone
            tracking=config.tracking.none(),  # the judge has a run of its own
        ),
        lambda options: HfReward(options, own_digests()),
        progress=judging.progress,
        part=judging.part,
    )
    if not isinstance(made, Rewarded):
        raise OthersAreNotDone
    judging.tally.new += made.scored
    judging.tally.known += made.completions - made.scored

    scores = dict[tuple[str, str], float]()
    keys = [*groups]
    for line in made.path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        key = keys[int(row[GROUP])]
        for completion, score in zip(groups[key]["completions"], row["scores"], strict=True):
            scores[key, json.dumps(completion, sort_keys=True)] = score
    found = (
        scores.get((one.prompt_key, json.dumps(one.row["completion"], sort_keys=True)))
        for one in candidates
    )
    return {"score": [*found]}
