"""What stage 1 says of its rows: what it does not read, how text is wrapped, and single rows."""

import json
import re
import shlex
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from zlib import crc32

import pyarrow.parquet as pq
import pytest

from align.pipeline.parts import Part
from align.pipeline.precompute.inspect_rows import lines_of_inspection
from align.pipeline.precompute.precompute import precompute
from align.pipeline.rounds.round_prompts import split_prompts
from align.schemas.config import ModelOptions
from align.schemas.data_options import DataOptions
from align.schemas.errors import BadDataError, FingerprintError, UsageError
from align.stages.data.tokenizer import load_tokenizer
from align.stages.storage.cache import Cache
from align.stages.tracking.progress import Progress
from support.byte_tokenizers import CHATML, FAMILIES, byte_tokenizer
from support.command import align
from support.read_rows import user, write_rows
from support.refusals import refuses
from support.stage_one import Heard, run
from support.stub_reference import StubReference


@pytest.fixture
def config_over(config, tmp_path):
    """The config over rows, in a JSON file of their own."""

    def write(*rows, **columns):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        return replace(config, data=DataOptions(files=[path], map=columns))

    return write


def pair(number, **more):
    return {"prompt": f"Why {number}?", "chosen": " so", "rejected": " no", **more}


def test_unread_columns_are_named_and_no_part_of_the_cache(config_over):
    rows = [pair(n, id=f"a{n}", note=f"Some words of an annotator, {n}.") for n in range(300)]
    rows.append(pair(0, chosen=" no", rejected=" so"))
    config, heard = config_over(*rows), Heard()
    made = precompute(config, StubReference(), progress=heard)
    assert "'id', 'note'" in heard.lines[1]
    assert "note: 1 pair in both orders" in made.text().splitlines()
    left_out = run(config_over(*rows, id="", note=""))
    assert left_out.manifest.root == made.manifest.root


def compared(number, strength):
    return {
        "prompt": f"Why {number}?",
        "response_1": "So.",
        "response_2": "No.",
        "preference_strength": strength,
    }


def test_ties_are_counted_apart_and_any_number_of_them_may_be_there(config_over):
    rows = [compared(n, n % 2) for n in range(40)]
    made = run(config_over(*rows))
    assert made.manifest.reasons == {"tie": 20}
    assert (made.manifest.rows, "20 of 40" in made.text()) == (20, True)
    assert "dropped" not in made.text()
    faulty = config_over(*rows, compared(40, "much"))
    with refuses(BadDataError, "1 of 41", "1 schema", "jsonl row 40: schema"):
        run(replace(faulty, cache=replace(faulty.cache, output=f"{faulty.cache.output}-2")))
    ties = config_over(*(compared(n, 0) for n in range(4)))
    with refuses(BadDataError, "0 of 4", "4 ties"):
        run(replace(ties, cache=replace(ties.cache, output=f"{ties.cache.output}-3")))


def row_shown(config, *, part=None):
    """The lines of the row that is shown while a cache is made."""
    progress = Heard()
    how = {"progress": progress, "shows_row": True}
    if part:
        precompute(config, StubReference(), part=part, **how)
    else:
        precompute(config, StubReference(), **how)
    return progress.row


def test_the_row_that_is_shown_once_is_one_that_is_scored(to):
    config = to(kl_pairs=2)
    first, prompt, *lines = row_shown(config)
    number = int(re.match(r"row (\d+) of .*: *|.", first)[1])
    stored = pq.read_table(Path(config.cache.output) / "data").to_pylist()
    (row,) = [one for one in stored if one["source"]["row"] == number]
    backend = load_tokenizer(config.model.path, config.tokens).backend
    assert prompt.startswith(f"  prompt, {len(row['prompt_ids'])} tokens: ")
    for line, ids in zip(lines, row["completion_ids"][:3], strict=True):
        assert f", {len(ids)} tokens: " in line
        texts = [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', line)]
        assert "".join(texts) == backend.decode(ids, skip_special_tokens=True)
    assert row_shown(config) == []  # it is complete
    parts = to(kl_pairs=0, output=f"{config.cache.output}-without")
    second, first = (row_shown(parts, part=Part(number, 2)) for number in (2, 1))
    assert (second, len(first)) == ([], 4)  # its place, the prompt and two sides


def test_the_row_is_printed_on_any_terminal(config, tmp_path):
    cells = {"prompt": "Größe {}?\x1b[2J", "chosen": "né {}", "rejected": "日本 {}"}
    rows = [{name: cell.format(n) for name, cell in cells.items()} for n in range(8)]
    data, path = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "said.txt"
    with path.open("wb") as file, TextIOWrapper(file, encoding="ascii") as stream:
        own = replace(config, data=replace(config.data, files=[data]))
        precompute(own, StubReference(), progress=Progress(stream), shows_row=True)
    said = path.read_bytes().decode("ascii")
    assert r"Gr\xf6\xdfe" in said
    assert "\x1b" not in said


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    def saved(template):
        family = FAMILIES["qwen base"] | {"template": template}
        return byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)

    return {name: saved(one) for name, one in (("qwen", CHATML), ("bare", None))}


