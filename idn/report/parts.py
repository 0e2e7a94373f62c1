"""What a page is made of, before it is Markdown or HTML. Texts know **bold** and `code`, nothing else."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Bullets:
    lines: list[str]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]
    caption: str


@dataclass(frozen=True)
class Figure:
    path: Path
    caption: str


@dataclass(frozen=True)
class Gallery:
    figures: list[Figure]


Part = Heading | Text | Bullets | Code | Table | Figure | Gallery


def literal(text: str) -> str:
    """Words of a command, so that nothing in them is taken for markup.

    >>> literal("--lr 0.01"), literal("")
    ('`--lr 0.01`', '')
    """
    return f"`{text.replace('`', '')}`" if text else ""
