import pytest
from support import stores_contract


@pytest.fixture(autouse=True)
def _stores_are_closed():
    yield
    while stores_contract.made:
        stores_contract.made.pop().close()
