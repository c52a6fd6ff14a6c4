"""A language model as a judge: it grades samples, or compares pairs of them in both orders."""

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
    Sampler,
    SampleRequest,
    Sampling,
)
from ...stages.judge.template import load_template
from ...stages.judge.verdicts import EQUAL_TEXTS, Comparison, score_in, verdict_in
from ...stages.judge.win_rate import OUTCOMES
from ...stages.storage.answers import Answers
from ...stages.storage.tables import TableFolder, read_table
from ..parts import WHOLE
from .judges import Candidate, Columns, Judge, JudgeContext, Pair, PartsPending, candidates_of
from .samplers import missing_groups, sampler_of

# A sample, and the answers that the judge reads, in order: its own, or those of a pair.
Question: TypeAlias = "tuple[Candidate, tuple[str, ...]]"
STORED = ("text", "finish", "prompt_tokens", "completion_tokens")  # fields of an answer


def require_language_model(config: Config) -> None:
    """Refuses settings that name no language model."""
    if not (config.judge.model or config.server.url):
        raise UsageError(
            f"judge.by {config.judge.by} needs a language model. Name its folder by --model DIR "
            "(judge.model), or its server by --server URL (server.url)."
        )


def judge_sampler(config: Config) -> Sampler:
    """The language model of the settings; sends no request to a server yet."""
    require_language_model(config)
    model = replace(config.model, path=config.judge.model, adapter="")
    return sampler_of(replace(config, model=model))


def language_judge(config: Config, sampler: Sampler | None) -> Judge:
    """The rubric or pairwise judge of the settings; `sampler` replaces their language model."""
    judge, options = LanguageJudge(config, sampler), config.judge
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.by == "rubric":
        return Judge(judge.made_from, judge.grade, settings)
    if not options.against:
        settings["pairs"] = options.pairs
    return Judge(judge.made_from, judge.rank, settings, judge.compare)


