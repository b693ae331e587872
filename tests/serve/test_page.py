"""The page in a real browser against a real service: use by mouse, finger and keyboard, and what must never happen."""

import os
import re
import shutil
from datetime import datetime
from urllib.parse import parse_qs, urlsplit

import pytest
from serve.test_conventions import fitting
from support.lazy import Lazy
from support.processes import short_folder
from support.serving import KEY, add, picture, search, served

from sfumato.evaluation.judgements import read_judgements
from sfumato.search.answer import verdict
from sfumato.search.collection import GaussianCollection
from sfumato.serve.app import PAGE
from sfumato.serve.settings import open_sources

playwright = Lazy("playwright.sync_api", "needs the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.engine, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")]
expect = lambda *given: playwright.expect(*given)
OUTLINE = """() => {
    const focused = document.activeElement;
    if (!focused.closest('.file, .segments label')) return getComputedStyle(focused).outlineStyle;
    const parent = focused.parentElement;
    return getComputedStyle(parent.matches('.file') ? parent : focused.nextElementSibling).outlineStyle;
}"""
MATHEMATICS = "variance", "csd", "distance", "calibrat", "coverage", "Spearman", "conformal"
GIVE = """([kind, target, files]) => {
    const data = new DataTransfer();
    for (const [name, bytes, type] of files) data.items.add(new File([Uint8Array.from(bytes)], name, {type}));
    const init = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
    const event = kind === "drop" ? new DragEvent("drop", init) : new ClipboardEvent("paste", init);
    document.querySelector(target).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def service(sources):
    with served(sources, max_upload_mb=0.02) as client:
        yield client


@pytest.fixture(scope="module")
def photographs(filled, tmp_path_factory):
    """A service of a collection whose items have the fields of photographs."""
    folder = shutil.copytree(filled, tmp_path_factory.mktemp("photographs") / "collection")
    with GaussianCollection.open(folder) as collection:
        all = collection.get(collection.ids_after("", 999))
        payloads = [
            {
                "folder": ("2023/sea", "2023/hill", "2024")[i % 3],
                "date": f"202{3 + i % 3 // 2}-{1 + i % 12:02}-10T09:30:00",
                **({"captions": f"A bar in the sea {i}\nsome crosses"} if i % 2 else {}),
                **({"title": "The red one", "tags": "red\nsea", "camera": "Canon"} if i == 0 else {}),
                "_digest": "hidden",
            }
            for i in range(len(all.ids))
        ]
        collection.upsert(all.embeddings, list(all.ids), payloads=payloads)
    with served(open_sources(folder)) as client:
        client.payloads = {id: {**payload, "_digest": None} for id, payload in zip(all.ids, payloads, strict=True)}
        yield client


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        environment = {**os.environ, "TMPDIR": short_folder()}
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"], env=environment)
        yield browser
        browser.close()


class Tab:
    """A page in a browser session of its own, that notes what must never happen: another origin is asked, the content
    security policy is broken, an error is written."""

    def __init__(self, chromium, base):
        self.base, self.seen, self.allowed = base, [], ()
        self.page = chromium.new_context(base_url=base).new_page()
        self.page.set_default_timeout(8000)
        told = "(e) => console.error('policy', e.violatedDirective, e.blockedURI)"
        self.page.add_init_script(f"addEventListener('securitypolicyviolation', {told})")
        self.page.on("request", self._request)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.seen.append(f"thrown: {error}"))

    def _request(self, asked):
        if not asked.url.startswith((self.base + "/", "data:", f"blob:{self.base}/", "about:blank")):
            self.seen.append(f"asked {asked.url}")

    def _console(self, message):
        # The browser itself notes every refused request; those that a test brings about are allowed.
        if message.type in ("error", "warning") and not any(text in message.text for text in self.allowed):
            self.seen.append(f"{message.type}: {message.text}")


@pytest.fixture
def visit(chromium):
    """Opens pages; in the end nothing has happened that must never happen."""
    opened = []

    def open_page(client, path="/", *, width=1280, height=800, color_scheme="light", allowed=()):
        tab = Tab(chromium, str(client.base_url).rstrip("/"))
        opened.append(tab)
        tab.allowed = allowed
        tab.page.set_viewport_size({"width": width, "height": height})
        tab.page.emulate_media(color_scheme=color_scheme, reduced_motion="reduce")
        tab.page.goto(path)
        return tab.page

    yield open_page
    for tab in opened:
        tab.page.context.close()
    assert not [one for tab in opened for one in tab.seen]


@pytest.fixture(autouse=True, scope="module")
def unfolded():
    """Drawings of one shape are nearly the same; a test below shows what the page does with those that are folded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sfumato.search.gallery.SAME", -1.0)
        yield


ask = lambda client, query, max_results=24, **options: search(client, query, max_results=max_results, **options)[0]


def enter(page, text):
    page.locator("#q0").fill(text)
    page.keyboard.press("Enter")


alerted = lambda page, text: expect(page.get_by_role("alert").last).to_contain_text(text)
panel = lambda page, slot=0: page.locator(f"#answers > [data-slot='{slot}']")


def until(page, condition):
    """A function, or JavaScript. Playwright's own evaluates that in the page, where the policy forbids it."""
    for _ in range(400):
        if condition() if callable(condition) else page.evaluate(condition):
            return True
        page.wait_for_timeout(20)
    raise AssertionError(f"still not so after 8 s: {condition}")


