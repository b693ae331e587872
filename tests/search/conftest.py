import pytest
from support import stores_contract
from support.postgresql import postgresql

from sfumato.search import texts


@pytest.fixture
def needs_faiss():
    pytest.importorskip("faiss", reason="needs the extra faiss")


@pytest.fixture(autouse=True)
def _stores_are_closed():
    yield
    while stores_contract.made:
        stores_contract.made.pop().close()


@pytest.fixture
def quick_texts(monkeypatch):
    monkeypatch.setattr(texts, "sentence_vectors", stores_contract.quick_vectors)


@pytest.fixture(scope="module")
def server():
    with postgresql() as server:
        yield server
