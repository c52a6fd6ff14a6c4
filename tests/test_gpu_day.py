"""The tables of docs/gpus.md, and the call in parts that measures them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align.pipeline.options.settings import load_settings
from align.stages.model.head.fused_head import HeadSpec, OutputHead
from align.stages.model.head.fused_head_backward import fused_rows
from bench import gpu_day, gpu_page, gpu_profile
from bench.timed_parts import Records
from support import timed_day
from support.patience import wait_until

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "gpus.md").read_text(encoding="utf-8")
RECORDS = json.loads((DOCS / "gpus.json").read_text(encoding="utf-8"))["records"]
PATHS = {"PYTHONPATH": f"{DOCS.parent / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
SHORT = 2.0  # seconds: enough to begin in, on most machines
SPEED = {"rate": 2000.0, "mfu": 10.0, "peak_gib": 5.0, "first": 7.0}
WORDS = {part.name: [*part.words] for part in gpu_day.parts()}


def record(part, result=SPEED, *, device="NVIDIA H100", day=1, commit="old", **more):
    """A record with the settings of today; a `missed` in the place of figures is the reason."""
    machine = {"device": device, "versions": {"torch": "1"}, "source": commit, "commit": commit}
    ended = {"missed": result} if isinstance(result, str) else {"figures": result}
    known = {"part": part, "words": WORDS[part], "measured": f"2026-01-0{day}"}
    return known | machine | ended | more


def page_of(folder, *records):
    """The page and the JSON with these records put into those that are there."""
    for name in ("gpus.md", "gpus.json"):
        if not (folder / name).exists():
            shutil.copy(DOCS / name, folder)
    found = folder / "records/machine"
    found.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(records):
        (found / f"{number}.json").write_text(json.dumps(one))
    read = gpu_page.records_in(found.parent)
    gpu_page.write(folder, read, gpu_day.parts(), gpu_day.usual_parts())
    return (folder / "gpus.md").read_text(), (folder / "gpus.json").read_text()


def records_of(folder):
    records = Records.under(folder / "records", timed_day.MACHINE).all()
    return {name: record.get("figures", record.get("missed")) for name, record in records.items()}


def is_alive(pid):
    """Whether a process runs; one that has ended and is not waited for does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_page_says_what_the_figures_beside_it_say():
    usual = gpu_day.usual_parts()
    assert gpu_page.REGION.search(PAGE)
    assert gpu_page.filled(PAGE, RECORDS, usual) == PAGE
    changed = json.loads(json.dumps(RECORDS))
    (one,) = (one for one in changed if one["part"] == "small/dpo/align")
    one["figures"]["rate"] += 1000
    assert gpu_page.filled(PAGE, changed, usual) != PAGE


def test_every_part_is_a_row_of_a_table_and_every_mark_a_table():
    rows = {name for table in gpu_page.TABLES for name in gpu_page.rows_of(table)}
    assert {part.name for part in gpu_day.usual_parts()} <= rows
    assert {*gpu_page.TABLES, "parts"} == {one[1] for one in gpu_page.REGION.finditer(PAGE)}


def test_every_part_is_under_ten_minutes_and_two_calls_hold_them_all():
    """The first one all but the last tests and what is behind them; then stage 1 runs again."""
    parts = gpu_day.usual_parts()
    assert all(part.expected <= part.limit < 600 for part in parts)
    (end,) = (at for at, part in enumerate(parts) if part.name == "tests/attention")
    assert sum(part.expected for part in parts[:end]) <= gpu_day.SECONDS
    again = [part for part in parts if part.makes]
    assert sum(part.expected for part in (*parts, *again)) <= 2 * gpu_day.SECONDS


def test_every_test_of_a_gpu_is_in_a_part():
    tests = DOCS.parent / "tests"
    marked = {
        str(path.relative_to(tests))
        for path in tests.rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)
    }
    assert marked == {one for files, _ in gpu_day.TESTS.values() for one in files.split()}


def test_every_part_that_trains_gives_settings_that_there_are():
    words = [(part.words[3], json.loads(part.words[4])) for part in gpu_day.parts()]
    trained = [
        given for function, given in words if function in {"with_align", "unsaved", "profile"}
    ]
    assert len(trained) >= 8
    for _, method, sets, flags, *_ in trained:
        assert load_settings(flags | {"train.method": method}, sets, file=None).config.train


