"""The chat page in a real browser: a conversation, numbers that move, and text that stays text."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import Running, running
from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine

CONFIG = EngineConfig(max_sequences=4, step_tokens=64, block_size=4, cache_bytes=2**20)
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Running]:
    with running(loaded, Engine(loaded.model, loaded.tokenizer, CONFIG)) as made:
        yield made


def shortened(route: Any) -> None:
    """The page asks for as much as there is room for, and a model that says anything may fill it with one answer."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"max_tokens": 60}))


@pytest.fixture(scope="module")
def page(server: Running) -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("there is no browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        made = browser.new_page()
        made.set_default_timeout(60_000)
        problems: list[str] = []
        made.on("pageerror", lambda error: problems.append(str(error)))
        made.on("request", lambda each: problems.append(each.url) if not each.url.startswith(server.url) else None)
        made.route("**/v1/chat/completions", shortened)
        made.goto(server.url)
        yield made
        assert not problems  # no error of the script, and nothing from elsewhere
        browser.close()


def test_a_conversation(page: Any, server: Running) -> None:
    asked = "<b>the</b> quick brown fox"
    page.fill("#text", asked)
    page.press("#text", "Enter")
    page.wait_for_function("document.querySelectorAll('#talk div').length >= 2 && !document.querySelector('.error')")
    page.wait_for_function("document.querySelector('#talk div:nth-child(2) small') !== null")
    boxes = page.locator("#talk > div")
    assert boxes.nth(0).inner_text().startswith(asked)  # as it was typed: markup is text here
    assert page.locator("#talk b").count() == 0
    assert len(boxes.nth(1).inner_text()) > 0
    page.wait_for_function("document.querySelector('#model').textContent === 'tiny'")
    page.fill("#text", "a model learns")
    page.press("#text", "Enter")
    page.wait_for_function("document.querySelectorAll('#talk small').length >= 2")
    if folder := os.environ.get("TIGHTFIT_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / "chat.png")
    page.click("#clear")
    page.wait_for_function("document.querySelectorAll('#talk div').length === 0")
    server.wait_until_idle()


def test_numbers_are_shown_live(page: Any, server: Running) -> None:
    page.wait_for_function("document.querySelector('#used').textContent.endsWith('%')")
    assert server.service.engine.counts.finished > 0
    page.fill("#text", "the quick brown fox jumps")
    page.press("#text", "Enter")
    page.wait_for_function("Number(document.querySelector('#rate').textContent) > 0")
    server.wait_until_idle()
