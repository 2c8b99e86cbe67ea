"""Where a study keeps its results, and how several workers share it: a file for each point, and a lock beside it.

The operating system frees the locks of a worker that dies, so others do what it had begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from selfspec.errors import StorageError
from selfspec.files.json_text import read_json
from selfspec.files.writing import write_sealed, writing
from selfspec.tools.studies.points import Point, Result

FOLDER = "points"
_KEPT = "what was finished is kept there; repeat the command once there is room"


class Board:
    """Results and claims, shared by all workers of a study.

    Args:
        place: the folder of the study; results lie in a folder below it.

    Raises:
        StorageError: it cannot be used.
    """

    def __init__(self, place: str | Path) -> None:
        self.folder = Path(place) / FOLDER
        self._results: dict[str, Result] = {}
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def results(self) -> Mapping[str, Result]:
        """Return what all workers have found so far, by key."""
        for file in self.folder.glob("[!.]*.json"):
            if file.stem not in self._results:
                self._results[file.stem] = read_json(file, Result, StorageError, "delete it, and it is found out again")
        return self._results

    @contextmanager
    def claimed(self, points: Sequence[Point]) -> Iterator[Sequence[Point]]:
        """Claim those of some points that nobody has done and no other worker has claimed."""
        with ExitStack() as locks:
            claimed = []
            for point in points:
                with writing(self.folder, _KEPT), suppress(Timeout):
                    locks.enter_context(FileLock(self.folder / f"{point.key}.lock", blocking=False))
                    if not self._file(point).exists():
                        claimed.append(point)
            yield claimed

    def keep(self, results: Sequence[Result]) -> None:
        """Keep what was found of claimed points."""
        for result in results:
            write_sealed(self._file(result.point), asdict(result), _KEPT)

    def _file(self, point: Point) -> Path:
        return self.folder / f"{point.key}.json"