def test_a_part_that_fails_or_hangs_is_missed_with_the_reason_and_the_rest_is_measured(tmp_path):
    limit, pids = SHORT, tmp_path / "pids"
    left = timed_day.run(tmp_path, slow_limit=limit)
    assert left == ["costly"]  # there was no time for it, which is no miss
    while not pids.exists():  # it was killed before it came to hang
        limit *= 2
        timed_day.run(tmp_path, slow_limit=limit, only=["slow"])
    assert records_of(tmp_path) == {
        "group/good": {"runs": 1},
        "group/bad": "this part is bad",
        "slow": f"ran over its limit of {limit} s",
        "reader": {"runs": 2},
    }
    begun = pids.read_text().split()
    wait_until(lambda: not any(map(is_alive, begun)))
    # Called again, what was missed is tried once more, and nothing else.
    (tmp_path / "quick").touch()
    timed_day.run(tmp_path, slow_limit=600)
    assert records_of(tmp_path)["slow"] == {}
    assert (tmp_path / "ran").read_text() == "good reader "
    timed_day.run(tmp_path, slow_limit=600, again=["group"])
    assert records_of(tmp_path)["group/good"] == {"runs": 3}
    # A part whose words have changed is another measurement.
    timed_day.COUNT, words = timed_day.COUNT + "\n", timed_day.COUNT
    try:
        timed_day.run(tmp_path, slow_limit=600, only=["reader"])
    finally:
        timed_day.COUNT = words
    assert records_of(tmp_path)["reader"] == {"runs": 4}


def test_a_part_under_way_when_the_call_ends_is_left_and_is_no_miss(tmp_path):
    left = timed_day.run(tmp_path, slow_limit=600, seconds=1, only=["slow", "reader"])
    assert left == ["slow", "reader"]
    assert records_of(tmp_path) == {}


def test_a_file_that_a_part_reads_is_made_again_without_a_second_record(tmp_path):
    timed_day.run(tmp_path, slow_limit=600, only=["group/good"])
    (tmp_path / "scratch/made").unlink()
    timed_day.run(tmp_path, slow_limit=600, only=["reader"])
    assert (tmp_path / "ran").read_text() == "good good reader "
    assert records_of(tmp_path) == {"group/good": {"runs": 1}, "reader": {"runs": 3}}


def test_a_part_that_others_need_fails_once_in_a_call_and_takes_no_figures(tmp_path, capfd):
    """Neither theirs nor its own, though they were to be measured again."""
    timed_day.run(tmp_path, slow_limit=600, only=["group/good", "reader"])
    before = records_of(tmp_path)
    (tmp_path / "scratch/made").unlink()
    (tmp_path / "ran").unlink()
    (tmp_path / "ran").mkdir()  # which cannot be read
    capfd.readouterr()
    again = ["reader", "group/good"]
    timed_day.run(tmp_path, slow_limit=600, only=again, again=again)
    assert capfd.readouterr().out.count("group/good: about") == 1
    assert records_of(tmp_path) == before


def test_a_call_that_is_killed_leaves_no_process_and_the_next_one_goes_on(tmp_path):
    words = [sys.executable, "-P", "-m", "support.timed_day", str(tmp_path)]
    call = subprocess.Popen(words, env=os.environ | PATHS, stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "pids").exists)
    part, child = (tmp_path / "pids").read_text().split()
    call.send_signal(signal.SIGKILL)
    call.wait()
    wait_until(lambda: not is_alive(part))
    with suppress(ProcessLookupError):
        os.kill(int(child), signal.SIGKILL)
    assert records_of(tmp_path) == {"group/good": {"runs": 1}, "group/bad": "this part is bad"}
    (tmp_path / "quick").touch()
    timed_day.run(tmp_path, slow_limit=600)
    assert records_of(tmp_path) == {
        "group/good": {"runs": 1},
        "group/bad": "this part is bad",
        "slow": {},
        "reader": {"runs": 2},
    }


