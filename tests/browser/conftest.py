"""A headless browser of its own, which `make test-browser` installs into .browser."""

from dataclasses import dataclass, field
from itertools import product

import pytest
from playwright.sync_api import sync_playwright

from support.rooms import ROOT

BROWSER = ROOT / ".browser"
WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
# The contrast of each text with what is behind it, as WCAG 2 defines it.
FAINT_TEXTS = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const color = channels(getComputedStyle(one).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  const texts = [...document.body.querySelectorAll("*")].filter((one) =>
    [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) &&
    one.checkVisibility({ visibilityProperty: true }));
  return texts.map((one) => {
    const style = getComputedStyle(one);
    const color = channels(one instanceof SVGElement ? style.fill : style.color);
    const [low, high] = [light(color), light(behind(one))].sort((a, b) => a - b);
    return [one.textContent.trim().slice(0, 60), (high + 0.05) / (low + 0.05)];
  }).filter(([, contrast]) => contrast < 4.5);
}"""


@dataclass
class Look:
    """What a person and the browser's console see of a page."""

    said: list = field(default_factory=list)  # errors, warnings and anything else
    requests: list = field(default_factory=list)  # but those that the page's policy forbade
    is_too_wide: bool = False
    faint: list = field(default_factory=list)  # texts that are hard to read

    def failed(self, request):
        if request.failure != "csp":
            self.requests.append(request.url)


@pytest.fixture(scope="session")
def browser():
    program = BROWSER / "chromium"
    if not program.exists():
        pytest.fail(f"{program} is missing: `make test-browser` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens a file as a page of a width, light or dark."""
    contexts = []

    def open_page(path, *, width=WIDTHS[0], scheme="light", look=None):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        if look:
            page.on("console", lambda message: look.said.append(message.text))
            page.on("pageerror", lambda error: look.said.append(str(error)))
            page.on("dialog", lambda dialog: (look.said.append(dialog.message), dialog.dismiss()))
            page.on("requestfinished", lambda request: look.requests.append(request.url))
            page.on("requestfailed", look.failed)
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def looks(opened):
    """Looks at a page in every width and scheme, and keeps a picture of each."""

    def look_at(path, picture):
        picture.parent.mkdir(exist_ok=True)
        for width, scheme in product(WIDTHS, SCHEMES):
            look = Look()
            page = opened(path, width=width, scheme=scheme, look=look)
            for summary in page.query_selector_all("summary"):
                summary.click()
            shown = "document.documentElement.scrollWidth"
            look.is_too_wide = page.evaluate(f"{shown} > document.documentElement.clientWidth")
            look.faint = page.evaluate(FAINT_TEXTS)
            page.screenshot(path=f"{picture}-{width}-{scheme}.png", full_page=True)
            yield look

    return look_at
