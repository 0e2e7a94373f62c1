"""The page as Markdown; pictures stay files beside it."""

from collections.abc import Sequence
from pathlib import Path

from idn.report.parts import Bullets, Code, Figure, Gallery, Heading, Part, Table, Text


def render(parts: Sequence[Part], folder: Path) -> str:
    """The whole page, to stand in `folder`."""
    return "\n\n".join(block(part, folder) for part in parts) + "\n"


def block(part: Part, folder: Path) -> str:
    match part:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Code(text):
            return f"```sh\n{text}\n```"
        case Table():
            return table(part)
        case Figure(path, caption):
            return f"![{caption}]({path.relative_to(folder).as_posix()})"
        case Gallery(figures):
            return "\n\n".join(block(figure, folder) for figure in figures)


def table(part: Table) -> str:
    rows = [part.head, ["---"] * len(part.head), *part.rows]
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join(lines) + f"\n\n{part.caption}"
