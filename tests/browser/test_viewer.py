"""The viewer in a real browser: it loads cleanly, the heat lies where it belongs, controls do what they say."""

from types import ModuleType
from urllib.parse import quote

import pytest

_CENTROIDS = """
(() => {
  const ratio = window.devicePixelRatio;
  const [a, b, c, d, e, f] = viewer.levelZero(ratio);
  const slide = viewer.osd.drawer.canvas, heat = viewer.overlay;
  const centroid = (canvas, place, reach, weight) => {
    const x0 = Math.floor(place[0] - reach), y0 = Math.floor(place[1] - reach), side = Math.ceil(2 * reach);
    if (x0 < 0 || y0 < 0 || x0 + side > canvas.width || y0 + side > canvas.height) return null;
    const pixels = canvas.getContext("2d").getImageData(x0, y0, side, side).data;
    let total = 0, x = 0, y = 0;
    for (let row = 0; row < side; row++) for (let column = 0; column < side; column++) {
      const w = weight(pixels, 4 * (row * side + column));
      total += w; x += w * (x0 + column + 0.5); y += w * (y0 + row + 0.5);
    }
    return [x / total, y / total, total];
  };
  const dark = (p, i) => Math.max(0, 220 - (p[i] + p[i + 1] + p[i + 2]) / 3) * (p[i + 3] > 0);
  const alpha = (p, i) => p[i + 3];
  return argument.places.map(([column, row]) => {
    const x = (column + 0.5) * argument.tile, y = (row + 0.5) * argument.tile;
    const place = [a * x + c * y + e, b * x + d * y + f];
    const reach = argument.tile * Math.hypot(a, b) * 0.85 + 3;
    const [one, two] = [centroid(slide, place, reach, dark), centroid(heat, place, reach, alpha)];
    return one && two ? Math.hypot(one[0] - two[0], one[1] - two[1]) : null;
  }).filter((shift) => shift !== null);
})()
"""
_PLACES = [(0.2, 0, 9), (0.5, 0, 9), (1.0, 0, 0), (2.0, 0, 2), (0.25, 30, 9), (1.0, 30, 2), (0.5, 90, 9)]


def _shifts(sight, facts: ModuleType) -> list[tuple[float, int, float]]:
    """zoom, turn and the largest distance, in device pixels, between a dark square and the heat that belongs to it."""
    sight.set("scale", "raw")
    sight.set("opacity", "1")
    sight.set("threshold", "0.5")
    argument = {"places": facts.FIDUCIALS, "tile": facts.TILE}
    found = []
    for zoom, turn, index in _PLACES:
        column, row = (
            facts.FIDUCIALS[index] if index < len(facts.FIDUCIALS) else (facts.SIZE[0] / 202, facts.SIZE[1] / 202)
        )
        middle = {"x": (column + 0.5) * facts.TILE, "y": (row + 0.5) * facts.TILE, "zoom": zoom, "turn": turn}
        sight.ask("(viewer.osd.viewport.setRotation(argument.turn, true), true)", middle)
        sight.ask(
            "(viewer.osd.viewport.visibilityRatio = 0, viewer.goTo(argument.x, argument.y, argument.zoom, true), true)",
            middle,
        )
        sight.settle()
        shifts = sight.ask(_CENTROIDS, argument)
        assert shifts, f"no square in sight at zoom {zoom}, turned by {turn}"
        found.append((zoom, turn, max(shifts)))
    return found


@pytest.mark.parametrize("screen", ["sight", "sharp_sight"])
def test_the_heat_lies_on_its_tiles(screen: str, request, address: str, facts: ModuleType) -> None:
    sight = request.getfixturevalue(screen).open(f"{address}?slide=fiducials")
    off = [place for place in _shifts(sight, facts) if not place[2] < 0.6]
    assert not off, f"(zoom, turn, device pixels): {off}"


def test_the_page_loads_without_complaint_and_asks_nobody_else(sight, address: str, facts: ModuleType) -> None:
    sight.open(address)
    heading = sight.page.locator("[data-testid=stMain] h3")
    assert heading.inner_text() == facts.ODD_NAME, "the worst case, its name as it is"
    assert sight.page.locator("[data-id=legend-title]").inner_text() == "attention"
    note = sight.page.locator("[data-id=note]").inner_text()
    assert "Attention is not importance" in note
    assert "r0_f0_s0 that did not see this patient" in note
    assert sight.page.locator("[data-id=scale-text]").inner_text().endswith(("µm", "mm"))
    assert sight.page.get_by_text("Research use only, not for diagnosis.").count() == 1
    assert sight.complaints == []
    assert [url for url in sight.requests if not url.startswith((address, "data:", "blob:"))] == []