searched = lambda page: {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}
comes_to = lambda page, expected: until(page, lambda: searched(page) == expected)


def test_search_by_text(visit, service):
    page = visit(service)
    hint = page.locator("#hint")
    expect(page.locator(".empty h2")).to_have_text("Search 48 images")
    expect(page.locator("#words")).to_be_hidden()  # About vectors, for a model without a text encoder.
    items = service.get("/v1/items?limit=6").json()["items"]  # a start for who does not know what is here
    assert [pick.get_attribute("title") for pick in page.locator(".tile .pick").all()] == [one["id"] for one in items]
    enter(page, "   ")
    expect(hint).to_contain_text("There is nothing to search by yet")
    page.get_by_role("searchbox", name="Search").fill("a red circle")
    page.keyboard.press("Enter")
    answer = ask(service, {"text": "a red circle"})
    expect(panel(page)).to_contain_text(answer["verdict"]["text"])
    expect(panel(page).locator(".hit")).to_have_count(24)
    first, card = answer["hits"][0], panel(page).locator(".hit .pick").first
    probability = float(f"{100 * first['match_probability']:.{1 if first['match_probability'] < 0.1 else 0}f}")
    expect(card).to_have_accessible_name(re.compile(rf"match probability {probability:g}%"))
    expect(card).to_have_accessible_description(first["id"])
    assert card.locator("img").evaluate("async (image) => (await image.decode(), image.naturalWidth)") > 0
    assert comes_to(page, {"q": "a red circle"}) and "a red circle" in page.title()
    assert page.locator(".fit").count() == page.locator(".judging").count() == 0  # It keeps no verdicts.
    panel(page).get_by_text("What do these numbers mean?").click()
    expect(panel(page)).to_contain_text("Each of the 48 images has a probability that it matches")
    for word in MATHEMATICS:  # only where it is asked for, and then at every visit
        expect(page.locator("body")).not_to_contain_text(word, use_inner_text=True, ignore_case=True)
    page.get_by_text("For experts").click()
    expect(panel(page)).to_contain_text(f"total variance of the search {answer['total_variance']:.3g}")
    page.reload()
    expect(page.locator("footer")).to_contain_text("distance csd", use_inner_text=True)
    page.get_by_text("For experts").click()
    page.reload()
    expect(page.get_by_role("slider")).to_be_hidden()
    page.get_by_role("button", name="More results").focus()
    page.keyboard.press("Enter")
    expect(panel(page).locator(".hit .pick").nth(24)).to_be_focused()  # the first of the new ones
    expect(panel(page).locator("[data-count]")).to_contain_text("These are all 48 images.")
    page.get_by_role("link", name="sfumato").click()
    expect(page.locator(".empty")).to_be_visible()
    enter(page, "word " * 500)
    expect(hint).to_contain_text("cut after its first 2,000 characters")
    enter(page, "<img src=x onerror=alert(1)>")  # Markup stays text.
    expect(panel(page).locator("h2")).to_have_text("“<img src=x onerror=alert(1)>”")
    expect(hint).to_be_empty()
    assert page.locator("h2 img").count() == 0
    stripped = lambda route: route.fulfill(response=route.fetch(url=route.request.url.replace("/photos/", "/")))
    page.route("**/photos/**", stripped)  # A proxy that serves it below a path.
    page.goto("/photos/?q=a+red+circle", wait_until="networkidle")
    shown = panel(page).locator(".hit img").first
    assert shown.evaluate("async (image) => (await image.decode(), image.naturalWidth)") > 0
    page.unroute_all(behavior="wait")