def test_each_operation_of_a_profile_counts_once_under_the_kind_it_belongs_to():
    """On a CPU, of real operations: their own times add up to what ran."""
    hidden = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(128, 32, requires_grad=True)
    head = OutputHead(weight, None, HeadSpec())
    with torch.profiler.profile() as profiler:
        mixed = torch.nn.functional.scaled_dot_product_attention(*[(hidden @ hidden.T)[None]] * 3)
        rows = fused_rows(head, mixed[0] @ hidden, torch.arange(64), purity=False)
        rows.sum().backward()
    events = profiler.events()
    found = gpu_profile.by_kind(events)
    assert all(one["kernels"] and one["seconds"] > 0 for one in found["kinds"].values())
    own = sum(event.self_cpu_time_total for event in events) / 1e6
    assert sum(one["seconds"] for one in found["kinds"].values()) == pytest.approx(own)
    heads = [
        one for one in gpu_profile.kernels_of(events) if gpu_profile.kind_of(*one[:2]) == "head"
    ]
    assert any("mm" in name for name, *_ in heads)  # its own products are not the layers'


def test_a_kernel_of_a_gpu_is_of_the_operation_that_launched_it():
    def host(name, parent=None, kernels=()):
        kernels = [SimpleNamespace(name=one, duration=micros) for one, micros in kernels]
        kind = SimpleNamespace(name="CPU")
        return SimpleNamespace(device_type=kind, name=name, cpu_parent=parent, kernels=kernels)

    def on_gpu(name, micros, *, is_user_annotation=False):
        return SimpleNamespace(
            device_type=SimpleNamespace(name="CUDA"),
            name=name,
            time_range=SimpleNamespace(elapsed_us=lambda: micros),
            is_user_annotation=is_user_annotation,
        )

    backward = host("FusedLogpsBackward")
    events = [
        backward,
        host("aten::mm", backward, [("nvjet_tst", 5.0)]),
        host("aten::mm", None, [("nvjet_tst", 3.0)]),
        *(on_gpu("nvjet_tst", micros) for micros in (5.0, 3.0, 2.0)),  # of the last none is known
        on_gpu("triton_tem_fused_0", 4.0),
        on_gpu("elementwise_kernel", 1.0),
        on_gpu("a range of the program", 15.0, is_user_annotation=True),
    ]
    found = gpu_profile.by_kind(events)
    seconds = {kind: one["seconds"] * 1e6 for kind, one in found["kinds"].items()}
    expected = {"products": 5.0, "attention": 4.0, "head": 5.0, "between": 1.0}
    assert seconds == pytest.approx(expected)
    assert found["busy"] == pytest.approx(15e-6)


def test_figures_of_two_cards_or_of_two_states_of_the_code_never_share_a_table(tmp_path):
    speed = SPEED | {"rate": 3000.0}
    records = [
        record("large/dpo/recomputed"),
        record("large/dpo/trl"),
        record("large/dpo/recomputed", speed, device="an A100", day=2, commit="new"),
        record("small/dpo/align", device="an A100"),
        record("large/stage1", "no time", device="an A100", day=2, commit="new"),
    ]
    text = gpu_page.rendered("speed", records)
    assert [text.count(f"commit {one}:") for one in ("old", "new")] == [2, 1]
    assert "| 3,000 | 10.0 % | 5.0 GiB | 7 s |  |" in text
    assert "| 2,000 | 10.0 % | 5.0 GiB | 7 s | 1.0x |" in text
    assert gpu_page.NOT_MEASURED in text
    assert gpu_page.shown("stage1", records) == []  # of it nothing was measured
    records = Records.under(tmp_path, timed_day.MACHINE)
    records.write(timed_day.parts(1)[0], 1.0, {"figures": {}})
    with pytest.raises(SystemExit, match="another machine"):
        Records(records.folder, timed_day.MACHINE | {"source": "other"}).all()


