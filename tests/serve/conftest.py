import shutil

import pytest
from support.serving import collected, embedded, embedding_sources, make_embedding_run, make_squares, read_only, served

from sfumato.models.run import load_run
from sfumato.serve.settings import open_sources


@pytest.fixture(scope="session")
def run(toy):
    return toy / "run"


@pytest.fixture(scope="session")
def data(run):
    return run.parent / "data"


@pytest.fixture(scope="session")
def sources(run, data):
    return read_only(run, data)


@pytest.fixture(scope="session")
def client(sources):
    with served(sources, max_results=40, max_batch=8) as client:
        yield client


@pytest.fixture(scope="session")
def vector_run(tmp_path_factory):
    return make_embedding_run(tmp_path_factory.mktemp("vectors"))


@pytest.fixture(scope="session")
def adopted(vector_run):
    return embedding_sources(vector_run)


@pytest.fixture(scope="session")
def vectors(adopted):
    with served(adopted, max_results=40, max_batch=8) as client:
        yield client


@pytest.fixture(scope="session")
def filled(run, data, tmp_path_factory):
    loaded = load_run(run)
    return collected(loaded, embedded(loaded, data), tmp_path_factory.mktemp("filled") / "collection")


@pytest.fixture
def collection(filled, tmp_path):
    return shutil.copytree(filled, tmp_path / "collection")


@pytest.fixture(scope="session")
def kept(filled, tmp_path_factory):
    """Of a service of a collection, for tests that leave it as it was."""
    with served(open_sources(shutil.copytree(filled, tmp_path_factory.mktemp("kept") / "collection"))) as client:
        yield client


@pytest.fixture
def writable(collection):
    with served(open_sources(collection), max_batch=8) as client:
        client.folder = collection
        yield client


@pytest.fixture(scope="session")
def squares(tmp_path_factory):
    return make_squares(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="session")
def judging(squares, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    file = folder / "verdicts.jsonl"
    with served(open_sources(shutil.copytree(squares, folder / "index")), judgements=file) as client:
        client.file = file
        yield client


@pytest.fixture
def judged(judging):
    judging.file.unlink(missing_ok=True)
    return judging