def test_what_is_said_of_an_answer(visit, service):
    page, answer = visit(service), ask(service, {"text": "some bar"})
    page.route("**/v1/search", lambda route: route.fulfill(json={"answers": [answer]}))
    seen = {}
    for kind in ("clear", "few", "many", "unsure", "abstained", "unfamiliar"):
        answer["verdict"] = {"kind": kind, "text": f"the words for {kind}"}
        enter(page, kind)
        verdict_line = panel(page).locator(".verdict")
        expect(verdict_line).to_contain_text(f"the words for {kind}")
        colour = verdict_line.evaluate("(line) => getComputedStyle(line).color")
        seen[kind] = panel(page).locator(".sign").inner_text(), colour
        expect(panel(page).locator(".facts")).to_have_count(0 if kind == "unfamiliar" else 1)
    assert seen["clear"] == seen["few"] and seen["abstained"] == seen["unfamiliar"]
    groups = [seen[kind] for kind in ("clear", "many", "unsure", "abstained")]
    assert len({sign for sign, _ in groups}) == len({colour for _, colour in groups}) == 4
    none, one = "Probably no match", "About one match or none"
    for p, expected, said, number, odds in (
        (0.0001, 0.0002, "<1%", none, "fewer than 1 of 100"), (0.0949, 0.31, "9%", none, "about 9 of 100"),
        (0.104, 0.49, "10%", none, "about 1 of 10"), (0.15, 0.51, "15%", one, "about 15 of 100"),
        (0.998, 1.49, ">99%", one, "more than 99 of 100"), (0.5, 40, "50%", None, "about 5 of 10"),
    ):  # fmt: skip
        for hit in answer["hits"]:
            hit["match_probability"] = min(p, expected / 24)  # of the last case all 24 the first one's
        answer["hits"][0]["match_probability"] = p
        answer |= {"expected_matches": expected, "verdict": vars(verdict(expected, p))}
        enter(page, str(p))
        expect(panel(page).locator(".figures b").first).to_have_text(said)
        facts = f"{number} among 48 images" if number else "About 40 of 48 images should match"
        odds = f"First result: right in {odds} such searches"
        expect(panel(page).locator(".facts p")).to_have_text([facts, odds])
        shown = sum(hit["match_probability"] for hit in answer["hits"])
        others = "" if number else ", and about 28 of the others"
        said_of_them = "" if shown < 1 else f" About {round(shown)} of these should match{others}."
        these = f"These are the 24 closest of 48 images.{said_of_them}"
        expect(panel(page).locator("[data-count]")).to_have_text(these)
        if 0.001 < p < 0.75 and number:
            expect(panel(page).locator(".verdict")).to_contain_text(f"a probability of {said}")
    first, second, third, *others = answer["hits"]
    answer |= {"suggestion": "a red circle", "warning": "The model reads English alone", "note": "A mix."}
    answer["hits"] = [{**first, "duplicates": [second["id"], third["id"]]}, *others]
    enter(page, "a red crcle")
    guesses = ["Did you mean a red circle?", "The model reads English alone.", "A mix."]
    expect(panel(page).locator(".guess")).to_have_text(guesses)
    folded = panel(page).locator(".folded")
    expect(folded).to_have_text("+2 similar")
    said = "the 24 closest of 48 images, 2 of them under “similar”"
    expect(panel(page).locator("[data-count]")).to_contain_text(said)
    folded.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 of 3")
    expect(dialog).to_contain_text(second["id"])
    page.keyboard.press("ArrowRight")
    expect(dialog).to_contain_text(third["id"])
    page.keyboard.press("Escape")
    expect(folded).to_be_focused()
    answer["hits"] = [{**first, "match_probability": 0.1}]
    enter(page, "one result")
    expect(panel(page).locator("[data-count]")).to_contain_text("This is the closest of 48 images.")
    expect(page.locator("#status")).to_contain_text(" 1 result.")
    page.unroute("**/v1/search")
    page.get_by_role("button", name="a red circle").click()
    expect(panel(page).locator("h2")).to_have_text("“a red circle”")
    expect(panel(page)).not_to_contain_text("Did you mean")


def test_search_by_file_drop_and_paste(visit, service):
    page = visit(service, allowed=["status of 422"])
    chooser = page.get_by_label("Image to search by", exact=True)
    chooser.set_input_files({"name": "mine.png", "mimeType": "image/png", "buffer": picture("blue")})
    expect(panel(page).locator("h2")).to_have_text("mine.png")
    expect(panel(page).locator(".hit")).to_have_count(24)
    assert comes_to(page, {})
    page.evaluate(GIVE, ["drop", "#answers", [["drop.png", list(picture("red")), "image/png"]]])
    expect(panel(page).locator("h2")).to_have_text("drop.png")
    page.get_by_label("Compare two").check()
    page.evaluate(GIVE, ["paste", "#q1", [["paste.png", list(picture("green")), "image/png"]]])
    expect(panel(page, 1).locator("h2")).to_have_text("paste.png")
    page.go_back()
    expect(panel(page, 1)).to_have_count(0)
    expect(panel(page).locator("h2")).to_have_text("drop.png")  # pictures live as long as the page
    page.locator("[data-ask='0']").get_by_role("button", name="Remove it").click()
    expect(page.locator(".empty")).to_be_visible()
    for name, data, said in (
        ("a.txt", b"no", "This is not an image"),
        ("a.png", bytes(30_000), "Too large"),
        ("a.png", b"junk", "not an image in one of the formats"),
    ):
        kind = "text/plain" if name == "a.txt" else "image/png"
        chooser.set_input_files({"name": name, "mimeType": kind, "buffer": data})
        alerted(page, said)
    page.evaluate(GIVE, ["drop", "#answers", [[name, list(picture())] for name in ("red.png", "blue.png")]])
    expect(page.locator("#hint")).to_contain_text("the collection can only be searched")