@pytest.fixture
def over(config, models, tmp_path):
    """A config over files of rows, into a cache of this name."""

    def make(name, model, *files, wrap="auto"):
        # Named by what they hold: the names of files are a part of a cache.
        names = [f"{crc32(json.dumps(rows).encode())}.jsonl" for rows in files]
        paths = [write_rows(tmp_path / name, rows) for name, rows in zip(names, files, strict=True)]
        return replace(
            config,
            model=ModelOptions(path=models[model]),
            data=DataOptions(files=paths, wrap=wrap),
            cache=replace(config.cache, output=str(tmp_path / name)),
        )

    return make


def text(number, **more):
    return {"prompt": f"Q{number}?", "chosen": f" yes {number}", "rejected": " no", **more}


TEXTS = [text(number) for number in range(20)]
BRIEF = [text(number, system="Be brief.") for number in range(20)]
CHATS = [{"prompt": [user(f"Q{n}?")], "chosen": f"yes {n}", "rejected": "no"} for n in range(20)]


def said(config):
    heard = Heard()
    outcome = precompute(config, StubReference(), progress=heard)
    return outcome, [line for line in heard.lines if "data.wrap" in line]


def row_ids(made):
    shards = [made.folder / "data" / shard.file for shard in made.manifest.shards]
    return [pq.read_table(shard)["row_id"].to_pylist() for shard in shards]


def test_unwrapped_text_is_noted_where_there_is_a_template(over):
    auto, (line,) = said(over("auto", "qwen", TEXTS))
    assert "20 rows" in line
    assert "data.wrap=chat" in line
    none, silent = said(over("none", "qwen", TEXTS, wrap="none"))
    assert (none.manifest.root, silent) == (auto.manifest.root, [])
    assert "data.wrap" not in auto.manifest.fingerprint
    assert said(over("bare", "bare", TEXTS))[1] == []
    assert said(over("chats", "qwen", CHATS))[1] == []
    with refuses(UsageError, "data.wrap", "chat template"):
        run(over("bare", "bare", TEXTS, wrap="chat"))


def test_the_command_for_training_names_the_template_of_the_settings(over, tmp_path):
    template = tmp_path / "own one.jinja"
    template.write_text(CHATML)
    config = over("own", "bare", CHATS)
    tokens = replace(config.tokens, chat_template=str(template))
    *_, last = run(replace(config, tokens=tokens)).text().splitlines()
    words = shlex.split(last)
    assert words[-2:] == ["--set", f"tokens.chat_template={template}"]
    assert words[:3] == ["next:", "align", "train"]


def test_wrapped_text_makes_the_rows_of_conversations(over):
    wrapped, lines = said(over("chat", "qwen", TEXTS, wrap="chat"))
    assert (wrapped.manifest.fingerprint["data.wrap"], lines) == ("chat", [])
    asked = run(over("chats", "qwen", CHATS))
    assert row_ids(wrapped) == row_ids(asked)
    with refuses(FingerprintError, "data.wrap: ", "chat", "none"):
        run(over("chat", "qwen", TEXTS, wrap="none"))


def test_text_that_cannot_be_wrapped_is_refused(over):
    rendered = [text(n, prompt=f"Human: Q{n}?") for n in range(20)]
    config = over("rendered", "qwen", rendered, wrap="chat")
    for refuse in (run, split_prompts):  # the rounds ask what stage 1 scores
        with refuses(BadDataError, "20 schema", "data.wrap=none"):
            refuse(config)
    assert run(over("rendered", "qwen", rendered, wrap="none")).manifest.rows == 20
    none = over("brief", "qwen", BRIEF, wrap="none")
    with refuses(BadDataError, "data.wrap=chat", "--map system="):
        run(none)
    assert run(over("wrapped", "qwen", BRIEF, wrap="chat")).manifest.rows == 20


@pytest.fixture
def made(flawed):
    """A cache of the data with one row that cannot be used."""
    run(flawed)
    return Cache(Path(flawed.cache.output))


def shown(folder, row=None, **more):
    options = {"rejected": False, "as_json": False, "model": None} | more
    return [*map(str, lines_of_inspection(folder, row=row, **options))]


def test_a_row_is_found_by_its_place_or_id_and_a_dropped_one_says_why(made, flawed_file):
    lines = flawed_file.read_text().splitlines()
    for number in (0, 17, len(lines) - 2):
        row = json.loads(lines[number])
        by_place = shown(made, f"flawed.jsonl:{number}")
        assert shown(made, str(number)) == by_place
        text = "\n".join(by_place)
        assert json.dumps(row["chosen"][:20], ensure_ascii=False)[1:-1] in text
        (name,) = re.findall(r"row id ([0-9a-f]{32})", text)
        assert shown(made, name) == shown(made, name[:8]) == by_place
        sums = dict(re.findall(r"(\w+): (-[0-9.]+) of", text))
        assert {"chosen", "rejected", "mismatched"} == set(sums)
    last = len(lines) - 1
    (dropped,) = shown(made, f"{last}")
    assert dropped.startswith(f"flawed.jsonl row {last}: empty_completion: 'chosen'")
    assert shown(made, rejected=True)[1:] == [dropped]


def test_the_rejected_rows_are_counted(made):
    assert "1 of 121 rows" in align("inspect", made.root, "--rejected").out
