"""A cache of conversations whose template ends turns with a token of its own."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.schemas.cache import Stop, Stops
from align.schemas.config import DataOptions, ModelOptions, TokenOptions
from align.schemas.rows import Role
from align.stages.data.tokenizer import decoder, load_tokenizer
from support.byte_tokenizers import FAMILIES, byte_tokenizer
from support.stage_one import run

ROOM = 36  # a prompt takes 26 or 27 tokens, so that answers of ten bytes and more are cut


def row(number):
    """Conversations in JSON text, the answers 1 to 20 bytes long; two rows are plain text."""
    answers = chr(97 + number) * (number + 1), chr(65 + number) * (20 - number)
    prompt = [{"role": "user", "content": f"Question {number}"}]
    chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in answers)
    if number >= 18:
        prompt, chosen, rejected = f"Q{number}:", *answers
    cells = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in cells.items()}
    return texts | {"score_chosen": number, "score_rejected": "-0.5", "rating": 3}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["gemma"])


@pytest.fixture
def outcome(config, gemma, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row(number)) + "\n" for number in range(20)))
    return run(
        replace(
            config,
            model=ModelOptions(path=gemma),
            data=DataOptions(files=[str(data)]),
            tokens=TokenOptions(max_length=ROOM),
            cache=replace(config.cache, kl_pairs=2),
        )
    )


def rows_of(outcome):
    files = [Path(outcome.folder) / "data" / shard.file for shard in outcome.manifest.shards]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_every_completion_that_is_whole_ends_with_its_stop_and_no_other_does(outcome, gemma):
    tokenizer = load_tokenizer(gemma, TokenOptions())
    turn, eos = (tokenizer.backend.token_to_id(text) for text in ("<end_of_turn>", "<eos>"))
    seen = set()
    for stored in rows_of(outcome):
        branches = zip(stored["completion_ids"], stored["cut"], stored["role"], strict=True)
        for ids, cut, role in branches:
            seen.add((bool(cut), role == Role.MISMATCHED))
            assert not {turn, eos} & set(ids[:-1])
            assert (ids[-1] in {turn, eos}) == (not cut)
            if not cut and role != Role.MISMATCHED:
                assert ids[-1] == (eos if stored["source"]["row"] >= 18 else turn)
    assert seen == {(cut, mismatched) for cut in (True, False) for mismatched in (True, False)}


def test_the_cache_says_what_ends_a_turn_and_text_is_given_back_without_it(outcome, gemma):
    backend = load_tokenizer(gemma, TokenOptions()).backend
    turn = Stop(backend.token_to_id("<end_of_turn>"), "<end_of_turn>", "template")
    stops = Stops.of(outcome.manifest.fingerprint)
    assert stops == Stops(Stop(backend.token_to_id("<eos>"), "<eos>", "tokenizer"), turn, turn)
    decode = decoder(gemma, stops.tokens)
    for stored in rows_of(outcome):
        answer = decode(stored["completion_ids"][0], True)
        assert answer == chr(97 + stored["source"]["row"]) * len(answer)


def test_scores_are_read_and_what_is_odd_about_the_rows_is_noted(outcome):
    assert all(
        stored["score"][:2] == [stored["source"]["row"], -0.5] for stored in rows_of(outcome)
    )
    notes = outcome.manifest.notes
    assert (notes["rows_of_conversations"], notes["rows_of_plain_text"]) == (18, 2)
    assert notes["rows_with_scores_not_read_in_'rating'"] == 20
    assert "note: 20 rows with scores not read in 'rating'" in outcome.text()