def test_guarantees_are_those_of_the_calibration_and_the_threshold_filters_at_once(visit, service):
    told, page = service.get("/v1/info").json()["galleries"]["images"], visit(service, "/?q=a+red+circle")
    for name, offered in (("Wrong answers allowed", told["risks"]), ("Set that holds a match", told["coverages"])):
        select = page.get_by_label(name)
        expect(select.locator("option")).to_have_count(len(offered) + 1)
        assert select.is_disabled() == (not offered)
    page.get_by_text("For experts").click()
    page.get_by_label("Set that holds a match").select_option(str(told["coverages"][0]))
    inside = ask(service, {"text": "a red circle"}, coverage=told["coverages"][0])["conformal_set"]["hits"]
    expect(panel(page)).to_contain_text(f"The framed set of {len(inside)} image")
    expect(panel(page).locator(".in-set")).to_have_count(min(24, len(inside)))
    page.goto("/?q=a+red+circle")
    expect(panel(page).locator(".hit")).to_have_count(24)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    found = [hit["match_probability"] for hit in ask(service, {"text": "a red circle"})["hits"]]
    between = [percent for percent in range(1, 99) if min(found) < percent / 100 <= max(found)]
    threshold = between[len(between) // 2]
    page.get_by_role("slider").fill(str(threshold))
    left = [probability for probability in found if probability >= threshold / 100]
    assert 0 < len(left) < 24 and sum(left) >= 1
    expect(panel(page).locator(".hit:visible")).to_have_count(len(left))
    has = "has" if len(left) == 1 else "have"
    expect(panel(page).locator("[data-count]")).to_have_text(
        f"Of the 24 closest of 48 images, {len(left)} {has} a probability of at least {threshold}%:"
        f" about {round(sum(left))} of these should match."
    )
    assert not asked and comes_to(page, {"q": "a red circle", "least": f"{threshold / 100:g}"})


def test_compare(visit, service):
    page = visit(service)
    page.locator("#q0").fill("a red circle")
    page.get_by_label("Compare two").check()
    expect(page.locator("#q1")).to_be_focused()
    expect(page.locator("#q0")).to_have_value("a red circle")  # what is being written is kept
    page.keyboard.type("some bar")
    page.keyboard.press("Enter")
    for slot, text in enumerate(("a red circle", "some bar")):
        expect(panel(page, slot).locator("h2")).to_have_text(f"“{text}”")
        expect(panel(page, slot)).to_contain_text(ask(service, {"text": text})["verdict"]["text"])
    boxes = "const [one, other] = [0, 1].map(i => document.querySelector(`[data-slot='${i}']`).getBoundingClientRect())"
    until(page, f"() => {{{boxes}; return one.y === other.y && one.right < other.x}}")
    assert comes_to(page, {"q": "a red circle", "q2": "some bar"})
    page.set_viewport_size({"width": 390, "height": 844})
    until(page, f"() => {{{boxes}; return one.x === other.x && one.bottom < other.y}}")
    verdict_line = panel(page, 1).locator(".verdict").bounding_box()
    assert verdict_line["y"] + verdict_line["height"] < 844  # without scrolling
    page.go_back()
    expect(page.locator("#q0")).to_have_value("")  # another search brings its own text
    page.go_forward()
    page.get_by_label("Compare two").uncheck()
    expect(panel(page, 1)).to_have_count(0)
    assert comes_to(page, {"q": "a red circle"})
    page.goto("/?q=a+red+circle&id2=000.png")
    page.get_by_text("Texts", exact=True).click()
    expect(page.locator("#about")).to_contain_text("9 texts")
    answer = ask(service, {"text": "a red circle"}, gallery="texts")
    expect(panel(page).locator(".pick .name").first).to_have_text(answer["hits"][0]["payload"]["text"])
    expect(panel(page).locator(".guess")).to_contain_text("compares two texts")
    assert comes_to(page, {"in": "texts", "q": "a red circle", "compare": "1"})  # The picture's id means nothing there.


def test_add_drop_and_delete(visit, collection, tmp_path):
    trip = tmp_path / "Trip"
    for i in range(9):
        (trip / f"day{i % 2}").mkdir(parents=True, exist_ok=True)
        (trip / f"day{i % 2}" / f"{i}.png").write_bytes(picture((i, 0, 200)))
    (trip / "day0" / "4.txt").write_text("the fourth\n\n a tree \n")
    for name, data in {"0.png": b"junk", "2.png": picture("red", (60, 60)), "big.jpg": bytes(20_000)}.items():
        (trip / name).write_bytes(data)
    (trip / "mine" / "deep").mkdir(parents=True)
    (trip / "mine" / "deep" / "9.png").write_bytes(picture("red"))
    for name in ("notes.pdf", "alone.txt", ".DS_Store", "mine/.nomedia"):
        (trip / name).write_text("x")
    with served(open_sources(collection), max_batch=6, max_upload_mb=0.01, max_pixels=2000) as client:
        page = visit(client, allowed=["status of 413", "status of 422"])
        page.get_by_role("button", name="Add…").click()
        dialog = page.get_by_role("dialog", name="Add to the collection")
        dialog.get_by_label("choose a folder").set_input_files(trip)
        expect(dialog.locator(".chosen")).to_contain_text("11 photographs (")
        expect(dialog.locator(".chosen")).to_contain_text("1 with captions; 4 files left out.")
        dialog.get_by_role("button", name="Add 11 photographs").click()
        expect(dialog.locator(".chosen")).to_have_text("9 of 11 photographs added; 6 files left out.")
        dialog.get_by_text("Left out, and why").click()
        left = dict(line.split(" ", 1) for line in dialog.locator(".left li").all_inner_texts())
        assert left["Trip/notes.pdf"] == "is no photograph" and "this service takes 0.01 MB" in left["Trip/big.jpg"]
        assert left["Trip/alone.txt"] == "is a text without a photograph of its name" and len(left) == 6
        assert left["Trip/mine/deep/9.png"] == "lies below a .nomedia"
        assert "not an image" in left["Trip/0.png"] and "more pixels than the limit" in left["Trip/2.png"]
        dialog.get_by_role("button", name="Close").click()
        expect(page.locator("#about")).to_have_text("57 images")
        item = client.get("/v1/items/Trip/day0/4.png").json()
        assert item["payload"] == {"captions": "the fourth\na tree", "folder": "Trip/day0"}
        expect(page.locator("#folder")).to_contain_text("Trip/day1 (4)")  # A filter that was not there before.
        files = [[name, list(picture(name[:-4]))] for name in ("red.png", "blue.png")]
        page.evaluate(GIVE, ["drop", "#answers", files])
        page.get_by_role("button", name="Add 2 photographs").click()
        expect(page.locator("#notice")).to_have_text("2 of 2 photographs added.")
        page.evaluate(GIVE, ["drop", "#answers", files[:1]])
        expect(panel(page).locator("h2")).to_have_text("red.png")
        page.get_by_role("button", name="Add it to the collection…").click()
        expect(dialog.get_by_label("Id")).to_have_value("red.png")
        dialog.get_by_role("button", name="Add", exact=True).click()
        expect(page.locator("#notice")).to_have_text("red.png was added; 1 of them replaced what had the same name.")
        page.goto("/?id=red.png")
        page.get_by_role("button", name="red.png").first.click()
        expect(page.locator("#item img")).to_have_attribute("src", re.compile("size=1600"))
        page.get_by_role("button", name="Delete…").click()
        expect(page.get_by_role("dialog")).to_contain_text("The file on your disk stays.")
        assert client.get("/v1/info").json()["galleries"]["images"]["n"] == 59  # not without being asked again
        page.get_by_role("button", name="Delete from the collection").click()
        expect(page.locator("#about")).to_contain_text("58 images")
        add(client, "clip.mp4")  # An image where a video is expected.
        page.goto("/?id=clip.mp4")
        page.get_by_role("button", name="clip.mp4").first.click()
        expect(page.locator("#item img")).to_have_attribute("src", re.compile("size=1600"))
        page.goto("about:blank")  # Pictures that still load would be gone.
        for _ in range(2):
            ids = [one["id"] for one in client.get("/v1/items").json()["items"]]
            client.post("/v1/items/delete", json={"ids": ids})
        page.goto("/")
        expect(page.locator(".empty")).to_contain_text("This collection is empty. Drop photographs or whole folders")
        page.close()


def test_every_control_has_a_name_and_nothing_sticks_out(visit, service, vectors):
    page = visit(service, "/?q=a+red+circle&id2=000.png")
    session = page.context.new_cdp_session(page)
    named = {
        "button", "link", "searchbox", "textbox", "slider", "combobox", "checkbox", "radio", "image", "dialog",
        "application", "region",
    }  # fmt: skip
    expect(page.locator("#answers > [data-slot] .hit")).to_have_count(48)
    nodes = [node for node in session.send("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    controls = [node for node in nodes if node["role"]["value"] in named]
    assert len(controls) > 60 and [node for node in controls if not node.get("name", {}).get("value")] == []
    assert page.locator("html").get_attribute("lang") == "en" and page.locator("h1").count() == 1
    # An unknown gallery is the first.
    for path in (f"/?q={'incomprehensibilities' * 4}&id2=000.png", "/?in=__proto__"):
        page.goto(path)
        assert_nothing_sticks_out(page)
    assert_nothing_sticks_out(visit(vectors, "/?id=photo-7&id2=photo-8"))


def assert_nothing_sticks_out(page):
    expect(page.locator("#about")).to_have_text("48 images")
    expect(page.locator("#answers .pick, #answers .hit").first).to_be_attached()
    for width in (360, 1440):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (page.url, width)


def test_keyboard_alone(visit, service):
    page = visit(service)
    expect(page.locator("#q0")).to_be_focused()
    page.keyboard.type("a red circle")
    page.keyboard.press("Enter")
    expect(panel(page).locator(".hit")).to_have_count(24)
    passed = []
    while "pick" not in (page.evaluate("document.activeElement.className") or ""):
        page.keyboard.press("Tab")
        passed.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        assert page.evaluate(OUTLINE) != "none", passed
        assert len(passed) < 20, passed
        if passed[-1] == "For experts":
            page.keyboard.press("Enter")
    assert {"compare", "least", "abstain"} <= set(passed)
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Total variance", use_inner_text=True)  # the experts' part is open
    for key, place in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2)):
        page.keyboard.press(key)
        expect(dialog).to_contain_text(f"{place} of 24")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(panel(page).locator(".hit .pick").nth(1)).to_be_focused()  # that of what was shown last
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    while page.evaluate("document.activeElement.textContent") != "Find similar":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(panel(page).locator("h2")).to_contain_text("More like")
    expect(page.locator("#answers")).to_be_focused()  # what had the focus has gone
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("It was found by its likeness to what you searched by")
    expect(dialog).not_to_contain_text("probability")  # A search by item is not calibrated.


def test_key(visit, sources):
    with served(sources, keys=(KEY,)) as client:
        page = visit(client, "/?q=a+red+circle", allowed=["status of 401", "ERR_FAILED"])
        dialog = page.get_by_role("dialog", name="This service needs a key")
        dialog.get_by_label("API key").fill("not-the-right-one")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not accept this key")
        dialog.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(panel(page).locator("img").first).to_have_attribute("src", re.compile("^blob:"))
        assert KEY not in page.url and page.evaluate("localStorage.length") == 0
        page.reload()
        panel(page).locator(".pick").first.click()  # not asked again in this tab
        with page.expect_popup() as opened:
            page.get_by_role("button", name="Open file").click()
        assert opened.value.url.startswith("blob:")
        page.route("**/*original=true", lambda route: route.abort())
        page.get_by_role("button", name="Open file").click()
        expect(page.locator("#item .problem")).to_contain_text("The service does not answer")
        page.close()


def test_problems_in_plain_words(visit, service):
    page = visit(service, "/?id=nobody", allowed=["status of 404", "status of 503", "status of 502", "ERR_FAILED"])
    alerted(page, "There is no item 'nobody' to search by")
    body = '{"title": "Service Unavailable", "status": 503, "detail": "The queue is full"}'
    page.route("**/v1/search", lambda r: r.fulfill(status=503, content_type="application/problem+json", body=body))
    enter(page, "anything")
    alerted(page, "The service is busy")
    alerted(page, "The queue is full.")
    page.unroute("**/v1/search")
    page.get_by_role("button", name="Try again").click()
    expect(panel(page).locator(".hit")).to_have_count(24)
    page.route("**/v1/search", lambda route: route.fulfill(status=502, body="<h1>no JSON</h1>"))
    enter(page, "something")
    alerted(page, "The service answered 502")
    page.route("**/v1/search", lambda route: route.abort())
    page.get_by_role("button", name="Try again").click()
    alerted(page, "The service does not answer")


def test_an_enlarged_photograph_has_its_details_and_says_why_it_matched(visit, photographs):
    page = visit(photographs, "/?q=Crosses+and+a+bar+of+the+seas")
    names, hits = [], ask(photographs, {"text": "Crosses and a bar of the seas"})["hits"]
    for payload in (photographs.payloads[hit["id"]] for hit in hits):
        said = payload.get("title") or payload.get("captions", "").split("\n")[0]
        names.append(said or datetime.fromisoformat(payload["date"]).strftime("%-d %B %Y"))
    expect(panel(page).locator(".pick .name")).to_have_text(names)
    hit = next(one for one in hits if "captions" in one["payload"])
    panel(page).locator(f".pick[title='{hit['id']}']").click()
    dialog, caption = page.get_by_role("dialog"), hit["payload"]["captions"].split("\n")[0]
    expect(dialog.get_by_role("heading", level=2)).to_have_text(caption)
    expect(dialog).to_contain_text(f"Its caption “{caption}” shares “bar”, “sea” with your search.")
    probability = hit["match_probability"]
    shown = f"{probability:{'.1%' if probability < 0.1 else '.0%'}}".replace(".0%", "%")
    expect(dialog).to_contain_text(f"Its probability is {shown}")
    assert dialog.locator("dt:visible").all_inner_texts() == ["Captions", "Date", "Path"]  # Nothing for experts.
    expect(dialog.locator("dd").first).to_have_text(f"{caption}some crosses")
    expect(dialog).to_contain_text("09:30")
    expect(dialog).not_to_contain_text("hidden")
    page.keyboard.press("Escape")
    until(page, "!history.state?.viewing")  # Closing goes back in the history, a moment later.
    enter(page, "a bar")
    expect(panel(page).locator("h2")).to_have_text("“a bar”")
    expect(panel(page).locator(".hit")).to_have_count(24)
    for close in (page.go_back, lambda: page.keyboard.press("Escape")):  # both leave the search as it was
        panel(page).locator(".pick").first.click()
        expect(dialog).to_be_visible()
        close()
        expect(dialog).to_be_hidden()
        expect(panel(page).locator(".pick").first).to_be_focused()
        until(page, "!history.state?.viewing")
        expect(panel(page).locator("h2")).to_have_text("“a bar”")
    page.go_back()
    expect(panel(page).locator("h2")).to_have_text("“Crosses and a bar of the seas”")
    panel(page).locator(".pick").first.click()
    dialog.get_by_role("button", name="Find similar").click()
    expect(panel(page).locator("h2")).to_contain_text("More like")
    # The calibration knows no searches by image among images.
    expect(panel(page).locator(".guess")).to_contain_text("No probabilities here")
    page.go_back()
    expect(panel(page).locator("h2")).to_have_text("“Crosses and a bar of the seas”")
    assert not dialog.is_visible()


def test_filters_by_date_and_folder(visit, photographs, service):
    page = visit(photographs, "/?q=a+bar")
    expect(panel(page).locator(".hit")).to_have_count(24)
    options = page.locator("#folder").locator("option")
    expect(options).to_have_text(["all", "2023 (32)", "2023/hill (16)", "2023/sea (16)", "2024 (16)"])

    def found(fits):
        wanted = {id for id, one in photographs.payloads.items() if fits(one)}
        expect(panel(page).locator("[data-count]")).to_contain_text(f"all {len(wanted)} images that pass the filter")
        picks = panel(page).locator(".pick")
        expect(picks).to_have_count(len(wanted))
        assert {pick.get_attribute("title") for pick in picks.all()} == wanted

    page.locator("#folder").select_option("2023")  # with the folders in it
    page.get_by_label("To", exact=True).fill("2023-03-10")  # the whole day
    found(lambda one: one["folder"] != "2024" and one["date"] < "2023-03-11")
    page.get_by_label("From", exact=True).fill("2023-02-01")
    found(lambda one: one["folder"] != "2024" and "2023-02" < one["date"] < "2023-03-11")
    assert comes_to(page, {"q": "a bar", "from": "2023-02-01", "to": "2023-03-10", "folder": "2023"})
    page.get_by_text("For experts").click()
    for guarantee in ("Wrong answers allowed", "Set that holds a match"):  # which are about the whole collection
        expect(page.get_by_label(guarantee)).to_be_disabled()
    page.set_viewport_size({"width": 360, "height": 700})
    page.reload()
    expect(page.locator("#filters summary")).to_have_text("Filter: from 1 February 2023, to 10 March 2023, 2023")
    page.get_by_label("To", exact=True).fill("2022-01-01")
    expect(panel(page).locator(".verdict")).to_contain_text("No item passes the filter")
    page.get_by_role("button", name="Remove the filter").click()
    expect(panel(page).locator(".hit")).to_have_count(24)
    assert comes_to(page, {"q": "a bar"})
    expect(visit(service).locator("#filters")).to_be_hidden()  # Its images have neither.


def test_a_dropped_folder_is_walked_to_its_end(visit, service):
    found = visit(service).evaluate("""async () => {
        const { filesIn } = await import("/page/add.js");
        const read = (path, yes, no) => path.includes("bad") ? no() : yes(new File([], "x"));
        const file = (path) => ({isFile: true, fullPath: path, file: (yes, no) => read(path, yes, no)});
        const reader = (parts) => ({readEntries: (yes) => yes(parts.shift() ?? [])});
        const folder = (path, ...parts) => ({fullPath: path, createReader: () => reader(parts)});
        const inner = folder("/a/b", [file("/a/b/3.png")]);
        const outer = folder("/a", [file("/a/1.png"), inner], [file("/a/2.png"), file("/a/bad.png")]);
        const items = [outer, file("/0.png")].map((entry) => ({webkitGetAsEntry: () => entry}));
        const found = await filesIn({items, files: []});
        return Object.fromEntries(found.map(({path, file}) => [path, Boolean(file)]));
    }""")
    readable = dict.fromkeys(("0.png", "a/1.png", "a/2.png", "a/b/3.png"), True)
    assert found == {**readable, "a/bad.png": False}  # A reader gives a part of a folder at a time.


def test_contrast():
    rules = re.findall(r":root \{(.*?)\}", (PAGE / "page.css").read_text())
    assert len(rules) == 2  # In the light, and in the dark.
    for rule in rules:
        light = {}
        for name, colour in re.findall(r"--(\w+): #(\w+)", rule):
            digits = colour if len(colour) == 6 else "".join(digit * 2 for digit in colour)
            c = [value / 255 for value in bytes.fromhex(digits)]
            linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in c]
            light[name] = 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        ratio = lambda one, other: max(one, other) / min(one, other)
        for ground in ("page", "card"):
            for ink in ("ink", "soft", "sure", "calm", "unsure", "wrong"):
                assert ratio(light[ink], light[ground]) >= 4.5, (rule, ink, ground)
            assert ratio(light["edge"], light[ground]) >= 3, (rule, ground)
        assert ratio(light["on"], light["sure"]) >= 4.5, rule


