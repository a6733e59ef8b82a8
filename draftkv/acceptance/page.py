"""One document, two renderings: a self-contained HTML page and its Markdown twin.

A document is a list of blocks. HTML holds its style and its pictures (base64 PNG) inside, so it can be mailed; the
Markdown twin links to the same pictures in `plots/` beside it.
"""

import base64
import html
import os
import re
from dataclasses import dataclass
from pathlib import Path

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1b1f24; background: #fff;
       max-width: 66rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; }
h2 { border-bottom: 1px solid #d5d9de; padding-bottom: .2rem; } h3 { font-size: 1.05rem; }
.summary { background: #f3f6f9; border-left: 4px solid #0072b2; padding: .6rem 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .6rem 0; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #e3e6ea; text-align: left; vertical-align: top; }
th { background: #f3f6f9; } td.n, th.n { text-align: right; }
td:first-child { min-width: 9rem; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #505a66; font-size: .9rem; }
pre { background: #f3f6f9; padding: .8rem; overflow-x: auto; font-size: .82rem; line-height: 1.4; }
.note { color: #505a66; font-size: .9rem; }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str
    note: bool = False


@dataclass(frozen=True)
class Bullets:
    items: list[str]
    summary: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells already formatted. `text_columns` leading columns are left-aligned, the others are numbers."""

    head: list[str]
    rows: list[list[str]]
    text_columns: int = 1


@dataclass(frozen=True)
class Picture:
    """A PNG with its name (the file's stem), a text for those who cannot see it, and a caption."""

    name: str
    png: bytes
    alt: str
    caption: str


@dataclass(frozen=True)
class Code:
    text: str
    title: str
    language: str = ""
    folded: bool = True


Block = Heading | Paragraph | Bullets | Table | Picture | Code


def write_page(title: str, blocks: list[Block], folder: Path) -> Path:
    """Write `report.html`, `report.md` and `plots/*.png` into `folder`; returns the path of the HTML page."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Picture):
            _replace(folder / "plots" / f"{block.name}.png", block.png)
    body = "\n".join(_html(block) for block in blocks)
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )
    _replace(folder / "report.md", (f"# {title}\n\n" + "\n\n".join(_markdown(b) for b in blocks) + "\n").encode())
    _replace(folder / "report.html", page.encode())
    return folder / "report.html"


def _replace(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a reader or a killed process never leaves half a file."""
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(content)
    os.replace(beside, path)


def _html(block: Block) -> str:
    text = html.escape
    match block:
        case Heading():
            return f"<h{block.level}>{text(block.text)}</h{block.level}>"
        case Paragraph():
            return f"<p{' class=note' if block.note else ''}>{text(block.text)}</p>"
        case Bullets():
            items = "".join(f"<li>{text(item)}</li>" for item in block.items)
            return f'<div class="summary"><ul>{items}</ul></div>' if block.summary else f"<ul>{items}</ul>"
        case Table():
            kind = ["" if i < block.text_columns else ' class="n"' for i in range(len(block.head))]
            head = "".join(f"<th{k}>{text(cell)}</th>" for k, cell in zip(kind, block.head, strict=True))
            rows = "\n".join(
                "<tr>" + "".join(f"<td{k}>{_cell(c)}</td>" for k, c in zip(kind, row, strict=True)) + "</tr>"
                for row in block.rows
            )
            return (f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>')
        case Picture():
            data = base64.b64encode(block.png).decode()
            image = f'<img alt="{text(block.alt)}" src="data:image/png;base64,{data}">'
            return f"<figure>{image}<figcaption>{text(block.caption)}</figcaption></figure>"
        case Code():
            opened = "" if block.folded else " open"
            return f"<details{opened}><summary>{text(block.title)}</summary><pre>{text(block.text)}</pre></details>"


def _cell(text: str) -> str:
    """A cell that may break between a figure and its interval, but within neither."""
    kept = re.sub(r"\[[^]]*\]| %", lambda m: m[0].replace(" ", "\u00a0"), text)
    return html.escape(kept)


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Paragraph():
            return block.text
        case Bullets():
            return "\n".join(f"- {item}" for item in block.items)
        case Table():
            rule = ["---" if i < block.text_columns else "---:" for i in range(len(block.head))]
            rows = [block.head, rule, *block.rows]
            return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows)
        case Picture():
            return f"![{block.alt}](plots/{block.name}.png)\n\n*{block.caption}*"
        case Code():
            return f"**{block.title}**\n\n```{block.language}\n{block.text.rstrip()}\n```"
