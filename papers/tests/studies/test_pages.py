"""What the page of the studies shows: words, numbers of one precision, and nothing that can break out."""

from pathlib import Path

from reports.test_report import EVIL, Checker
from support.pictures import png

from papers.studies import pages
from papers.studies.pages import analysis_views
from sfumato.charts import render_page


def test_what_users_wrote_cannot_become_markup():
    ellipse = {"x": 0.0, "y": 1.0, "a": 0.2, "b": 0.1, "angle": 0.3, "total_variance": 1.0}
    items = [
        ellipse | {"side": side, "index": 0, "id": EVIL, "label": EVIL, "family": f}
        for side in ("image", "text")
        for f in (0, None)
    ]
    value = {"value": 0.5, "low": 0.1, "high": 0.9}
    pair = {
        "items": [
            ellipse | {"name": "first", "picture": EVIL},
            ellipse | {"name": "erased_first", "picture": EVIL, "x": 2.0},
        ],
        "explained": [0.5, 0.5], "captions": [EVIL, EVIL],
    }  # fmt: skip
    told = {"mixes": {"more_uncertain": EVIL}, "erased": {"moved": EVIL}}
    one = {"mean": 1.0, "n_captions": 2, "words_per_caption": 1.0, "words": [{"word": EVIL, "n": 1, "weight": 1.0}]}
    found = {
        "map": {"method": "pca", "explained": [0.5, 0.2], "items": items},
        "sets": {"mixes": {"mixup": {"more_uncertain": value}}, "erased": {"moved": value}, "definitions": told,
                 "shown": [pair], "n": 3, "erased_share": 0.25},
        "words": {"uncertainty": EVIL, "corpus": "bin", "sides": {"image": [one]}},
    }  # fmt: skip
    about = {"model": EVIL, "split": EVIL, "n_images": 2, "n_texts": 2, "distance": "csd"}
    for content in (None, png((1, 40, 90))):
        values = {"about": about, "notes": [EVIL], "views": analysis_views(found, lambda name, it=content: it)}
        page = render_page("analysis.html.j2", values, Path(pages.__file__).parent)
        checked = Checker(page)
        assert {"map", "sets", "words"} <= set(checked.ids) and sum("<script>" in text for text in checked.text) > 6
        assert ("data:image/png" in page[page.index('id="sets"') : page.index('id="words"')]) == (content is not None)