def test_two_answers_are_announced_at_once(visit, service):
    page, slow = visit(service, allowed=["status of 404"]), []
    page.route(
        "**/v1/search", lambda route: slow.append(route) if "circle" in route.request.post_data else route.continue_()
    )
    page.goto("/?q=a+red+circle&q2=some+bar")
    expect(panel(page, 1).locator(".hit")).to_have_count(24)
    expect(panel(page, 0)).to_have_attribute("aria-busy", "true")  # A skeleton meanwhile.
    expect(page.locator("#status")).to_be_empty()
    slow[0].continue_()
    expect(page.locator("#answers h2")).to_have_text(["“a red circle”", "“some bar”"])
    told = [f"“{text}”: {ask(service, {'text': text})['verdict']['text']}." for text in ("a red circle", "some bar")]
    expect(page.locator("#status")).to_have_text(f"{told[0]} 24 results. {told[1]} 24 results.")
    page.goto("/?q=some+bar&id2=nobody")  # And if one of two fails, the other.
    alerted(page, "There is no item 'nobody'")
    expect(page.locator("#status")).to_have_text(f"{told[1]} 24 results.")
    held = []  # What is done before the page knows its collection is done then.
    page.route("**/v1/info", lambda route: held.append(route))
    page.goto("/")
    enter(page, "a red square")
    expect(page.locator("#q0")).to_be_focused()
    assert page.url.endswith("/") and len(held) == 1
    held[0].continue_()
    expect(page.locator("[data-slot='0'] .facts")).to_be_visible()
    assert page.url.endswith("/?q=a+red+square")