def test_a_part_that_is_measured_anew_takes_no_other_parts_figures_from_the_page(tmp_path):
    """Whether the code, a commit or a driver's name of the card is another by then."""
    (tmp_path / "gpus.json").write_text('{"records": []}')
    first = [record(one) for one in ("large/dpo/recomputed", "large/dpo/kept", "large/stage1")]
    page_of(tmp_path, *first)
    again = record("large/dpo/kept", day=3, commit="docs", source="old")
    text, _ = page_of(tmp_path, again)
    assert "2026-01-01 and 2026-01-03, commit docs and old:" in text  # the code is the same
    newer = {"day": 4, "commit": "new", "device": "NVIDIA H100 80GB HBM3"}
    new = record("large/dpo/recomputed", SPEED | {"rate": 3000.0}, **newer)
    missed = record("large/stage1", "it failed", **newer)
    text, kept = page_of(tmp_path, new, missed)
    assert sorted(json.loads(kept)["records"], key=str) == sorted([new, again, first[2]], key=str)
    speed = {one[1]: one[2] for one in gpu_page.REGION.finditer(text)}["speed"]
    later, earlier = speed.split("On one ")[1:]
    assert ["commit new:" in one for one in (later, earlier)] == [True, False]
    assert [("2,000" in one, "3,000" in one) for one in (later, earlier)] == [
        (False, True),
        (True, False),
    ]
    assert earlier.count("|\n") == 3  # its own row is the only one
    assert page_of(tmp_path) == (text, kept)


def test_figures_of_other_settings_are_left_out_of_the_page_and_that_is_said(tmp_path, capsys):
    (tmp_path / "gpus.json").write_text('{"records": []}')
    words = [*WORDS["small/dpo/asked"][:-1], '["small", "dpo", ["train.memory=7g"], {}]']
    gone = record("small/dpo/align") | {"part": "small/dpo/before"}
    text, kept = page_of(
        tmp_path, record("small/dpo/asked", words=words), gone, record("small/kto/align")
    )
    assert [one["part"] for one in json.loads(kept)["records"]] == ["small/kto/align"]
    assert "| 2,000 |" in text
    said = capsys.readouterr().out
    names = ("small/dpo/asked", "small/dpo/before", "small/kto/align")
    assert [name in said for name in names] == [True, True, False]


def test_a_profile_says_which_policy_it_is_of():
    kinds = {kind: {"seconds": 1.0, "kernels": 2} for kind in gpu_profile.KINDS}
    said = set()
    for recomputed, compiled in product((True, False), repeat=2):
        policy = {"recomputed": recomputed, "compiled": compiled}
        found = {"busy": 4.0, "kinds": kinds} | policy
        said.add(text := gpu_page.rendered("profile", [record("large/dpo/profile", found)]))
        assert ("recomputed" in text, "not compiled" in text) == (recomputed, not compiled)
    assert len(said) == 4


def test_a_reason_on_the_page_is_a_line_without_folders_of_a_machine(tmp_path):
    reason = """No such file: '/home/some one/a b/cache/manifest.json'
        at /opt/x/python3.12/run.py:12: (/tmp/y/z.bin|"/srv/w") beside tests/test_api.py, 3/4"""
    text, kept = page_of(tmp_path, record("small/kto/align", reason + 400 * " and on"))
    lines = [line for line in f"{text}{kept}".splitlines() if "No such file" in line]
    assert len(lines) >= 2
    for line in lines:
        kept_words = ("'manifest.json'", "run.py:12: (z.bin", "tests/test_api.py, 3/4")
        assert all(word in line for word in kept_words)
        assert not any(word in line for word in ("/home", "some one", "/opt", "/tmp", "/srv"))
        assert line.count("and on") < 100


def test_without_a_gpu_a_call_says_so_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--records", str(tmp_path)])
    monkeypatch.setattr(gpu_day, "device_here", lambda: "CPU")
    with pytest.raises(SystemExit, match="no GPU .* --tiny"):
        gpu_day.main()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_part_runs_with_a_tiny_model_on_a_cpu(tmp_path):
    """As a person calls it, but for TRL's parts where it is not installed."""
    before = {name: (DOCS / name).read_bytes() for name in ("gpus.md", "gpus.json")}
    words = ["--tiny", "--records", tmp_path, "--seconds", "6000"]
    subprocess.run(
        [sys.executable, "-P", "-m", "bench.gpu_day", *map(str, words)],
        env=os.environ | PATHS | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    (folder,) = tmp_path.iterdir()
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    missed = {name: one["missed"] for name, one in found.items() if "missed" in one}
    assert all("trl" in name and "TRL" in reason for name, reason in missed.items()), missed
    page = (folder / "gpus.md").read_text()
    assert "On one CPU" in page
    assert before == {name: (DOCS / name).read_bytes() for name in before}
