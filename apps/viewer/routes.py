"""The addresses under /wsi: tiles, crops and heat of admitted slides, and the component's files. Read only."""

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from apps.viewer.heat import raster_bytes
from apps.viewer.library import LARGEST_CROP_PX, current
from tiling.errors import UserError

BASE = "/wsi"
_ASSETS = {"index.js": "text/javascript", "heat.js": "text/javascript", "openseadragon.min.js": "text/javascript"}
_LARGEST_CROP_L0 = 16_384
_HEADERS = {
    "Cache-Control": "private, max-age=86400",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_UNCACHED = _HEADERS | {"Cache-Control": "no-store"}


def routes() -> list[Route]:
    """Every route of the viewer beside Streamlit's own."""
    return [
        Route(f"{BASE}/assets/{{digest}}/{{name}}", asset),
        Route(f"{BASE}/{{slide}}/tile/{{level:int}}/{{column:int}}_{{row:int}}.jpg", tile),
        Route(f"{BASE}/{{slide}}/crop.jpg", crop),
        Route(f"{BASE}/{{slide}}/heat.f32", heat),
        Route(f"{BASE}/{{rest:path}}", not_found),
    ]


@cache
def assets_base() -> str:
    """Where the component's files are; changes with their content, so a browser never mixes two versions."""
    folder = files("apps.viewer") / "component"
    digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in sorted(_ASSETS)))
    return f"{BASE}/assets/{digest.hexdigest()[:12]}"


def asset(request: Request) -> Response:
    """One of the component's own files."""
    name = request.path_params["name"]
    if name not in _ASSETS:
        return not_found(request)
    content = (files("apps.viewer") / "component" / name).read_bytes()
    return Response(content, media_type=_ASSETS[name], headers=_HEADERS)


def tile(request: Request) -> Response:
    """A deep-zoom tile."""
    where = request.path_params
    refused = _refusal(request)
    if refused is not None:
        return refused
    return _picture(lambda: current().tile(where["slide"], where["level"], where["column"], where["row"]))


def crop(request: Request) -> Response:
    """A part of level 0: x, y, w, h in its pixels, px the longer side of the answer."""
    refused = _refusal(request)
    if refused is not None:
        return refused
    try:
        x, y, width, height, px = (int(request.query_params[name]) for name in ("x", "y", "w", "h", "px"))
    except (KeyError, ValueError):
        return PlainTextResponse("x, y, w, h and px must be whole numbers", status_code=400, headers=_HEADERS)
    bounded = 0 < width <= _LARGEST_CROP_L0 and 0 < height <= _LARGEST_CROP_L0 and 0 < px <= LARGEST_CROP_PX
    if not bounded:
        return not_found(request)
    longer = max(width, height)
    size = (max(1, round(px * width / longer)), max(1, round(px * height / longer)))
    box_l0 = (x, y, x + width, y + height)
    return _picture(lambda: current().crop(request.path_params["slide"], box_l0, size_px=size))


def heat(request: Request) -> Response:
    """The raster of one column as little-endian float32, row by row; NaN where there is no tile."""
    refused = _refusal(request)
    if refused is not None:
        return refused
    query = request.query_params
    wanted = (query.get("method", ""), query.get("models", ""), query.get("column", ""))
    try:
        content = raster_bytes(current(), request.path_params["slide"], *wanted)
    except (UserError, OSError) as error:
        return PlainTextResponse(str(error), status_code=500, headers=_UNCACHED)
    if content is None:
        return not_found(request)
    return Response(content, media_type="application/octet-stream", headers=_HEADERS)


def not_found(request: Request) -> Response:
    """The answer to every other address below /wsi, so that none falls through to the page."""
    return PlainTextResponse("there is nothing here", status_code=404, headers=_UNCACHED)


def _refusal(request: Request) -> Response | None:
    library, opaque = current(), request.path_params["slide"]
    if not library.knows(opaque):
        return not_found(request)
    if not library.signer.is_valid(opaque, request.query_params.get("t", "")):
        return PlainTextResponse("reload the page: this address is no longer valid", status_code=403, headers=_UNCACHED)
    return None


def _picture(render: Callable[[], bytes | None]) -> Response:
    try:
        content = render()
    except (UserError, OSError) as error:
        return PlainTextResponse(str(error), status_code=500, headers=_UNCACHED)
    if content is None:
        return PlainTextResponse("outside the slide", status_code=404, headers=_UNCACHED)
    return Response(content, media_type="image/jpeg", headers=_HEADERS)