def test_options_are_folded_unless_they_are_in_use(visit, service):
    info, answer = service.get("/v1/info").json(), ask(service, {"text": "a red circle"})
    info["galleries"]["images"] |= {"calibrated": False, "risks": [], "coverages": []}
    hits = [hit | {"match_probability": None} for hit in answer["hits"]]
    answer |= {"calibrated": False, "verdict": None, "expected_matches": None, "hits": hits}
    page = visit(service, width=390, height=844)
    page.route("**/v1/info", lambda route: route.fulfill(json=info))
    page.route("**/v1/search", lambda route: route.fulfill(json={"answers": [answer]}))
    page.goto("/?q=a+red+circle&q2=some+bar")
    slider, options = page.get_by_role("slider"), page.get_by_text("For experts")
    expect(panel(page, 1).locator(".hit").first).to_be_visible()
    expect(slider).to_be_hidden()
    options.click()
    expect(slider).to_be_visible()
    expect(page.locator("#promises")).to_contain_text("need a model that was calibrated")
    expect(panel(page).locator(".guess")).to_contain_text("not calibrated", use_inner_text=True)
    expect(page.get_by_label("Wrong answers allowed")).to_be_disabled()
    options.click()
    page.goto("/?q=a+red+circle&least=0.01")
    expect(slider).to_be_visible()  # in use, so not hidden


