"""Compares what a server serves with a model's folder, on completions of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from ...schemas.cache import reference_named
from ...schemas.config import Config
from ...schemas.errors import FingerprintError, UsageError, counted, logger
from ...schemas.row_table import Rows
from ...schemas.rows import PER_TOKEN, sums_of_completions
from ...schemas.samples import Prompt, Refused, Sample, SampleRequest, Sampling
from ...stages.data.tokenizer import TextTokenizer, load_tokenizer
from ...stages.model.generate import greedy_gaps
from ...stages.model.model_folder import UNUSED_WEIGHTS
from ...stages.model.reference import HfReference
from ...stages.storage.locations import origin_of
from ..jobs.object_inputs import cache_at, local_options
from ..precompute.verify import token_logps
from .samplers import prompt_ids, require_openai

# Nats per token: the rounding of the coarsest dtype, because that of a server is unknown.
TOLERANCE = PER_TOKEN["bfloat16"]
GREEDY = Sampling(temperature=0.0, max_new_tokens=32)
CHARACTERS = 400  # of a completion, which are a prompt for a greedy answer


def verify_server(
    config: Config, location: str, url: str, *, model: str | None, adapter: str, rows: int
) -> str:
    """Returns a summary; a server of another model, tokenizer or template is an error.

    The server counts the tokens of texts of the cache and answers them. Its log-probs of cached
    completions are compared, or without them how likely its answers are to the model.
    """
    require_openai()
    if not rows:
        raise UsageError("--server compares a sample of rows, but --rescore is 0. Raise it.")
    from ...stages.server.server_sampler import ServerSampler  # noqa: PLC0415 - needs openai

    cache = cache_at(location)
    manifest = cache.manifest()
    path, own = model or manifest.model, adapter if model or adapter else manifest.adapter
    options = replace(config.model, path=path, adapter=own, dtype="auto", attention="auto")
    unused = UNUSED_WEIGHTS in manifest.fingerprint
    reference = HfReference(replace(local_options(options), allow_unused_weights=unused))
    tokenizer = load_tokenizer(reference.options.path, config.tokens)
    sample = Rows.concat([block for _, block in cache.sample_rows(manifest, rows)])

    prompts = {prompt.key: prompt for prompt in _prompts(sample, tokenizer)}
    server = ServerSampler(
        replace(config.server, url=url, revision="any"),  # nothing is stored under it
        lambda prompt: len(prompt_ids(prompt, tokenizer)),
    )
    server.keeps = False
    asked = [SampleRequest(prompt, (0,)) for prompt in prompts.values()]
    answers = list[Sample]()
    for one in chain.from_iterable(server.open(GREEDY).sample(asked)):
        if isinstance(one, Refused):
            raise UsageError(f"{url} refuses a prompt: {one.reason}. Check its chat template.")
        answers.append(one)

    from_reference = np.nan
    if served := server.token_logps(sample.trees()):
        logps = sample.logps
        if model or adapter or not manifest.is_scored:
            logps = sums_of_completions(token_logps(sample, reference.open()), sample.is_learned)
        sums, lengths = sums_of_completions(served, sample.is_learned), sample.num_learned
        gaps = np.abs(sums - logps)
        from_reference = np.abs(sums - sample.logps).sum() / lengths.sum()  # NaN if not scored
        what, more = "completions", f"{from_reference:.1e} from the cache's reference"
    else:
        network, of_tokens = reference.load(), []
        for answer in answers:
            ids = prompt_ids(prompts[answer.prompt], tokenizer, answer.text)
            of_tokens.append(greedy_gaps(network, ids, answer.prompt_tokens))
        gaps, lengths = np.array([*map(np.sum, of_tokens)]), np.array([*map(len, of_tokens)])
        if not lengths.any():
            raise UsageError(f"{url}: every answer is empty. Compare more rows by --rescore.")
        same = (np.concatenate(of_tokens) == 0).mean()
        what, more = "greedy answers", f"{same:.1%} of their tokens are the model's choices"
    mean, worst = gaps.sum() / lengths.sum(), (gaps / lengths.clip(min=1)).max()
    named = map(origin_of, (reference.options.path, reference.options.adapter))
    found = (
        f"{url}: {counted(len(gaps), what)}, {mean:.1e} nats per token from "
        f"{reference_named(*named)} (at most {worst:.1e}); {more}"
    )
    # Rounding is of one size: a reference at half the distance is what is served.
    if not mean <= TOLERANCE or from_reference < mean / 2:
        why = f"{TOLERANCE:g} is allowed" if not mean <= TOLERANCE else "The reference is nearer"
        raise FingerprintError(
            f"{found}. {why}: the server has another model, adapter or precision, or settings that "
            "change its answers. Check what it has loaded, and the name in server.model."
        )
    if (model or adapter) and from_reference < 2 * mean:
        logger.warning("The server may have the reference: it is about as near as the model.")
    return found


def _prompts(sample: Rows, tokenizer: TextTokenizer) -> Iterator[Prompt]:
    """The start of a completion of each row as a user's message; plain text without a template."""
    for first in sample.completion_offsets[:-1].tolist():
        ids = sample.completions[first].tolist()
        text = tokenizer.hf.decode(ids, skip_special_tokens=True)[:CHARACTERS] or " "
        yield Prompt(({"role": "user", "content": text},) if tokenizer.chat else text)
