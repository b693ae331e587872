import pytest
from support.serving import make_collection, make_run, read_only, served

from sfumato.serve.answering import open_sources


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def data(run):
    return run.parent / "data"


@pytest.fixture(scope="session")
def sources(run, data):
    return read_only(run, data)


@pytest.fixture(scope="session")
def client(sources):
    """Of a service of two read-only galleries."""
    with served(sources, max_results=40, max_batch=8) as client:
        yield client


@pytest.fixture
def collection(run, data, tmp_path):
    return make_collection(run, data, tmp_path / "collection")


@pytest.fixture(scope="module")
def kept(run, data, tmp_path_factory):
    """Of a service of a collection, for tests that leave it as it was."""
    with served(open_sources(make_collection(run, data, tmp_path_factory.mktemp("kept") / "collection"))) as client:
        yield client


@pytest.fixture
def writable(collection):
    """Of a service of a collection."""
    with served(open_sources(collection), max_batch=8) as client:
        client.folder = collection
        yield client
