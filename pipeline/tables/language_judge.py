"""A language model as a judge: it grades samples, or compares two of them in both orders."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any, TypeAlias

from ...schemas.config import Config
from ...schemas.errors import UsageError, counted, logger
from ...schemas.json_codec import digest
from ...schemas.samples import (
    KEY_LENGTH,
    OpenSampler,
    Refused,
    Sample,
    Sampler,
    Sampling,
    Wanted,
)
from ...stages.judge.template import load_template
from ...stages.judge.verdicts import SAME, Compared, score_in, verdict_in
from ...stages.judge.win_rate import OUTCOMES
from ...stages.storage.answers import Answers
from ...stages.storage.tables import TableFolder, read_table
from ..parts import WHOLE
from .judges import Candidate, Columns, Judge, JudgeContext, OthersAreNotDone, Pair, candidates_of
from .samplers import sampler_of, unknown

# A sample, and the texts that the judge sees of it: its own, or two in their order.
Question: TypeAlias = "tuple[Candidate, tuple[str, ...]]"
KEPT = ("text", "finish", "prompt_tokens", "completion_tokens")  # of an answer


def require_language_model(config: Config) -> None:
    """Refuses settings that name no model."""
    if not (config.judge.model or config.server.url):
        raise UsageError(
            f"judge.by {config.judge.by}: name the language model: its folder by --model DIR "
            "(judge.model), or its server by --server URL (server.url)."
        )


def judge_sampler(config: Config) -> Sampler:
    """The language model that the settings name; asks a server nothing."""
    require_language_model(config)
    model = replace(config.model, path=config.judge.model, adapter="")
    return sampler_of(model, config.tokens, config.server, config.scoring)


def language_judge(config: Config, sampler: Sampler | None) -> Judge:
    """The model of the settings, or the one that is given."""
    asker, options = Asker(config, sampler), config.judge
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.by == "rubric":
        return Judge(asker.made_from, asker.grade, settings)
    if not options.against:
        settings["pairs"] = options.pairs
    return Judge(asker.made_from, asker.rank, settings, asker.compare)


class Asker:
    """A language model with its template: asks what has no answer yet, and reads the verdicts."""

    def __init__(self, config: Config, sampler: Sampler | None) -> None:
        self.config = config
        options = config.judge
        self.template = load_template(options.by, options.template)
        self.sampler = sampler or judge_sampler(config)
        self.sampling = Sampling(temperature=0.0, max_new_tokens=options.max_new_tokens)
        identity = dict(self.sampler.identity())
        self.name = digest([self.template.digest, asdict(self.sampling), identity])
        self.made_from = {"judge": digest(identity), "template": self.template.digest}
        self.opened: OpenSampler | None = None
        self.others: dict[tuple[str, int], Candidate] | None = None
        if options.against:
            manifest, table = read_table(TableFolder.at(options.against, "samples"))
            self.made_from["against"] = manifest.root
            self.others = {one.key: one for one in candidates_of(table, options.against)}

    def grade(self, candidates: Sequence[Candidate], context: JudgeContext) -> Columns:
        """The score of each sample, from 1 to 10; none for a refusal."""
        found = self.verdicts([(one, (one.text,)) for one in candidates], context)
        return {"score": [None if one is None else float(one) for one in found]}

    def rank(self, candidates: Sequence[Candidate], context: JudgeContext) -> Columns:
        """Wins, ties and losses, and the share of comparisons won; a tie is half a win."""
        pairs = self._pairs(candidates)
        outcomes = {
            "first": ("wins", "losses"),
            "tie": ("ties", "ties"),
            "second": ("losses", "wins"),
        }
        standings: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        for (first, second), found in zip(pairs, self.compare(pairs, context), strict=True):
            if found.winner:
                own_outcome, others_outcome = outcomes[found.winner]
                standings[first.key][own_outcome] += 1
                if self.others is None:  # else the second is not a sample of this table
                    standings[second.key][others_outcome] += 1
        rows = [standings[one.key] for one in candidates]
        scores = [(own["wins"] + own["ties"] / 2) / own.total() if own else None for own in rows]
        return {"score": scores, **{name: [own[name] for own in rows] for name in OUTCOMES}}

    def _pairs(self, candidates: Sequence[Candidate]) -> list[Pair]:
        """All samples of a prompt, or each with the first, or with another table's same one."""
        options = self.config.judge
        missing = "no prompt has two samples: sample more, or name others by --against"
        prompts: dict[str, list[Candidate]] = {}
        for one in sorted(candidates, key=lambda one: one.number):
            prompts.setdefault(one.prompt_key, []).append(one)
        if self.others is not None:
            missing = f"{options.against} has no sample of the same prompts and numbers"
            pairs = [(one, self.others[one.key]) for one in candidates if one.key in self.others]
        elif options.pairs == "first":
            pairs = [(own[0], other) for own in prompts.values() for other in own[1:]]
        else:
            pairs = [pair for own in prompts.values() for pair in combinations(own, 2)]
        if not pairs:
            raise UsageError(f"judge.by pairwise: there is nothing to compare: {missing}.")
        return pairs

    def compare(self, pairs: Sequence[Pair], context: JudgeContext) -> list[Compared]:
        """The verdicts on pairs in both orders; equal texts are a tie and are not asked."""
        asked: list[Question] = []
        for first, second in pairs:
            if first.text != second.text:
                asked += [(first, (first.text, second.text)), (first, (second.text, first.text))]
        verdicts = iter(self.verdicts(asked, context))
        compared = [
            SAME if first.text == second.text else Compared(next(verdicts), next(verdicts))
            for first, second in pairs
        ]
        context.counts.of_table |= {
            "comparisons": len(compared),
            "comparisons_tied": sum(one.winner == "tie" for one in compared),
            "comparisons_of_equal_texts": sum(not one.was_asked for one in compared),
            "comparisons_refused": sum(one.winner is None for one in compared),
        }
        return compared

    def verdicts(self, questions: Sequence[Question], context: JudgeContext) -> list[Any]:
        """The verdict on each question; None for a refusal.

        A question is asked once: the key of its answer is a hash of all that determines it.
        """
        keys = []
        for asked, texts in questions:
            hashes = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
            keys.append(digest(["judgment", self.name, asked.prompt_key, hashes])[:KEY_LENGTH])
        keyed = dict(zip(keys, questions, strict=True))
        options, counts, part = self.config.judge, context.counts, context.part or WHOLE
        answers = Answers(TableFolder.at(options.output, "judged").answers(options.answers))
        missing = answers.missing(keyed)
        counts.known += len(keyed) - len(missing)
        if missing:
            own = [*keyed][part.number - 1 :: part.count]
            context.progress.begin("judging", total=len(own), unit="questions")
            for some in unknown(answers, own, sampler=self.sampler, progress=context.progress):
                self._ask({key: keyed[key] for key in some}, answers, context)
                context.run.log_metrics(counts.metrics(), step=counts.new)
            context.progress.end()
            answers.look()
        not_taken = answers.refused(keyed)
        if len(not_taken) < len(answers.missing(keyed)):
            raise OthersAreNotDone
        if not_taken:
            refused = f"the judge refuses {len(not_taken):,} of {counted(len(keyed), 'questions')}"
            reason = next(iter(not_taken.values()))
            if len(not_taken) == len(keyed):
                raise UsageError(
                    f"judge.by {options.by}: {refused}: {reason}. Change the setting or the "
                    "model that it names."
                )
            logger.warning("%s, the first with: %s", refused, reason)

        read = score_in if self.template.kind == "rubric" else verdict_in
        verdicts: dict[str, Any] = dict.fromkeys(not_taken)
        totals = {
            "judgments": len(keyed) - len(not_taken),
            "questions_not_taken": len(not_taken),
            "refusals": 0,
            "judge_prompt_tokens": 0,
            "judge_completion_tokens": 0,
        }
        for key, answer in answers.of(keyed):
            verdicts[key] = read(answer)
            totals["refusals"] += verdicts[key] is None
            totals["judge_prompt_tokens"] += answer["prompt_tokens"]
            totals["judge_completion_tokens"] += answer["completion_tokens"]
        counts.of_table |= totals
        return [verdicts[key] for key in keys]

    def _ask(self, questions: dict[str, Question], answers: Answers, context: JudgeContext) -> None:
        """Asks questions; an answer is durable before it counts."""
        wanted: dict[str, Wanted] = {}
        keys: dict[str, list[str]] = {}  # two questions may be the same to the judge
        for key, (asked, texts) in questions.items():
            prompt = self.template.filled(asked.prompt, texts)
            wanted[prompt.key] = Wanted(prompt, (0,))
            keys.setdefault(prompt.key, []).append(key)
        self.opened = self.opened or self.sampler.open(self.sampling)
        for group in self.opened.sample([*wanted.values()]):
            samples = [one for one in group if isinstance(one, Sample)]
            given: dict[str, dict[str, Any]] = {}
            for sample in samples:
                answer = {name: getattr(sample, name) for name in KEPT}
                given |= dict.fromkeys(keys[sample.prompt], answer)
            refused: dict[str, str] = {}
            for one in group:
                if isinstance(one, Refused):
                    refused |= dict.fromkeys(keys[one.prompt], one.reason)
            answers.add(given, refused)
            tokens = sum(one.completion_tokens for one in samples)
            context.counts.new += len(given)
            context.counts.prompt_tokens += sum(one.prompt_tokens for one in samples)
            context.counts.completion_tokens += tokens
            context.progress.advance(len(given) + len(refused), tokens=tokens)
