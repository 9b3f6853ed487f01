"""What the series of a soak are judged by: growth in a window, slopes of a long life, and none without enough of either."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.soak.series import LEAST_S, LONG_S, WARM_S, Life, Series, Values

LIFE = Life("frontend-1", 7, 0.0)


def series_of(
    folder: Path,
    length_s: float,
    *,
    rss_an_hour: float = 0.0,
    tasks_an_hour: float = 0.0,
    life: Life = LIFE,
) -> Series:
    """One life with these slopes, and a beginning in which it grows by far more."""
    samples: list[tuple[float, Values]] = []
    for at in range(0, int(length_s) + 1, 5):
        rss = 100 + rss_an_hour * at / 3600 - max(0.0, 10 - at / 20)
        samples.append((float(at), (rss, 20.0 + at % 3, 30 + tasks_an_hour * at / 3600, None)))
    return Series(folder, {life: samples})


@pytest.mark.parametrize(
    ("length_s", "rss_an_hour", "tasks_an_hour", "is_found"),
    [
        (WARM_S + LEAST_S - 5, 900, 0, None),
        (WARM_S + 600, 10, 0, False),
        (WARM_S + 600, 60, 0, True),
        (2 * LONG_S, 0.9, 0, False),
        (2 * LONG_S, 1.1, 0, True),
        (2 * LONG_S, 0, 0.9, False),
        (2 * LONG_S, 0, 2, True),
    ],
)
def test_a_life_is_judged_by_what_it_is_long_enough_for(
    tmp_path: Path,
    length_s: float,
    rss_an_hour: float,
    tasks_an_hour: float,
    is_found: bool | None,
) -> None:
    made = series_of(tmp_path, length_s, rss_an_hour=rss_an_hour, tasks_an_hour=tasks_an_hour)
    lines, found = made.verdict()

    assert bool(found) is bool(is_found)
    assert (lines == ["no process was old enough to tell"]) is (is_found is None)


def test_servers_of_others_are_shown_and_not_judged(tmp_path: Path) -> None:
    lines, found = series_of(
        tmp_path, 2 * LONG_S, rss_an_hour=50, life=Life("etcd", 7, 0.0)
    ).verdict()

    assert "RSS MiB 200, +50.00 an hour" in lines[0]
    assert found == []


def test_the_picture_has_a_panel_for_each_measure_and_is_well_formed(tmp_path: Path) -> None:
    text = series_of(tmp_path, WARM_S).draw().read_text()

    assert ET.fromstring(text).tag.endswith("svg")
    assert [each in text for each in ("RSS MiB", "descriptors", "tasks", "disk")] == [True] * 4