def test_opacity_threshold_and_switch_change_what_is_drawn(sight, address: str, facts: ModuleType) -> None:
    sight.open(f"{address}?slide=fiducials")
    everywhere = sight.coloured()
    hot = [(part + 0.5) * facts.TILE for part in facts.FIDUCIALS[0]]
    for opacity in (1.0, 0.5, 0.0):
        sight.set("opacity", str(opacity))
        mixed = [30 + opacity * (heat - 30) for heat in (253, 231, 37)]
        assert sight.colour_at(*hot) == pytest.approx(mixed, abs=8), "about the top of viridis, on dark"
    sight.set("threshold", "0.9")
    shown = sight.page.locator("[data-id=shown]").inner_text()
    assert shown == "5 of 330 cells coloured (2% of the tiled area)"
    assert sight.coloured() < everywhere / 40
    sight.page.locator("[data-id=visible]").uncheck()
    assert sight.coloured() == 0
    sight.page.locator("[data-id=slide]").click(position={"x": 300, "y": 300})
    sight.page.keyboard.press("h")
    assert sight.coloured() > 0


def test_percentile_and_raw_give_the_numbers_of_the_legend(sight, address: str) -> None:
    sight.open(f"{address}?slide=fiducials")
    ticks = sight.page.locator("[data-id=ticks] span")
    assert ticks.all_inner_texts() == ["0%", "25%", "50%", "75%", "100%"]
    ranks = sorted(set(sight.ask("[...viewer.shading.position]")))
    assert ranks == pytest.approx([325 / 660, (325 + 2.5) / 330]), "two values, each counted half against its equals"
    sight.page.locator("[data-id=scale]").select_option("raw")
    assert ticks.all_inner_texts() == ["0", "0.15", "0.301"]
    assert "the score itself" in sight.page.locator("[data-id=meaning]").inner_text()


def test_a_top_tile_is_gone_to(sight, address: str, facts: ModuleType) -> None:
    sight.open(f"{address}?slide=fiducials")
    tiles = sight.page.locator("[data-id=gallery] button")
    assert tiles.count() == 12
    tiles.nth(4).click()
    sight.page.wait_for_function("location.hash.startsWith('#view=')")
    sight.settle()
    centre = sight.ask("(({x, y}) => [x, y])(viewer.centre())")
    assert centre == pytest.approx([(part + 0.5) * facts.TILE for part in (21, 14)], abs=1.0)
    assert tiles.nth(4).get_attribute("aria-pressed") == "true"


def test_another_column_keeps_the_viewer_and_the_view(sight, address: str) -> None:
    sight.open(f"{address}?slide=fiducials")
    sight.ask("(viewer.goTo(700, 600, 1.5, true), viewer.mark = 'the same', true)")
    sight.page.get_by_role("combobox", name="Scores").click()
    sight.page.get_by_role("option", name="contribution:tumour").click()
    sight.page.locator(".wsi[data-heat='contribution:tumour']").wait_for()
    assert sight.ask("viewer.mark") == "the same"
    assert sight.ask("[viewer.centre().x, viewer.centre().y, viewer.zoom()]") == pytest.approx([700, 600, 1.5], abs=0.5)
    assert sight.page.locator("[data-id=legend-title]").inner_text() == "contribution:tumour"
    assert "class tumour" in sight.page.locator("[data-id=meaning]").inner_text()
    assert sight.page.locator("[data-id=colormap]").input_value() == "blue-red", "a signed score has a middle"
    assert "Attention" not in sight.page.locator("[data-id=note]").inner_text()
    sight.page.locator("[data-id=scale]").select_option("raw")
    assert sight.page.locator("[data-id=ticks] span").all_inner_texts() == ["-1", "0", "1"]
    assert sight.complaints == []


def test_a_row_of_the_case_list_opens_its_slide(sight, address: str, facts: ModuleType) -> None:
    sight.open(address)
    sight.ask("(viewer.mark = 'the same', true)")
    sight.page.locator("[data-testid=stDataFrame] canvas").first.click(
        position={"x": 16, "y": 35 + 2 * 30 + 15}, force=True
    )
    sight.page.locator(".wsi[data-slide=fiducials]").wait_for()
    sight.settle()
    assert "slide=fiducials" in sight.page.url
    assert sight.ask("viewer.mark") == "the same"
    assert sight.complaints == []


def test_a_link_restores_the_view(sight, address: str, facts: ModuleType) -> None:
    name = quote(facts.ODD_NAME, safe="")
    view = quote(f"{facts.ODD_NAME}|812|407|1.25", safe="")
    sight.open(f"{address}?method=acmil&slide={name}#view={view}")
    assert sight.ask("[viewer.centre().x, viewer.centre().y, viewer.zoom()]") == pytest.approx(
        [812, 407, 1.25], abs=0.5
    )
    assert sight.page.locator("[data-id=legend-title]").inner_text() == "probability:tumour"


def test_a_missing_slide_is_named_and_the_list_stays(sight, address: str) -> None:
    sight.page.goto(f"{address}?slide=gone")
    alert = sight.page.locator("[data-testid=stAlert]")
    alert.wait_for(timeout=30_000)
    assert "gone.tif" in alert.inner_text()
    sight.page.locator("[data-testid=stDataFrame] canvas").first.click(position={"x": 16, "y": 50}, force=True)
    sight.settle()
    assert sight.page.locator("[data-testid=stAlert]").count() == 0
    assert sight.complaints == []
