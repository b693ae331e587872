"""The map on the page, when the service draws its own anew."""

from serve.test_page import CHROMIUM, chromium, expect, panel, pytestmark, tabs, visit  # noqa: F401
from support.serving import in_base64, make_collection, picture, served

from sfumato.serve.answering import open_sources


def test_answer_and_map_lie_in_one_plane(visit, run, data, tmp_path):  # noqa: F811
    with served(open_sources(make_collection(run, data, tmp_path / "collection"))) as client:
        page = visit(client, "/?q=a+red+circle&view=map")
        page.get_by_text("The map as a list").click()
        shown = page.locator("#list li").first
        drawn = []
        page.on("request", lambda request: drawn.append(request.url) if "/v1/map" in request.url else None)

        def ask(text):
            page.locator("#q0").fill(text)
            page.keyboard.press("Enter")
            told = {"queries": [{"text": text}], "position": True}
            position = client.post("/v1/search", json=told).json()["answers"][0]["position"]
            expect(panel(page).locator("h2")).to_have_text(f"“{text}”")
            expect(shown).to_contain_text(f"at {position['x']:.2f}, {position['y']:.2f}")

        ask("some bar")
        assert not drawn
        new = [{"id": str(i), "image": in_base64(picture("black"))} for i in range(13)]
        assert client.post("/v1/items", json={"items": new}).status_code == 201
        ask("a blue cross")
        assert len(drawn) == 1
        expect(page.locator("#list li")).to_have_count(48 + 13 + 1)
        page.close()