class LanguageJudge:
    """A language model with a prompt template; requests missing answers, and reads verdicts."""

    def __init__(self, config: Config, sampler: Sampler | None) -> None:
        self.config = config
        options = config.judge
        self.template = load_template(options.by, options.template)
        self.sampler = sampler or judge_sampler(config)
        self.sampling = Sampling(temperature=0.0, max_new_tokens=options.max_new_tokens)
        identity = dict(self.sampler.identity())
        # Part of the key of every stored answer.
        self.name = digest([self.template.digest, asdict(self.sampling), identity])
        self.made_from = {"judge": digest(identity), "template": self.template.digest}
        self.opened: OpenSampler | None = None
        self.others: dict[tuple[str, int], Candidate] | None = None
        if options.against:
            manifest, table = read_table(TableFolder.at(options.against, "samples"))
            self.made_from["against"] = manifest.root
            self.others = {one.key: one for one in candidates_of(table, options.against)}

    def grade(self, candidates: Sequence[Candidate], context: JudgeContext) -> Columns:
        """The score of each sample, from 1 to 10; None for a refusal."""
        verdicts = self.verdicts([(one, (one.text,)) for one in candidates], context)
        return {"score": [None if one is None else float(one) for one in verdicts]}

    def rank(self, candidates: Sequence[Candidate], context: JudgeContext) -> Columns:
        """Wins, ties and losses of each sample; its score is the share of wins, ties as half."""
        pairs = self._pairs(candidates)
        outcomes = {
            "first": ("wins", "losses"),
            "tie": ("ties", "ties"),
            "second": ("losses", "wins"),
        }
        counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        for (first, second), found in zip(pairs, self.compare(pairs, context), strict=True):
            if found.winner:
                first_outcome, second_outcome = outcomes[found.winner]
                counts[first.key][first_outcome] += 1
                if self.others is None:  # otherwise the second sample is of another table
                    counts[second.key][second_outcome] += 1
        scores: list[float | None] = []
        for one in candidates:
            own = counts[one.key]
            scores.append((own["wins"] + own["ties"] / 2) / own.total() if own else None)
        outcome_columns = {name: [counts[one.key][name] for one in candidates] for name in OUTCOMES}
        return {"score": scores, **outcome_columns}

    def _pairs(self, candidates: Sequence[Candidate]) -> list[Pair]:
        """The pairs to compare: within each prompt, or with the samples of judge.against."""
        options = self.config.judge
        if self.others is not None:
            pairs = [(one, self.others[one.key]) for one in candidates if one.key in self.others]
            if not pairs:
                raise UsageError(
                    f"judge.against {options.against} has no sample of the same prompts and "
                    "numbers. Name samples of the same prompts."
                )
            return pairs
        prompts: dict[str, list[Candidate]] = {}
        for one in sorted(candidates, key=lambda one: one.number):
            prompts.setdefault(one.prompt_key, []).append(one)
        pairs = []
        for own in prompts.values():
            if options.pairs == "first":
                pairs += [(own[0], one) for one in own[1:]]
            else:
                pairs += combinations(own, 2)
        if not pairs:
            raise UsageError(
                "judge.by pairwise: no prompt has two samples. Sample more, or name other samples "
                "by --against."
            )
        return pairs

    def compare(self, pairs: Sequence[Pair], context: JudgeContext) -> list[Comparison]:
        """The verdicts on pairs in both orders; equal texts are a tie without a question."""
        questions: list[Question] = []
        for first, second in pairs:
            if first.text != second.text:
                questions.append((first, (first.text, second.text)))
                questions.append((first, (second.text, first.text)))
        verdicts = iter(self.verdicts(questions, context))
        compared = [
            EQUAL_TEXTS if first.text == second.text else Comparison(next(verdicts), next(verdicts))
            for first, second in pairs
        ]
        context.counts.of_table |= {
            "comparisons": len(compared),
            "comparisons_tied": sum(one.winner == "tie" for one in compared),
            "comparisons_of_equal_texts": sum(one.has_equal_texts for one in compared),
            "comparisons_refused": sum(one.winner is None for one in compared),
        }
        return compared

    def verdicts(self, questions: Sequence[Question], context: JudgeContext) -> list[Any]:
        """The verdict on each question; None for a refusal.

        An answer is stored under a hash of all that determines it, so it is paid for once.
        """
        keys = []
        for candidate, texts in questions:
            hashes = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
            keys.append(digest(["judgment", self.name, candidate.prompt_key, hashes])[:KEY_LENGTH])
        keyed = dict(zip(keys, questions, strict=True))
        options, counts, part = self.config.judge, context.counts, context.part or WHOLE
        answers = Answers(TableFolder.at(options.output, "judged").answers(options.answers))
        missing = answers.missing(keyed)
        counts.known += len(keyed) - len(missing)
        if missing:
            own, progress = [*keyed][part.number - 1 :: part.count], context.progress
            progress.begin("judging", total=len(own), unit="questions")
            for group in missing_groups(answers, own, sampler=self.sampler, progress=progress):
                self._request({key: keyed[key] for key in group}, answers, context)
                context.run.log_metrics(counts.metrics(), step=counts.new)
            progress.end()
            answers.look()
        not_taken = answers.refused(keyed)
        if len(not_taken) < len(answers.missing(keyed)):
            raise PartsPending
        if not_taken:
            refused = f"The judge refuses {len(not_taken):,} of {counted(len(keyed), 'questions')}"
            reason = next(iter(not_taken.values()))
            if len(not_taken) == len(keyed):
                raise UsageError(
                    f"{refused} (judge.by {options.by}): {reason}. Change the setting, or use "
                    "another model."
                )
            logger.warning("%s. The reason for the first: %s", refused, reason)

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

    def _request(
        self, questions: dict[str, Question], answers: Answers, context: JudgeContext
    ) -> None:
        """Requests the answers to questions; an answer is durable before it is counted."""
        requests: dict[str, SampleRequest] = {}
        keys: dict[str, list[str]] = {}  # several questions may have the same prompt
        for key, (candidate, texts) in questions.items():
            prompt = self.template.render(candidate.prompt, texts)
            requests[prompt.key] = SampleRequest(prompt, (0,))
            keys.setdefault(prompt.key, []).append(key)
        self.opened = self.opened or self.sampler.open(self.sampling)
        for group in self.opened.sample([*requests.values()]):
            given: dict[str, dict[str, Any]] = {}
            refused: dict[str, str] = {}
            prompt_tokens = completion_tokens = 0
            for one in group:
                if isinstance(one, Refused):
                    refused |= dict.fromkeys(keys[one.prompt], one.reason)
                    continue
                answer = {name: getattr(one, name) for name in STORED}
                given |= dict.fromkeys(keys[one.prompt], answer)
                prompt_tokens += one.prompt_tokens
                completion_tokens += one.completion_tokens
            answers.add(given, refused)
            context.counts.new += len(given)
            context.counts.prompt_tokens += prompt_tokens
            context.counts.completion_tokens += completion_tokens
            context.progress.advance(len(given) + len(refused), tokens=completion_tokens)
