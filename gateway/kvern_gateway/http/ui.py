"""The web page: files of the package, read once. They ask nothing of other hosts, and a policy sees to it."""

from __future__ import annotations

from importlib.resources import files

from kvern.errors import invalid
from kvern_gateway.http.wire import Receive, Scope, Send, send_bytes, send_error

_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css",
    "js": b"text/javascript",
    "svg": b"image/svg+xml",
}
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


UI_FILES = ("icon.svg", "style.css", "app.js", "blocks.js", "plots.js", "timeline.js")


class Ui:
    """``/ui`` is the page, ``/ui/NAME`` a file of it. It holds no data: what it shows, it asks for with the user's key."""

    def __init__(self) -> None:
        self._files = {
            name: ((files("kvern_gateway") / "web" / name).read_bytes(), _TYPES[name.rpartition(".")[2]])
            for name in ("index.html", *UI_FILES)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"].get("name", "index.html")
        found = self._files.get(name)
        if found is None:
            error = invalid("path", f"the page has no file {name[:60]!r}")
            await send_error(scope, receive, send, error)
            return
        await send_bytes(scope, send, *found, headers=HEADERS)
