"""Addresses below /wsi: what is served, to whom, and everything that is refused."""

import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

from apps.viewer.library import Library, Signer
from apps.viewer.routes import assets_base, routes
from wsi_mil.heatmap import rasterise
from wsi_mil.runs import FoldKey


@pytest.fixture
def client(library: Library) -> Iterator[TestClient]:
    with TestClient(Starlette(routes=routes()), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def slide(library: Library) -> tuple[str, str]:
    """Opaque id and token of the first slide that has its file."""
    case = next(case for case in library.cases("abmil") if case.slide_id == "fiducials")
    opaque = library.admit(case)
    return f"/wsi/{opaque}", library.signer.token(opaque)


def test_a_tile_is_a_jpeg_that_only_the_own_page_may_use(client: TestClient, slide: tuple[str, str]) -> None:
    base, token = slide
    answer = client.get(f"{base}/tile/12/4_3.jpg", params={"t": token})
    assert answer.status_code == 200
    assert Image.open(io.BytesIO(answer.content)).size == (2305 - 4 * 510 + 1, 1547 - 3 * 510 + 1)
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "private" in answer.headers["cache-control"]


def test_the_dark_square_is_where_it_was_drawn(client: TestClient, slide: tuple[str, str]) -> None:
    base, token = slide
    answer = client.get(f"{base}/tile/12/0_0.jpg", params={"t": token})
    pixels = np.asarray(Image.open(io.BytesIO(answer.content)).convert("L"))
    rows, columns = np.nonzero(pixels < 130)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (101, 201, 101, 201)


@pytest.mark.parametrize("token", ["", "x", "7fffffff.", "7fffffff.00000000000000000000000000000000", "7fffffff.é"])
@pytest.mark.parametrize("what", ["tile/9/0_0.jpg", "crop.jpg?x=0&y=0&w=9&h=9&px=9", "heat.f32?method=abmil"])
def test_without_a_true_token_nothing_is_shown(
    client: TestClient, slide: tuple[str, str], what: str, token: str
) -> None:
    assert client.get(f"{slide[0]}/{what}{'&' if '?' in what else '?'}t={token}").status_code == 403


def test_a_token_of_another_slide_or_of_yesterday_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer()
    token = signer.token("a")
    assert signer.is_valid("a", token)
    assert not signer.is_valid("b", token)
    assert not Signer().is_valid("a", token)
    monkeypatch.setattr("apps.viewer.library.time.time", lambda: int(token.split(".")[0], 16) + 1.0)
    assert not signer.is_valid("a", token)


@pytest.mark.parametrize(
    "what",
    [
        "tile/13/0_0.jpg",
        "tile/12/5_0.jpg",
        "tile/12/0_4.jpg",
        "crop.jpg?x=0&y=0&w=99999&h=9&px=9",
        "crop.jpg?x=0&y=0&w=9&h=9&px=4096",
        "crop.jpg?x=0&y=0&w=0&h=9&px=9",
        "crop.jpg?x=2300&y=0&w=50&h=50&px=9",
        "crop.jpg?x=-1&y=0&w=50&h=50&px=9",
        "heat.f32?method=abmil&models=r0_f0_s0&column=coords",
        "heat.f32?method=nothing&models=r0_f0_s0&column=attention",
        "heat.f32?method=abmil&models=../../x&column=attention",
        "label.jpg",
    ],
)
def test_what_does_not_exist_is_not_found(client: TestClient, slide: tuple[str, str], what: str) -> None:
    base, token = slide
    assert client.get(f"{base}/{what}{'&' if '?' in what else '?'}t={token}").status_code == 404


def test_unknown_slides_and_paths_are_not_found(client: TestClient, slide: tuple[str, str]) -> None:
    for path in (
        "/wsi/0123456789abcdef/tile/9/0_0.jpg",
        "/wsi/..%2f..%2fetc%2fpasswd",
        f"{assets_base()}/viewer.css.py",
    ):
        assert client.get(path, params={"t": slide[1]}).status_code == 404
    assert client.get(f"{slide[0]}/crop.jpg", params={"t": slide[1], "x": "a"}).status_code == 400
    assert client.post(f"{slide[0]}/crop.jpg", params={"t": slide[1]}).status_code == 405


def test_a_case_that_was_not_shown_is_not_served(client: TestClient, library: Library) -> None:
    opaque = library.signer.opaque_id("Präparat 07 #1 & <b>")
    answer = client.get(f"/wsi/{opaque}/tile/9/0_0.jpg", params={"t": library.signer.token(opaque)})
    assert answer.status_code == 404


def test_heat_is_the_raster_of_the_models_that_did_not_see_the_patient(
    client: TestClient, slide: tuple[str, str], library: Library
) -> None:
    base, token = slide
    query = {"t": token, "method": "acmil", "models": "mean", "column": "probability:tumour"}
    answer = client.get(f"{base}/heat.f32", params=query)
    values = np.frombuffer(answer.content, "<f4").reshape(15, 22)
    parts = [library.run.scores("acmil", FoldKey(0, 0, seed), "fiducials") for seed in (0, 1)]
    expected = np.mean([rasterise(part, "probability:tumour").values for part in parts], axis=0)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert values[1, 20] == pytest.approx(0.5)
    seen = client.get(f"{base}/heat.f32", params=query | {"models": "r0_f1_s0"})
    assert seen.status_code == 404, "the model of fold 1 was trained on this patient"


def test_a_crop_shows_its_part_of_the_slide(client: TestClient, slide: tuple[str, str]) -> None:
    base, token = slide
    query = {"x": 101, "y": 101, "w": 202, "h": 101, "px": 64, "t": token}
    pixels = np.asarray(Image.open(io.BytesIO(client.get(f"{base}/crop.jpg", params=query).content)).convert("L"))
    assert pixels.shape == (32, 64)
    assert pixels[:, 4:28].mean() < 60
    assert pixels[:, 36:60].mean() > 220


def test_the_components_files_are_served(client: TestClient) -> None:
    for name in ("index.js", "heat.js", "openseadragon.min.js"):
        answer = client.get(f"{assets_base()}/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/javascript")
