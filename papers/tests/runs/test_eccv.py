"""An ECCV Caption of one's own, by hand: three images, two texts each, two models."""

import csv
import json

import pytest
import torch
from support.raising import raises

from papers.runs.eccv import GRADES, Pool, grade, measure_pool, pool_table, read_judgements, write_pool
from sfumato.data.pairs import PairData
from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding

TEXTS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture
def pool():
    """On a line: the first model has each text near its image, the second has image 0 near the texts of image 1."""
    data = PairData(
        image_ids=("x", "y", "z"), text_ids=TEXTS, images=(None,) * 3, texts=TEXTS, text_kinds=("",) * 6,
        pairs=[(t // 2, t) for t in range(6)],
    )  # fmt: skip
    made = Pool(data)
    texts = GaussianEmbedding.point(torch.tensor([[0.0], [1], [10], [11], [20], [21]]))
    for name, places in (("first", [0.4, 10.4, 20.4]), ("second", [10.3, 0.2, 20.4])):
        images = GaussianEmbedding.point(torch.tensor(places).unsqueeze(1))
        made.add(name, images, texts, get_distance("squared_l2"), 2)
    return made


def test_candidates_are_the_best_of_both_directions_that_the_data_do_not_list(pool):
    first = {pair for pair, names in pool.proposed.items() if "first" in names}
    assert first == {(1, 0), (1, 1), (0, 2), (2, 3), (1, 4), (1, 5)}
    second = {pair for pair, names in pool.proposed.items() if "second" in names}
    assert second == {(0, 2), (0, 3), (1, 0), (1, 1), (2, 3), (0, 4), (0, 5)}


def test_figures_by_hand(pool, tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("image,caption_id,yes,no\nx,y#0,3,0\nx,d,1,1\ny,a,1,2\nz,d,0,3\nx,f,9,0\nq,a,1,0\n")
    judged = read_judgements(path, pool.data)
    assert judged == {(0, 2): 1.0, (0, 3): 0.5, (1, 0): pytest.approx(1 / 3), (2, 3): 0.0, (0, 5): 1.0}
    for wrong in ("x,d,one,1", "x,d,1"):
        (tmp_path / "wrong.csv").write_text(f"image,caption_id,yes,no\nx,c,1,1\n{wrong}\n")
        raises(UserError, "wrong.csv:3: yes is '", read_judgements, tmp_path / "wrong.csv", pool.data)
    assert [grade(f) for f in (1, 0.5, 0.4, 0)] == ["100% yes", "weak yes", "weak no", "100% no"]
    found = measure_pool(pool, judged)
    assert found["judged"] == 5 and [found[name] for name in GRADES] == [2, 1, 1, 1]
    assert found["positives"]["i2t verified"] == 6 + 3 and found["positives"]["i2t own"] == 6
    assert found["positives"]["t2i queries"] == 4  # Texts a, c, d and f.
    # Image x has a, b, c, d, f. The first model ranks them 1, 2, 3, 4, 6: mAP@R 4/5. The second finds c, d first.
    figures = found["figures"]
    assert figures["first"]["i2t verified r_precision"] == pytest.approx((4 / 5 + 1 + 1) / 3)
    assert figures["first"]["i2t verified recall@1"] == 1
    assert figures["second"]["i2t own recall@1"] == pytest.approx(1 / 3)
    assert figures["second"]["i2t verified recall@1"] == pytest.approx(2 / 3)
    # Second model: a has x alone, found second; c has x, y, d has y, x of which y comes third, f has x and z.
    assert figures["second"]["t2i verified map@r"] == pytest.approx((0 + 1 + 0.5 + 1) / 4)
    write_pool(pool, judged, tmp_path / "out")
    lists = json.loads((tmp_path / "out" / "image_to_caption.json").read_text())
    assert lists == {"x": ["a", "b", "c", "d", "f"], "y": ["c", "d"], "z": ["e", "f"]}
    assert json.loads((tmp_path / "out" / "caption_to_image.json").read_text())["c"] == ["y", "x"]
    with (tmp_path / "out" / "pool.csv").open() as file:
        rows = {(row["image"], row["caption_id"]): row for row in csv.DictReader(file)}
    assert len(rows) == len(pool.proposed) and rows["x", "c"]["proposed_by"] == "first second"
    assert rows["x", "d"]["grade"] == "weak yes" and rows["y", "b"]["grade"] == ""
    table = pool_table(found)
    table.show()
    assert table.rows[0][:2] == ["first", "93.3 (100.0)"]
    assert table.notes[0].startswith("9 pairs proposed, 5 judged: 2 ")
