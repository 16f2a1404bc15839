"""The page at `/`, on which a person tries the server and sees which tier wrote each token. Its files are in page/."""

import inspect
import os
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FILES = Path(__file__).parent / "page"
DEMO = inspect.__file__  # Python's own: a long text that every server has, and that the demo pair never saw
HEADERS = {
    # Nothing is loaded from elsewhere, no script stands in the page itself, and no other site may frame it.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers ask each time whether a file has changed (304 if not), so that no page of an older version lives on.
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """The page's files with the headers above."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its other files under `/page`."""
    files = PageFiles(directory=FILES)

    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def demo(request: Request) -> Response:
        return files.file_response(DEMO, os.stat(DEMO), request.scope)

    app.add_route("/", index, methods=["GET"], include_in_schema=False)
    app.add_route("/page/demo.py", demo, methods=["GET"], include_in_schema=False)
    app.mount("/page", files, name="page")
