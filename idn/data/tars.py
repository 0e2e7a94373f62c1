"""Tar archives as WebDataset uses them: consecutive members that share a key are one sample."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 512
_ZEROS = bytes(BLOCK)
Read = Callable[[int, int], bytes]
"""Reads (offset, length) of an archive; fewer bytes than asked for mean its end."""


class BadShard(ValueError):
    """An archive that cannot be read, with the place where it went wrong."""


class Member(NamedTuple):
    name: str
    start: int
    """Where its headers begin."""
    data: int
    size: int


def members(read: Read, offset: int = 0) -> Iterator[Member]:
    """The regular files of a ustar, GNU or pax archive, up to its end mark or `offset`'s end of data."""
    start, long_name = offset, ""
    while True:
        header = read(offset, BLOCK)
        if header == _ZEROS or not header:
            return
        if len(header) < BLOCK or header[257:262] != b"ustar":
            raise BadShard(f"not a tar header at byte {offset}: the archive is truncated or damaged")
        try:
            size = int(header[124:136].rstrip(b" \0") or b"0", 8)
        except ValueError:
            raise BadShard(f"unreadable member size at byte {offset}") from None
        kind, data = header[156:157], offset + BLOCK
        offset = data + -(-size // BLOCK) * BLOCK
        if kind == b"L":
            long_name = read(data, size).rstrip(b"\0").decode(errors="replace")
            continue
        if kind == b"x":
            long_name = _pax_path(read(data, size)) or long_name
            continue
        if kind in (b"0", b"\0"):
            name = long_name or header[:100].rstrip(b"\0").decode(errors="replace")
            if not long_name and header[345] and header[262:263] == b"\0":
                name = header[345:500].rstrip(b"\0").decode(errors="replace") + "/" + name
            yield Member(name, start, data, size)
        start, long_name = offset, ""


def _pax_path(records: bytes) -> str:
    for record in records.split(b"\n"):
        _, _, pair = record.partition(b" ")
        if pair.startswith(b"path="):
            return pair[5:].decode(errors="replace")
    return ""


def split_name(name: str) -> tuple[str, str]:
    """(key, extension) of a member: the base name is cut at its first dot.

    >>> split_name("train/000017.png")
    ('train/000017', 'png')
    """
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise BadShard(f"member {name!r} leaves the shard's folder; such archives are refused")
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


class Span(NamedTuple):
    """One sample's place in an archive, headers included."""

    key: str
    start: int
    end: int


def scan(read: Read, size: int) -> list[Span]:
    """All samples of an archive of `size` bytes, each up to the next; raises BadShard if it is truncated."""
    spans: list[Span] = []
    end = 0
    for member in members(read):
        key, extension = split_name(member.name)
        end = member.data + -(-member.size // BLOCK) * BLOCK
        if member.data + member.size > size:
            raise BadShard(f"truncated inside member {member.name!r}: {size} bytes, {end} expected")
        if not extension:
            continue
        if not spans or spans[-1].key != key:
            if spans:
                spans[-1] = spans[-1]._replace(end=member.start)
            spans.append(Span(key, member.start, end))
        spans[-1] = spans[-1]._replace(end=end)
    if size < end + BLOCK:
        raise BadShard(f"truncated: {size} bytes without an end mark")
    return spans


def read_sample(region: bytes) -> tuple[str, dict[str, bytes]]:
    """(key, {extension: content}) of the bytes that a Span covers."""
    files: dict[str, bytes] = {}
    first_key = ""
    for member in members(lambda offset, length: region[offset : offset + length]):
        key, extension = split_name(member.name)
        if not extension:
            continue
        content = region[member.data : member.data + member.size]
        if len(content) < member.size or (first_key and key != first_key):
            raise BadShard(f"member {member.name!r} does not lie where the index says")
        first_key = key
        files[extension] = content
    return first_key, files


def sample_bytes(key: str, files: dict[str, bytes]) -> bytes:
    """A sample as tar members, the same bytes for the same content at any time and place."""
    return b"".join(_member_bytes(f"{key}.{extension}", data) for extension, data in files.items())


def _member_bytes(name: str, data: bytes) -> bytes:
    fields = (
        name.encode().ljust(100, b"\0")
        + b"0000644\0" + b"0000000\0" * 2
        + b"%011o\0" % len(data) + b"%011o\0" % 0
        + b" " * 8 + b"0" + bytes(100) + b"ustar\x0000"
    ).ljust(BLOCK, b"\0")  # fmt: skip
    checksum = b"%06o\0 " % sum(fields)
    padding = bytes(-len(data) % BLOCK)
    return fields[:148] + checksum + fields[156:] + data + padding


END_MARK = bytes(2 * BLOCK)
