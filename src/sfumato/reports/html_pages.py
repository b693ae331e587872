"""Self-contained HTML pages from the templates of this package."""

import base64
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("sfumato.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )


def render_page(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template; all texts are escaped.

    Args:
        template: name of a file in the folder templates.
        values: by name, what the template shows.

    Returns:
        The page.
    """
    return _environment().get_template(template).render(values)


def data_url(content: bytes) -> str:
    """The bytes of an image file as a URL that a page can hold.

    Args:
        content: of a PNG, WebP or JPEG file.

    Returns:
        The URL.
    """
    kind = "png" if content[:4] == b"\x89PNG" else "webp" if content[:4] == b"RIFF" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
