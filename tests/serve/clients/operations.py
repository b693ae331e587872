"""Every operation of the service by the generated Python client: each answer is of its type.

Arguments: the URL of a collection, its key, and the URL of a service that is searched by vector.
"""

import base64
import sys
from io import BytesIO
from typing import TypeVar

import sfumato_client.models as m
from PIL import Image
from sfumato_client import AuthenticatedClient, Client
from sfumato_client.api.items import add_items, delete_items, get_item, list_items
from sfumato_client.api.judgements import get_judgements, post_judgements
from sfumato_client.api.look import get_picture
from sfumato_client.api.search import search, search_by_text
from sfumato_client.api.state import get_health, get_info, get_metrics, get_readiness
from sfumato_client.types import File

T = TypeVar("T")

URL, KEY, VECTORS = sys.argv[1:]
client, stranger, by_vector = (
    AuthenticatedClient(base_url=URL, token=KEY),
    Client(base_url=URL),
    Client(base_url=VECTORS),
)
file = BytesIO()
Image.new("RGB", (40, 30), "red").save(file, "PNG")
image = base64.b64encode(file.getvalue()).decode()


def of(kind: type[T], answer: object) -> T:
    """The answer, which is of a kind."""
    assert isinstance(answer, kind), answer
    return answer


assert of(m.State, get_health.sync(client=stranger)).status == "alive"
assert of(m.State, get_readiness.sync(client=stranger)).status == "ready"
info = of(m.Info, get_info.sync(client=client))
assert info.galleries["images"].writable and info.query_kinds.vector.to_dict() == {}
assert "sfumato_requests_total" in of(str, get_metrics.sync(client=client))

told = search_by_text.sync(client=client, q="a red square", max_results=3, where=["captions>=a"])
(answer,) = of(m.SearchResponse, told).answers
assert answer.verdict is not None and answer.conformal_set is None and answer.hits[0].match_probability is not None
where, ranges = m.ItemFilterWhere(), m.ItemFilterRanges()
where["captions"], ranges["captions"] = ["a plain red square"], ["a", "b"]
queries = [m.Query(text="a red square", without=["blue"]), m.Query(id=answer.hits[0].id), m.Query(image=image)]
body = m.SearchRequest(queries=queries, filter_=m.ItemFilter(where=where, ranges=ranges))
some = of(m.SearchResponse, search.sync(client=client, body=body)).answers
assert [one.kind for one in some] == ["text", "id", "image"] and some[1].hits[0].match_probability is None
vectors = m.SearchRequest(queries=[m.Query(vector=[0.5] * 5)], max_results=4)
assert len(of(m.SearchResponse, search.sync(client=by_vector, body=vectors)).answers[0].hits) == 4

item = m.NewItem(id="a/b c.png", image=image, payload=m.NewItemPayload.from_dict({"place": "wood"}))
first, again = (add_items.sync_detailed(client=client, body=m.AddRequest(items=[item])) for _ in range(2))
assert (first.status_code, again.status_code) == (201, 200) and of(m.AddResponse, first.parsed).created == 1
assert of(m.Item, get_item.sync("a/b c.png", client=client)).payload.to_dict() == {"place": "wood"}
with Image.open(of(File, get_picture.sync("a/b c.png", client=client, size=16)).payload) as shown:
    assert shown.size == (16, 12)
found: list[str] = []
cursor: str | None = None
while page := of(m.ItemList, list_items.sync(client=client, cursor=cursor, limit=10)):
    found += [one.id for one in page.items]
    if (cursor := page.next_cursor) is None:
        break
assert len(found) == 25 and found == sorted(found)
gone = m.DeleteRequest(ids=["a/b c.png", "never.png"])
assert of(m.DeleteResponse, delete_items.sync(client=client, body=gone)).deleted == 1

colours = "red", "blue", "pink", "green", "black"
given = [m.NewJudgement(query=f"a {c} square", id="00.png", yes=c == "red", probability=0.5) for c in colours]
kept = post_judgements.sync(client=client, body=m.JudgementsRequest(judge="ann", judgements=given))
assert of(m.JudgementsResponse, kept).kept == 5
summary = of(m.JudgementsSummary, get_judgements.sync(client=client, query="a red square", judge="ann"))
assert summary.given["00.png"] and summary.precision is not None
used = of(m.JudgementsResponse, post_judgements.sync(client=client, body=m.JudgementsRequest(use=True))).used
assert of(m.JudgementsUsed, used).n == 5

for code, refused in {
    "no-key": get_info.sync(client=stranger),
    "not-found": get_item.sync("never", client=client),
    "invalid": search.sync(client=client, body=m.SearchRequest(queries=[])),
    "index": delete_items.sync(client=by_vector, body=m.DeleteRequest(ids=["photo-1"])),
}.items():
    assert of(m.Problem, refused).code == code