def test_without_a_text_encoder_the_page_searches_by_item(visit, vectors):
    page = visit(vectors, "/?q=words+that+nothing+can+embed")
    expect(page.locator(".empty h2")).to_have_text("Search 48 images by item")
    expect(page.locator("#words")).to_contain_text("Searching by words needs the model that made the embeddings")
    expect(page.get_by_role("searchbox")).to_have_accessible_name("Id of an item")
    for hidden in (".file", "#abstain", "#coverage", "#promises", "#add-open"):
        expect(page.locator(hidden).first).to_be_hidden()
    picks = page.locator(".empty .pick")
    name = picks.nth(2).inner_text()
    picks.nth(2).click()
    page.get_by_role("button", name="Find similar").click()
    answer = ask(vectors, {"id": name})
    expect(panel(page).locator("h2")).to_have_text(f"More like {name}")
    expect(panel(page).locator(".pick .name")).to_have_text([hit["id"] for hit in answer["hits"]])
    assert comes_to(page, {"id": name}) and page.locator(".blank").count() == 0
    expect(page.get_by_role("searchbox")).to_have_value(name)
    enter(page, "photo-7")
    page.get_by_label("Compare two").check()
    expect(page.get_by_role("searchbox", name="Id of a second item")).to_be_focused()
    page.keyboard.type("photo-9")
    page.keyboard.press("Enter")
    expect(page.locator("#answers h2")).to_have_text(["More like photo-7", "More like photo-9"])
    page.evaluate(GIVE, ["drop", "#answers", [["drop.png", [97], "image/png"]]])
    assert comes_to(page, {"id": "photo-7", "id2": "photo-9"})
    page.goto("/?in=texts&id=photo-3")
    expect(panel(page).locator(".pick .name").first).to_have_text("text 3")


