import pytest
from support import stores_contract


@pytest.fixture
def needs_faiss():
    pytest.importorskip("faiss", reason="needs the extra faiss")


@pytest.fixture(autouse=True)
def _stores_are_closed(request):
    """And a test of an engine of FAISS is skipped without it."""
    engine = request.node.callspec.params.get("engine", "flat") if hasattr(request.node, "callspec") else "flat"
    if engine not in ("exact", "flat"):
        request.getfixturevalue("needs_faiss")
    yield
    while stores_contract.made:
        stores_contract.made.pop().close()
