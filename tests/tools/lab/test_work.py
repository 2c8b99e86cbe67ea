"""What a study is expected to take; sizes that a folder was begun with stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.counted_work import counted
from helpers.studies import declared, stories_loader
from selfspec.measure.expected_time import TokenTimes
from selfspec.tools.lab.ablation import fit_study, resize, sizes_of, work, work_on
from selfspec.tools.lab.runs import Runs

pytest.importorskip("pandas")

TIMES = TokenTimes(step=11, read=1)


@pytest.mark.tools
@pytest.mark.parametrize(("confirm", "pricing"), [(0, "weights"), (2, "weights"), (0, "measured")])
def test_it_is_of_the_right_size(confirm: int, pricing: str) -> None:
    load = stories_loader()
    study = declared(drafts=["exits"], confirm=confirm, pricing=pricing, max_new_tokens=24)
    with counted(load("stories").model) as found:
        work_on(study, load, Runs(None))
    expected = TIMES.seconds(work(study, load("stories"), 4, {}))
    assert 0.4 < expected / found.seconds < 2.5


def test_a_study_goes_on_with_the_sizes_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studied, study = stories_loader()("stories"), declared(max_new_tokens=64, confirm=6, reach=2)

    def fitted(seconds: float, place: Path | None = tmp_path, minutes: float = 1) -> dict[str, int]:
        monkeypatch.setattr(TokenTimes, "measured", lambda model: TokenTimes(seconds, seconds))
        return dict(fit_study(study, sizes_of(study), 14, studied, minutes, Runs(place)).sizes)

    begun = fitted(1.0)
    assert begun["max_new_tokens"] == 16
    assert fitted(1e-6) == begun
    assert fitted(1e-6, None) == {"max_new_tokens": 64, "confirm": 6, "reach": 2}
    assert resize(study, begun).max_new_tokens == 16
    # With more texts it goes on from what is known; with more time it is another.
    study = replace(study, texts=9)
    assert fitted(1e-6) == begun
    assert fitted(1e-6, minutes=2)["max_new_tokens"] == 64
