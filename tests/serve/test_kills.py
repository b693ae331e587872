"""The benchmark that kills services, store and proxy sees what it is there to see."""

import io

import httpx
import pytest
from support.scripts import benchmark

pytest.importorskip("psycopg")


@pytest.fixture(scope="module")
def kills():
    return benchmark("kills")


def sent(kills, began, ended, outcome, kind="add"):
    return kills.Sent(began, ended, kind, outcome, "told")


def test_a_request_counts_under_the_fault_that_it_overlaps(kills):
    record = kills.Record()
    record.outages += [("store", 10.0, 20.0), ("proxy", 30.0, 31.0)]
    for began, ended, outcome in ((1, 2, "ok"), (9, 11, "503"), (19, 29, "503"), (30.5, 40, "ReadError")):
        record.sent.append(sent(kills, began, ended, outcome))
    found = record.by_fault()
    assert found == {"between": {"ok": 1}, "store": {"503": 2}, "proxy": {"ReadError": 1}}
    assert record.wrong == [] and record.writes() == {"acknowledged": 1, "unknown": 3}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        *((fault, "500") for fault in ("service", "store", "proxy", "between")),
        *((fault, "503") for fault in ("service", "proxy", "between")),
        *((fault, "ReadError") for fault in ("service", "store", "between")),
        *((fault, "404") for fault in ("service", "store", "proxy", "between")),
        ("store", "504"),
        ("store", "503 without Retry-After"),
    ],
)
def test_what_is_not_expected_under_a_fault_is_blamed(kills, fault, outcome):
    record = kills.Record()
    record.outages += [(one, 10.0 * i, 10.0 * i + 5) for i, one in enumerate(("service", "store", "proxy"))]
    began = {"service": 1, "store": 11, "proxy": 21, "between": 31}[fault]
    record.sent.append(sent(kills, began, began + 1, outcome))
    assert record.by_fault()[fault] == {outcome: 1}
    assert [told.partition(":")[0] for told in record.wrong] == [fault]


class Answers:
    """A service that answers as told, or not at all."""

    def __init__(self):
        self.next = []

    def __call__(self, request):
        answer = self.next.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_write_without_an_answer_is_unknown_and_one_that_is_acknowledged_is_not(kills):
    record, answers = kills.Record(), Answers()
    caller = kills.Caller(0, kills.Target("http://a", 1), record, 0)
    caller._http = httpx.Client(transport=httpx.MockTransport(answers))
    caller._ids = ["one"]
    caller._chance.choice = lambda among: among[0]
    answers.next = [httpx.Response(201), httpx.ReadError("x"), httpx.Response(503)]
    for _ in range(3):
        caller._add()
    assert record.allowed == {"one": {1, 2, 3}}
    caller._chance.sample = lambda among, n: among[:n]
    answers.next = [httpx.Response(200)]
    caller._delete()
    assert record.allowed == {"one": {None}}
    assert [one.outcome for one in record.sent] == ["ok", "ReadError", "503 without Retry-After", "ok"]


def test_what_is_lost_is_blamed(kills):
    record, answers = kills.Record(), Answers()
    caller = kills.Caller(0, kills.Target("http://a", 1), record, 0)
    caller._http = httpx.Client(transport=httpx.MockTransport(answers))
    caller._ids = ["one"]
    found = httpx.Response(200, json={"payload": {"version": "3"}})
    right, other = (shown("one", version) for version in (3, 4))
    for allowed, told, wrong in (
        ({3}, [found, right], False),
        ({2, 3}, [found, right], False),
        ({None}, [httpx.Response(404)], False),
        ({3}, [found, other], True),
        ({2}, [found], True),
        ({3}, [httpx.Response(404)], True),
        ({None}, [found], True),
    ):
        record.allowed = {"one": allowed}
        for look in (caller.check, caller._item):
            before, answers.next = len(record.wrong), list(told)
            look()
            assert (len(record.wrong) > before) == wrong, (allowed, told)


def shown(id, version):
    file = io.BytesIO()
    benchmark("soak").image_of(id, version).save(file, "PNG")
    return httpx.Response(200, content=file.getvalue())
