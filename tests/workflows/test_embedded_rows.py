"""Rows that other programs embed: the function that they call, and the galleries of what it gives."""

import shutil

import numpy as np
import pytest
import torch
from support.raising import raises
from support.words import folded

from sfumato.errors import UserError
from sfumato.models.embed import embed_folder
from sfumato.models.run import load_model
from sfumato.search.collection import GaussianCollection
from sfumato.search.folder import is_collection
from sfumato.workflows.index import RowEmbedder, is_embedded

pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
rows_of = lambda folder, names: {"id": names, "bytes": [(folder / name).read_bytes() for name in names]}


@pytest.fixture(scope="module")
def embedded(toy, tmp_path_factory):
    """The toy's images in two Parquet files, and a text beside each."""
    folder, embed = tmp_path_factory.mktemp("embedded"), RowEmbedder(str(toy / "run"))
    names = sorted(path.name for path in (toy / "data").glob("*.png"))
    for number, part in enumerate((names[:30], names[30:])):
        batch = rows_of(toy / "data", part) | {"captions": [f"picture {name}" for name in part]}
        parquet.write_table(pyarrow.table(embed(batch)), folder / f"{number}.parquet")
    return folder


def test_a_batch_is_embedded_as_a_folder_is_and_what_cannot_be_is_left_out(toy):
    model = load_model(toy / "run")
    expected, ids, _ = embed_folder(model, toy / "data")
    batch = RowEmbedder(str(toy / "run"))(rows_of(toy / "data", ids[:7]))
    assert set(batch) == {"id", "mean", "log_var", "model"} and batch["id"] == ids[:7] and len(set(batch["model"])) == 1
    for name in ("mean", "log_var"):
        found = torch.from_numpy(np.stack(batch[name]))
        torch.testing.assert_close(found, getattr(expected, name)[:7], rtol=1e-5, atol=1e-6)
    of_texts = RowEmbedder(str(toy / "run"), modality="texts")({"id": ["1"], "text": ["a red circle"]})
    expected = model.model.embed_texts(["a red circle"]).mean
    torch.testing.assert_close(torch.from_numpy(np.stack(of_texts["mean"])), expected)
    assert of_texts["text"] == ["a red circle"]
    embed, batch = RowEmbedder(str(toy / "run")), rows_of(toy / "data", ["000.png", "001.png"])
    batch = {name: [*values, other] for (name, values), other in zip(batch.items(), ("broken", b"no"), strict=True)}
    with pytest.warns(UserWarning, match="broken is left out"):
        assert embed(batch)["id"] == ["000.png", "001.png"]
    with pytest.warns(UserWarning, match="broken is left out"):
        assert embed({"id": ["broken"], "bytes": [b"no"]})["id"] == []
    raises(UserError, "no column id; got bytes", embed, {"bytes": []})


def test_a_gallery_of_rows_answers_as_one_of_images(toy, embedded, sfumato, tmp_path):
    run, data, asked = toy / "run", toy / "data", ("a red circle", "--target", "listed")
    sfumato.printed("index", run, "--images", data, "--store", "file:", "--out", tmp_path / "plain")
    given = ("--data", embedded, "--images", data, "--store", "file:", "--out")
    assert "48 images" in folded(sfumato.printed("index", run, *given, tmp_path / "rows"))
    half = ("--data", embedded / "0.parquet", "--store", "file:", "--out", tmp_path / "half")
    assert "30 images" in folded(sfumato.printed("index", run, *half))
    hits = lambda folder: sfumato.json("search", tmp_path / folder, *asked)[0]["hits"]
    plain, rows = ({hit["id"]: hit["distance"] for hit in hits(folder)} for folder in ("plain", "rows"))
    assert list(rows) == list(plain) and rows == pytest.approx(plain, rel=1e-4)
    with GaussianCollection.open(tmp_path / "rows") as collection:
        assert collection.get(["000.png"]).payloads[0]["captions"] == "picture 000.png"
        assert collection.metadata["pictures"] == {"folder": str(data.resolve())}


def test_rows_of_another_model_and_damaged_rows_are_refused(toy, embedded, sfumato, tmp_path):
    run, out, table = toy / "run", tmp_path / "out", parquet.read_table(embedded / "0.parquet")

    def refused(changed):
        parquet.write_table(changed, tmp_path / "rows.parquet")
        return sfumato.refused("index", run, "--data", tmp_path / "rows.parquet", "--store", "file:", "--out", out)

    names = table.column_names
    assert "by another model" in refused(table.set_column(names.index("model"), "model", [["x"] * 30]))
    assert "no column id" in refused(table.drop_columns("id"))
    means = table.column("mean").to_pylist()
    for wrong, message in (([float("nan")] * 16, "NaN"), ([1.0] * 15, "differ in length"), (None, "some are missing")):
        changed = pyarrow.array([wrong, *means[1:]], pyarrow.list_(pyarrow.float32()))
        assert message in refused(table.set_column(names.index("mean"), "mean", changed))
    assert not out.exists() or not is_collection(out)
    assert not is_embedded(tmp_path / "none.parquet") and not is_embedded(toy / "data")
    shutil.copy(toy / "toy.toml", tmp_path / "no.parquet")
    told = sfumato.refused("index", run, "--data", tmp_path / "no.parquet", "--out", out)
    assert "not a complete Parquet file" in told
