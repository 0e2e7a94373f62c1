"""The page as one HTML file that stands alone: styles and pictures inside, no script, no network."""

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from idn.report.parts import Bullets, Code, Figure, Gallery, Heading, Part, Table, Text

WIDEST = 900
"""Pixels: wider pictures are made smaller, the originals lie beside the page."""
COLOURS = 64
STYLE = (Path(__file__).parent / "style.css").read_text()


def render(parts: Sequence[Part]) -> str:
    """The whole page."""
    title = next(part.text for part in parts if isinstance(part, Heading))
    body = "\n".join(block(part) for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def block(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f'<h{level} id="{anchor(text)}">{inline(text)}</h{level}>'
        case Text(text):
            return f"<p>{inline(text)}</p>"
        case Bullets(lines):
            return "<ul>" + "".join(f"<li>{inline(line)}</li>" for line in lines) + "</ul>"
        case Code(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"
        case Table():
            return table(part)
        case Figure():
            return figure(part)
        case Gallery(figures):
            return '<div class="gallery">\n' + "\n".join(map(figure, figures)) + "\n</div>"


def inline(text: str) -> str:
    """
    >>> inline("**1.04** < `--lr 1`")
    '<strong>1.04</strong> &lt; <code>--lr 1</code>'
    """
    text = html.escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def table(part: Table) -> str:
    head = "".join(f'<th scope="col">{inline(text)}</th>' for text in part.head)
    rows = []
    previous = ""
    for row in part.rows:
        first = row[0]
        # The same model again: its name is said once.
        name = f'<th scope="row"{" class=again" if first == previous else ""}>{inline(first)}</th>'
        rows.append(f"<tr>{name}" + "".join(cell(text) for text in row[1:]) + "</tr>")
        previous = first
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>"
    return (
        f'<figure class="table"><div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table>\n{inside}\n</table></div><figcaption>{inline(part.caption)}</figcaption></figure>"
    )


def cell(text: str) -> str:
    missing = text == "not run" or text.startswith("at step")
    return f"<td{' class=missing' if missing else ''}>{inline(text)}</td>"


def figure(part: Figure) -> str:
    content, width, height = embedded(part.path)
    caption = html.escape(part.caption, quote=True)
    return (
        f'<figure><img src="data:image/png;base64,{content}" width="{width}" height="{height}" alt="{caption}">'
        f"<figcaption>{inline(part.caption)}</figcaption></figure>"
    )


def embedded(path: Path) -> tuple[str, int, int]:
    """A picture's bytes for the page: not wider than a screen needs, few colours."""
    with Image.open(path) as file:
        picture = file.convert("RGB")
    if picture.width > WIDEST:
        size = (WIDEST, round(picture.height * WIDEST / picture.width))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode(), picture.width, picture.height


def anchor(text: str) -> str:
    """
    >>> anchor("Densities (the paper's Figure 2)")
    'densities-the-paper-s-figure-2'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
