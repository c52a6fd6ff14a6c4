"""A judge without a model: it prefers the larger number, or at times what stands first."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from align.schemas.samples import Refused, Sample, Sampler

PARTS = re.compile(r"\[\w+ answer(?: [AB])?\]\n(.*?)\n\[\w+ end\]", re.DOTALL)


@dataclass
class StubJudge(Sampler):
    """Both a sampler and an open one; `said` counts the questions by their text."""

    bias: float = 0.0  # the share of questions in which it prefers what stands first
    says: dict[str, str] = field(default_factory=dict)  # what it answers to a text with these words
    finish: str = "stop"
    name: str = "stub"
    longest: int = 10**9  # characters of a question that it takes
    stops_after: int | None = None  # groups
    asked: list = field(default_factory=list)

    device = "cpu"

    def identity(self):
        return {"judge": self.name, "bias": str(self.bias)}

    def open(self, sampling):
        assert sampling.temperature == 0
        return self

    def sample(self, wanted: Sequence):
        for start in range(0, len(wanted), 3):
            if self.stops_after is not None and len(self.asked) >= self.stops_after:
                raise KeyboardInterrupt
            yield [self._answer(one) for one in wanted[start : start + 3]]

    def _answer(self, wanted):
        assert wanted.numbers == (0,)
        self.asked.append(wanted.prompt)
        text = wanted.prompt.text[-1]["content"]
        if len(text) > self.longest:
            return Refused(wanted.prompt.key, 0, "too long")
        return Sample(wanted.prompt.key, 0, self.said(text), self.finish, len(text.split()), 2)

    def said(self, text):
        """What it answers to a question."""
        said = next((said for words, said in self.says.items() if words in text), None)
        return said or self._verdict(text)

    def _verdict(self, text):
        answers = [float(re.search(r"-?\d+", part)[0]) for part in PARTS.findall(text)]
        if len(answers) == 1:
            return f"Fine.\nScore: {min(10, max(1, int(answers[0])))}"
        drawn = int.from_bytes(sha256(text.encode()).digest()[:8]) / 2**64
        if drawn < self.bias or answers[0] > answers[1]:
            return "The first one.\nVerdict: A"
        return "No doubt.\nVerdict: " + ("tie" if answers[0] == answers[1] else "B")
