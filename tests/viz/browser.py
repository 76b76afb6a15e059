"""Look at a page in the installed Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["View", "open_browser"]


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless browser, which is gone afterwards."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program is not None, (
        "this test needs the browser chromium, which is not installed: run `make setup` as root, "
        "or install Debian's package chromium"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


class View:
    """A page, what it complained about and what it asked the network for."""

    def __init__(
        self,
        browser: Browser,
        file: Path,
        *,
        size: tuple[int, int] = (1280, 900),
        phone: bool = False,
        dark: bool = False,
    ) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page: Page = browser.new_page(
            viewport={"width": size[0], "height": size[1]},
            device_scale_factor=2,
            is_mobile=phone,
            has_touch=phone,
            color_scheme="dark" if dark else "light",
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.settle()

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)

    def run(self, code: str) -> Any:
        """Evaluate JavaScript and return its value."""
        return self.page.evaluate(code)

    def settle(self) -> None:
        """Let the page finish two frames."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def move(self, x: float, y: float) -> None:
        self.page.mouse.move(x, y)
        self.settle()

    def click(self, x: float, y: float) -> None:
        self.page.mouse.click(x, y)
        self.settle()

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.page.mouse.move(*start)
        self.page.mouse.down()
        self.page.mouse.move(*end, steps=5)
        self.page.mouse.up()
        self.settle()

    def wheel(self, x: float, y: float, amount: float) -> None:
        self.page.mouse.move(x, y)
        self.page.mouse.wheel(0, amount)
        self.settle()

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return where its middle is."""
        x, y = self.page.locator(selector).first.evaluate(
            "e => { e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }"
        )
        return x, y
