"""A running viewer and a headless Chromium that looks at it."""

import importlib.util
import io
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

_CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def _viewer_fixtures() -> ModuleType:
    """The module beside the viewer's own tests that makes the run; test folders are no packages."""
    path = Path(__file__).parents[1] / "viewer" / "conftest.py"
    spec = importlib.util.spec_from_file_location("viewer_fixtures", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def facts() -> ModuleType:
    """Constants of the made run: SIZE, TILE, FIDUCIALS, ODD_NAME."""
    return _viewer_fixtures()


@pytest.fixture(scope="session")
def address(
    facts: ModuleType, tmp_path_factory: pytest.TempPathFactory, make_pyramid: Callable[..., Path]
) -> Iterator[str]:
    """Address of a viewer that runs as a process of its own, as a user starts it."""
    study = facts.make_study(tmp_path_factory.mktemp("browser"), make_pyramid)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"from pathlib import Path; from apps.viewer.launch import view; view(Path({str(study.run)!r}), port={port})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()


def _wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail("the viewer did not start")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.fail("these tests drive Chromium, which is not here: `apt-get install chromium` (`make test` does it)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, headless=True, args=_CHROMIUM_ARGUMENTS)
        yield chromium
        chromium.close()


class Sight:
    """One open page, what it complained of, and the words to ask its viewer something."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self._keep(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _keep(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def open(self, address: str) -> "Sight":
        """Go to an address and wait until slide and heat are drawn."""
        self.page.goto(address)
        self.settle()
        return self

    def settle(self) -> None:
        """Wait until the slide that is shown is drawn to the last tile, and its heat with it."""
        self.page.locator(".wsi[data-heat][data-slide]").wait_for(timeout=30_000)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if self.ask("viewer.image().getFullyLoaded() && !viewer.osd.isAnimating?.()"):
                self.page.wait_for_timeout(150)
                return
            self.page.wait_for_timeout(50)
        pytest.fail("the slide's tiles were not loaded")

    def ask(self, expression: str, argument: Any = None) -> Any:
        """The value of a JavaScript expression about `viewer`, `root` and `argument`."""
        body = f"(root, argument) => {{ const viewer = root.slideViewer; return ({expression}); }}"
        return self.page.locator(".wsi").evaluate(body, argument)

    def set(self, control: str, value: str) -> None:
        """Move one of the viewer's own controls."""
        body = "(part, value) => { part.value = value; part.dispatchEvent(new Event('input', { bubbles: true })); }"
        self.page.locator(f".wsi [data-id={control}]").evaluate(body, value)

    def coloured(self) -> int:
        """How many device pixels the heat covers."""
        return int(
            self.ask(
                "(() => { const c = viewer.overlay;"
                " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
                " for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"
            )
        )

    def colour_at(self, x_l0: float, y_l0: float) -> tuple[int, int, int]:
        """What the eye sees at a place of the slide."""
        place = self.ask(
            "(() => { const [a, b, c, d, e, f] = viewer.levelZero(1), [x, y] = argument;"
            " const box = viewer.parts.slide.getBoundingClientRect();"
            " return [box.left + a * x + c * y + e, box.top + b * x + d * y + f]; })()",
            [x_l0, y_l0],
        )
        clip = {"x": place[0], "y": place[1], "width": 1, "height": 1}
        red, green, blue = Image.open(io.BytesIO(self.page.screenshot(clip=clip))).convert("RGB").getpixel((0, 0))
        return red, green, blue


@pytest.fixture
def sight(browser: Browser) -> Iterator[Sight]:
    """A fresh page."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    yield Sight(context.new_page())
    context.close()


@pytest.fixture
def sharp_sight(browser: Browser) -> Iterator[Sight]:
    """A fresh page on a screen with 1.5 device pixels per CSS pixel."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, device_scale_factor=1.5)
    yield Sight(context.new_page())
    context.close()
