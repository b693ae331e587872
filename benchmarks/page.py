"""The page of a running service in a browser: what axe finds, and how its states look.

    sfumato serve runs/demo/index &
    python benchmarks/page.py http://127.0.0.1:8000 --axe axe.min.js --images FOLDER --adopted http://127.0.0.1:8001

The states are those of the demo's index. An adopted index, served beside it, adds the states without a text encoder.
axe.min.js is that of the npm package axe-core. Needs playwright and chromium.
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

STATES = {
    "start": "/",
    "vague": "/?q=animal",
    "precise": "/?q=hot+springs",
    "nonsense": "/?q=xkqz+wvbt",
    "enlarged": "/?q=animal#enlarged",
    "unclear": "/?q=orange+fox",
    "picture": "/?id=1F98A/fluent3d",
    "filter": "/?q=animal&least=0.8",
    "compare": "/?q=animal&q2=cactus",
    "error": "/?q=dog",
    "docs": "/docs",
}
ADOPTED = {"adopted": "/", "adopted-item": "/?id=1"}
SIZES = ((1280, 800), (390, 844), (320, 640))


@contextmanager
def opened(browser: Browser, url: str, size: tuple[int, int], scheme: Any) -> Iterator[Page]:
    """A page that has come to rest."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    if url.endswith("q=dog"):  # The state of a service that has gone.
        page.route("**/v1/search", lambda route: route.abort())
    page.goto(url)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)
    if url.endswith("#enlarged"):
        page.locator(".pick").first.click()
        page.wait_for_timeout(300)
    yield page
    context.close()


def violations(page: Page, axe: str) -> list[str]:
    """What axe finds on a page."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations)")
    return [f"{one['id']} ({one['impact']}): {len(one['nodes'])} x {one['nodes'][0]['html'][:120]}" for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description="the page of a running service in a browser")
    parser.add_argument("url", help="address of a service of the demo's index")
    parser.add_argument("--adopted", help="address of a service of an adopted index")
    parser.add_argument("--axe", type=Path, help="axe.min.js")
    parser.add_argument("--images", type=Path, help="folder for images of all states")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    states = {name: options.url.rstrip("/") + path for name, path in STATES.items()}
    if options.adopted:
        states |= {name: options.adopted.rstrip("/") + path for name, path in ADOPTED.items()}
    axe = options.axe.read_text() if options.axe else None
    if options.images:
        options.images.mkdir(parents=True, exist_ok=True)
    n, n_violations = 0, 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium)
        for name, url in states.items():
            for size in SIZES:
                for scheme in ("light", "dark"):
                    with opened(browser, url, size, scheme) as page:
                        n += 1
                        if options.images:
                            page.screenshot(path=str(options.images / f"{name}-{size[0]}-{scheme}.png"))
                        if (wide := page.evaluate("document.documentElement.scrollWidth")) > size[0]:
                            print(f"{name} at {size[0]}: sticks out, {wide} pixels")
                        for line in violations(page, axe) if axe else []:
                            n_violations += 1
                            print(f"{name} at {size[0]}, {scheme}: {line}")
        browser.close()
    print(f"{n} pages looked at{f', {n_violations} violations found by axe' if axe else ''}")


if __name__ == "__main__":
    main()