def test_thumbs_keys_and_undo(judged, visit):
    text = "something blue or green"
    hits = fitting(judged, text)
    asked = {hit["id"]: hit["to_judge"] for hit in hits if hit["to_judge"]}
    assert 1 < len(asked) < len(hits), "some to ask about and some not"
    page = visit(judged, width=320, allowed=["status of 503"])
    enter(page, text)
    items, line = panel(page).locator(".hit"), panel(page).locator(".judging")
    expect(panel(page).locator(".fit")).to_have_count(24)
    expect(line).to_contain_text("Please judge the marked ones", use_inner_text=True)
    expect(line.get_by_role("status")).to_have_text(f"0 of {len(asked)} judged.")
    expect(panel(page).locator(".asked")).to_have_count(len(asked))
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    box = page.locator(".thumb").first.bounding_box()
    assert box["width"] >= 24 and box["height"] >= 24, "large enough for a finger"
    use = line.get_by_role("button", name="Use these verdicts")
    expect(use).to_be_hidden()
    at = next(i for i, hit in enumerate(hits) if hit["to_judge"])
    yes, no = items.nth(at).get_by_role("button", name="It fits"), items.nth(at).get_by_role("button", name="not fit")
    expect(items.nth(at).get_by_role("group")).to_have_accessible_name(re.compile("^Please judge "))
    yes.click()
    expect(yes).to_have_attribute("aria-pressed", "true")
    expect(line.get_by_role("status")).to_have_text(f"1 of {len(asked)} judged.")
    (kept,) = read_judgements(judged.file)
    assert (kept.query, kept.id, kept.yes, kept.why, kept.weight) == (text, hits[at]["id"], 1, *asked[kept.id].values())
    assert kept.probability == pytest.approx(hits[at]["match_probability"]) and kept.judge.startswith("web-")
    items.nth(at).locator(".pick").focus()
    page.keyboard.press("n")  # Another verdict takes the place of the first.
    expect(no).to_have_attribute("aria-pressed", "true")
    expect(yes).to_have_attribute("aria-pressed", "false")
    page.reload()
    expect(no).to_have_attribute("aria-pressed", "true")
    use.click()
    expect(page.locator("#notice")).to_contain_text("Nothing changed: 1 verdict on 1 search")
    items.nth(at).locator(".pick").focus()
    with page.expect_response("**/v1/judgements"):
        page.keyboard.press("n")  # Again: undo.
    expect(panel(page).locator("[aria-pressed=true]")).to_have_count(0)
    expect(use).to_be_hidden()
    assert read_judgements(judged.file) == []
    assert page.locator("#item").is_hidden(), "no key opens an item"
    page.keyboard.press("Tab")  # Other keys do what they do elsewhere.
    expect(items.nth(at).locator(".pick")).not_to_be_focused()
    judged.file.write_text("{}\n")
    yes.click()
    expect(line).to_contain_text("The file of verdicts cannot be read or written")
    expect(yes).to_have_attribute("aria-pressed", "false")
    page.goto(f"/?q={text}&q2={text}")
    for half in (page.locator(".half").first, page.locator(".half").last):
        expect(half).to_have_text("Below 50%")
        assert half.evaluate("(one) => one.clientWidth > 48 && one.clientHeight < 60"), "not one letter a line"
