import sys

import pytest
import torch
from support.references_metrics import squared_l2_by_broadcast

from sfumato.errors import UserError
from sfumato.search.stores.faiss import FAISS_ENGINES, FaissOptions, FaissStore

faiss = pytest.importorskip("faiss", reason="needs the extra faiss")


def vectors(n, seed):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("engine", FAISS_ENGINES)
def test_finds_itself_and_survives_the_disk(engine, tmp_path):
    data = vectors(300, 0)
    store = FaissStore.build(data, engine)
    squared_l2, positions = store.search(data[:20], 5)
    assert store.n == 300 and positions.shape == (20, 5) and positions.dtype == torch.int64
    assert positions[:, 0].tolist() == list(range(20))
    exact = torch.from_numpy(squared_l2_by_broadcast(data[:20], data)).gather(1, positions)
    torch.testing.assert_close(squared_l2.double(), exact, rtol=1e-4, atol=1e-4)
    store.write(tmp_path / "index")
    again = FaissStore.read(tmp_path / "index", engine, store.options)
    assert torch.equal(again.search(data[:20], 5)[1], positions)


def test_ivf_is_seeded_and_reports_what_it_did_not_find():
    data = vectors(400, 1)
    options = FaissOptions(n_lists=40, n_probe=1, seed=3)
    found = [FaissStore.build(data, "ivf", options).search(vectors(9, 2), 50)[1] for _ in range(2)]
    assert torch.equal(found[0], found[1])
    assert (found[0] == -1).any() and (found[0][:, 0] >= 0).all()


def test_more_effort_finds_more():
    data, queries = vectors(3000, 4), vectors(100, 5)
    ground_truth = torch.from_numpy(squared_l2_by_broadcast(queries, data)).argsort(1)[:, :10]

    def recall(engine, **numbers):
        found = FaissStore.build(data, engine, FaissOptions(**numbers)).search(queries, 10)[1]
        return (found.unsqueeze(2) == ground_truth.unsqueeze(1)).any(2).float().mean().item()

    assert (
        recall("ivf", n_lists=50, n_probe=1)
        < recall("ivf", n_lists=50, n_probe=10)
        < recall("ivf", n_lists=50, n_probe=50)
        == 1
    )
    assert recall("hnsw", m=4, ef_construction=10, ef_search=10) < recall(
        "hnsw", m=32, ef_construction=100, ef_search=200
    )


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="unknown engine 'tree'"):
        FaissStore.build(vectors(3, 0), "tree")
    with pytest.raises(ValueError, match="9 lists for 3 vectors"):
        FaissStore.build(vectors(3, 0), "ivf", FaissOptions(n_lists=9))
    with pytest.raises(ValueError, match="n_probe must be at least 1, got 0"):
        FaissOptions(n_probe=0)
    (tmp_path / "x").write_bytes(b"not an index")
    with pytest.raises(ValueError, match="FAISS cannot read this file"):
        FaissStore.read(tmp_path / "x", "hnsw", FaissOptions())


def test_without_faiss_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install 'sfumato\[faiss\]', or use engine exact"):
        FaissStore.build(vectors(3, 0), "hnsw")
