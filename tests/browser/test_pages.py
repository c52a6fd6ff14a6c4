"""Every page, as a browser shows it: wide and narrow, light and dark."""

import pytest

from align.pipeline.train.run_diff import diff_runs
from align.pipeline.train.run_report import outcome, write_report
from align.pipeline.train.sweep_page import sweep_page
from align.pipeline.train.trials import SweepResult, Trial, TrialResult
from align.schemas.checkpoint import Ending, RunIdentity
from align.schemas.errors import NonFiniteError
from align.stages.storage.run.run_folder import write_ending
from support.long_runs import write_long_run
from support.rooms import ROOT
from support.rounds_play import play, write_settings

PICTURES = ROOT / ".browser" / "pictures"
MOST_BYTES = 2_000_000
EVIL = '"><img src=x onerror=alert(1)><script>alert(2)</script>\u202egnp.exe\u2066</style>'


@pytest.fixture(scope="session")
def long_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("long") / "kto-run"
    return write_report(write_long_run(root, steps=12_000, row_id=EVIL, model=EVIL).root)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("short") / "kto-run"
    return write_report(write_long_run(root, steps=12, every=1, evaluated=2).root)


@pytest.fixture(scope="session")
def failed_run(tmp_path_factory):
    folder = write_long_run(tmp_path_factory.mktemp("failed") / "kto-run", steps=600)
    folder.nonfinite.write_text('{"step": 600, "rank": 0}\n')
    write_ending(
        folder,
        Ending("failed", 600, 900, RunIdentity("", 1, 0, {}, {}), (), (), f"Step 600: {EVIL}"),
    )
    return write_report(folder.root)


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Ten runs, two of them to come; one has failed and tells of it what hurts a page."""
    root, trials, results = tmp_path_factory.mktemp("sweep") / "align-sweep", [], []
    for number in range(10):
        lr, beta = ("1e-6", "5e-6")[number // 5], ("0.05", "0.1", "0.2", "0.3", "0.5")[number % 5]
        settings = ("train.method=kto", f"train.lr={lr}", f"method.beta={beta}")
        trials.append(Trial(f"kto-{lr}-{beta}", settings))
    for number, trial in enumerate(trials[:8]):
        if number == 4:
            results.append(TrialResult(trial, error=NonFiniteError(EVIL)))
            continue
        folder = write_long_run(root / trial.name, steps=1500 + 20 * number)
        write_report(folder.root)
        results.append(TrialResult(trial, outcome(folder, "finished"), seconds=4000))
    page = root / "sweep.html"
    facts = {"model": EVIL, "data": "prefs"}
    planned = SweepResult(root, tuple(results), planned=tuple(trials), facts=facts)
    page.write_text(sweep_page(planned))
    return page


@pytest.fixture(scope="session")
def rounds(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    answer = play(write_settings(folder, world), "--output", folder / "out")
    assert answer.code == 0, answer
    return folder / "out" / "rounds.html"


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """Two runs with the same held-out rows, which have ids that hurt a page."""
    root = tmp_path_factory.mktemp("runs")
    runs = [
        write_long_run(root / name, steps=steps, row_id=EVIL).root
        for name, steps in (("a", 600), ("b", 900))
    ]
    page = root / "diff.html"
    diff_runs(*runs).write_page(page)
    return page


NAMES = ["long_run", "short_run", "failed_run", "sweep", "rounds", "comparison"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_nothing_loads_nothing_fits_and_can_be_read(name, looks, request):
    path = request.getfixturevalue(name)
    assert path.stat().st_size < MOST_BYTES
    for look in looks(path, PICTURES / name):
        assert look.said == []
        assert look.requests == [path.as_uri()]
        assert not look.is_too_wide
        assert look.faint == []


@pytest.mark.parametrize("width", [1280, 400])
def test_under_a_pointer_a_curve_says_its_numbers(long_run, opened, width):
    page = opened(long_run, width=width)
    figure = page.locator("figure").first
    assert figure.locator(".places text:visible").count() == 0
    figure.locator("svg").hover()
    (told,) = figure.locator(".places text:visible").all_text_contents()
    assert told.startswith("step ")
    figure.screenshot(path=PICTURES / f"pointer-{width}.png")


def test_what_would_be_markup_after_all_has_no_effect(short_run, looks, tmp_path):
    """The policy holds where escaping would not; without it this page is one that is refused."""
    bad = (
        "<script>alert(1)</script><img src='http://127.0.0.1:1/x' onerror='alert(2)'>"
        "<div style='width:5000px;color:#eee'>wide</div>"
    )
    page, bare = tmp_path / "page.html", tmp_path / "bare.html"
    page.write_text(short_run.read_text().replace("</h1>", f"</h1>{bad}"))
    bare.write_text(page.read_text().replace("Content-Security-Policy", "x"))
    for look in looks(page, PICTURES / "markup"):
        assert look.requests == [page.as_uri()]
        assert not look.is_too_wide
        assert "1" not in look.said
    faint = []
    for look in looks(bare, PICTURES / "bare"):
        assert len(look.requests) == 2
        assert look.is_too_wide
        assert {"1", "2"} <= {*look.said}
        faint += [text for text, _ in look.faint]
    assert "wide" in faint
