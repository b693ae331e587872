import pytest
from support import stores_contract


@pytest.fixture
def needs_faiss():
    pytest.importorskip("faiss", reason="needs the extra faiss")


@pytest.fixture(autouse=True)
def _stores_are_closed():
    yield
    while stores_contract.made:
        stores_contract.made.pop().close()
