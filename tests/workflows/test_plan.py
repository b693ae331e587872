"""Plans of large galleries: against hand-worked numbers, and the measured figures within a quarter."""

import json
import math

import pytest
from support.words import folded

from sfumato.workflows import plan
from sfumato.workflows.plan import Machine, law, line, measured, plan_gallery, words_of

SIZES = (100_000, 1_000_000)


def figures(n):
    """400 bytes of memory, 3 kB of disk and 3 ms of two cores an item; 1,000 queries a second whatever the size."""
    return {
        **{"memory to search, MB": n * 4e-4, "disk, MB": n * 3e-3, "store, s": n * 1e-3, "index, s": n * 2e-3},
        **{"p50, ms": 2.0 * math.log10(n / 1e4), "queries a second": 1000.0},
    }


@pytest.fixture
def known(monkeypatch):
    points = {str(n): figures(n) for n in SIZES}
    stores = {"milvus?index=HNSW": points, "file:?engine=hnsw": points}
    monkeypatch.setattr(plan, "measured", lambda: {"dim": 511, "stores": stores})


def test_numbers_by_hand(known):
    served, local = plan_gallery(1e9, 511, 5000, Machine(cores=4, memory=100))
    assert [served.memory_gb, local.memory_gb, local.disk_gb] == pytest.approx([400, 400, 3000])
    # 70 GB of a machine may be used: six parts; four cores answer 2,000 queries a second: three copies.
    assert (served.machines, served.copies, served.fits) == (18, 3, True)
    assert (local.machines, local.copies, local.fits) == (3, 3, False)
    assert local.build_hours == pytest.approx((1e6 + 2e6 / 2) / 3600)
    assert served.build_hours == pytest.approx(local.build_hours / 6)
    assert served.dollars == pytest.approx(18 * 730 * (4 * 0.04 + 100 * 0.005))
    assert local.beyond == pytest.approx(1000) and served.beyond == pytest.approx(1000 / 6)
    said = words_of([served, local])
    assert "milvus?index=HNSW 3, file:?engine=hnsw 3" in said[1] and "behind the writes" in said[2]
    assert "does not fit" in said[3] and "1,000 times" in said[4]
    half, texts = (plan_gallery(1e6, d, 1, Machine(), texts=d == 127)[1] for d in (255, 127))
    assert half.memory_gb == pytest.approx(0.2) and texts.memory_gb == pytest.approx(0.4) and texts.machines == 1


def test_a_law_is_a_power_of_the_number_of_items():
    exact = law({str(n): {"x": 3 * n**1.25} for n in (10, 100, 1000)}, "x")
    assert [exact(n) for n in (1, 50, 1e6)] == pytest.approx([3 * n**1.25 for n in (1, 50, 1e6)])
    assert [of({"100": {"x": 7.0}}, "x")(1000) for of in (law, line)] == pytest.approx([70, 70])


def test_a_line_has_a_constant_that_is_never_negative():
    straight = line({str(n): {"x": 200 + 4.0 * n} for n in (10, 100, 1000)}, "x")
    assert [straight(n) for n in (1, 50, 1e6)] == pytest.approx([204, 400, 4_000_200])
    bent = line({str(n): {"x": n**1.5} for n in (100, 400)}, "x")
    assert bent(0) == 0 and bent(1000) == pytest.approx(1000 * (10 + 20) / 2)


def test_plans_are_within_a_quarter_of_what_was_measured():
    for points in measured()["stores"].values():
        names = set(next(iter(points.values())))
        assert {"memory to search, MB", "disk, MB", "store, s", "index, s", "p50, ms", "queries a second"} <= names
        for of, name in ((line, "memory to search, MB"), (line, "disk, MB"), (law, "store, s")):
            for n, own in points.items():
                assert of(points, name)(float(n)) == pytest.approx(own[name], rel=0.25), (name, n)


def test_the_command(sfumato):
    status, out, _ = sfumato("plan", "--items", "1e9", "--dim", 512, "--queries-per-second", 200)
    assert status == 0 and "1,000,000,000 items of 512 dimensions" in folded(out) and "extrapolated" in out
    status, out, _ = sfumato("plan", "--items", 20_000, "--texts", "--json")
    needs = json.loads(out)
    assert status == 0 and [need["machines"] for need in needs] == [1] * len(needs) and "file:?engine=hnsw" in out
    status, _, errors = sfumato("plan", "--items", 0)
    assert status == 2 and "--items" in errors
    status, _, errors = sfumato("plan", "--items", "inf")
    assert status == 2 and "items must be a finite number" in errors
