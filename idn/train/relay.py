"""The actor between rank 0 and the driver. It imports nothing, so that its process starts at once."""

from typing import Any

Record = dict[str, Any]


class Relay:
    """Keeps rank 0's records until the driver takes them, and the driver's wish to stop until rank 0 asks."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._stop = False
        self._fatal: str | None = None

    def put(self, record: Record) -> bool:
        self._records.append(record)
        return self._stop

    def take(self) -> list[Record]:
        records, self._records = self._records, []
        return records

    def stop(self) -> None:
        self._stop = True

    def fail(self, message: str) -> None:
        self._fatal = self._fatal or message

    def fatal(self) -> str | None:
        return self._fatal
