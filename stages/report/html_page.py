"""Builds an HTML page as one self-contained file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...schemas.safe_text import escape

STYLE = """
:root{color-scheme:light dark;
--ink:#1c2430;--soft:#66707e;--line:#e3e7ec;--card:#fff;--page:#f5f6f8;
--c0:#2f6fb5;--c1:#cf6a1b;--c2:#3d8f5f;--c3:#8a5fb0;--c4:#b8432f;--c5:#2a8c94;
--c6:#8c6d1f;--c7:#a8488a}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#98a2b0;--line:#2c343f;--card:#1a2029;
--page:#12161c;--c0:#6aa5e6;--c1:#f0975a;--c2:#6cc08c;--c3:#b795dc;--c4:#e8806e;--c5:#5fc1c9;
--c6:#cdab58;--c7:#dd86c2}}
*{box-sizing:border-box}
body{margin:0;padding:2.5rem 1.25rem 4rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1140px;margin:0 auto}
h1{font-size:1.7rem;margin:0}h2{font-size:1.15rem;margin:2.4rem 0 .8rem}
p{margin:.3rem 0;color:var(--soft);max-width:75ch}
a{color:var(--c0)}
.grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
.tiles{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));
margin-top:1.4rem}
figure,.tile,.table{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:.8rem .9rem}
.tile b{display:block;font-size:1.5rem;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft)}
figcaption{display:flex;flex-wrap:wrap;gap:.2rem .9rem;align-items:baseline;margin-bottom:.4rem}
.key{color:var(--soft);font-size:.85rem;white-space:nowrap}
.key i{display:inline-block;width:1.1rem;margin-right:.35rem;vertical-align:.28em;
border-top:2px solid currentColor}
i.dots{border-top-style:dashed}
i.bars,i.cloud{width:.65rem;height:.65rem;vertical-align:-.05em;border:0;border-radius:2px;
background:currentColor}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px}
.y-tick{text-anchor:end;dominant-baseline:middle}.x-tick{text-anchor:middle}
line.rule{stroke:var(--line)}line.zero{stroke:var(--soft)}
polyline{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linejoin:round}
polyline.dots{stroke-dasharray:5 3}
circle{fill:currentColor}circle.cloud{fill-opacity:.45}
polygon.bars{fill:currentColor;fill-opacity:.22;stroke:currentColor;stroke-width:1.3}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
.table{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere;font-weight:400}
tr:last-child>*{border-bottom:0}th{color:var(--soft)}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
details>summary{cursor:pointer;font-size:1.15rem;font-weight:600;margin:2.4rem 0 .8rem}
"""


def page(title: str, sentences: Sequence[str], *parts: str) -> str:
    """A whole document; `sentences` stand under its title, the parts are HTML."""
    said = "".join(f"<p>{escape(line)}</p>" for line in sentences)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>{said}\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def section(title: str, content: str, *, note: str = "", is_folded: bool = False) -> str:
    """A heading with what stands under it; empty where there is nothing."""
    if not content:
        return ""
    said = f"<p>{escape(note)}</p>" if note else ""
    if is_folded:
        return f"<details><summary>{escape(title)}</summary>{said}{content}</details>"
    return f"<section><h2>{escape(title)}</h2>{said}{content}</section>"


def side_by_side(figures: str) -> str:
    """Figures, as many in a line as there is room for."""
    return f'<div class="grid">{figures}</div>' if figures else ""


def tiles(numbers: Mapping[str, str]) -> str:
    """The few numbers one looks for first."""
    made = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b></div>'
        for name, value in numbers.items()
    )
    return f'<div class="tiles">{made}</div>' if made else ""


def facts(rows: Mapping[str, str]) -> str:
    """Names and what they stand for."""
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f'<div class="table"><table>{lines}</table></div>' if lines else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, links: Mapping[str, str]) -> str:
    """Names at the left, numbers ranged right; a name in `links` leads somewhere."""
    top = "".join(f'<th class="{_kind(i)}">{escape(name)}</th>' for i, name in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{_kind(i)}">{_linked(cell, links)}</td>' for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><tr>{top}</tr>{body}</table></div>'


def _kind(column: int) -> str:
    return "number" if column else "name"


def _linked(cell: str, links: Mapping[str, str]) -> str:
    shown = escape(cell)
    return f'<a href="{escape(links[cell])}">{shown}</a>' if cell in links else shown
