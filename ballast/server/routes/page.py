"""Add the page at `/`: static files without secrets, which need no key.

The page is one more client of the API: its scripts ask for what they show, with the key that the
user types. Its files are in `ballast/server/page`.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

_KINDS = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
"""Media types by the ending of a file's name; files of others are not served."""
_POLICY = (
    "default-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "object-src 'none'",
    # A script that would insert a text as markup fails, whatever the text.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
HEADERS = {
    "content-security-policy": "; ".join(_POLICY),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Page and server are of one version, also after a restart.
    "cache-control": "no-store",
}
"""Headers of each file of the page."""


def add_page(app: FastAPI) -> None:
    """Add `/` and the files that it refers to, below `/page`."""
    contents = page_files()

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _response("page.html", contents["page.html"])

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404)
        return _response(name, contents[name])


def page_files() -> dict[str, bytes]:
    """Read the files of the page, by name."""
    found = (files("ballast.server") / "page").iterdir()
    return {f.name: f.read_bytes() for f in found if _ending(f.name) in _KINDS}


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _response(name: str, content: bytes) -> Response:
    kind = f"{_KINDS[_ending(name)]}; charset=utf-8"
    return Response(content, media_type=kind, headers=HEADERS)
