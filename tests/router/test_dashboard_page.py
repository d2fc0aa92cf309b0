"""The dashboard in a headless Chromium: hostile names, a router that goes and comes back, phones, contrast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.router import fake_nodes as fakes
from tests.router.browser import browser, find_chromium
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving
from tests.router.test_succession import routers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.browser import Page
    from tests.router.router_process import Router

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.integration,
    pytest.mark.skipif(not find_chromium(), reason="no Chromium: apt-get install chromium, or name it in $PD_CHROMIUM"),
]
MARKUP = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\'"&lt;'
MODEL = MARKUP + "\u202egnp.\u0000\u2028" + "m" * 5000
BODY: dict[str, Any] = {"prompt": "hi", "stream": True}
IS_LIVE = "document.getElementById('status')?.textContent === 'Live'"

# The lowest contrast between text and its background, over all elements with text of their own (WCAG 2.1)
LOWEST_CONTRAST = """(() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(rgb[i] / 255), 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(one).backgroundColor);
      if (a === 1) return [r, g, b];
    }
  };
  const hasText = one => [...one.childNodes].some(child => child.nodeType === 3 && child.data.trim());
  const shown = one => !one.closest("svg") && one.getClientRects().length && hasText(one);
  const found = [...document.querySelectorAll("body *:not(script)")].filter(shown).map(one => {
    const [low, high] = [light(numbers(getComputedStyle(one).color)), light(behind(one))].sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), one.outerHTML.slice(0, 80)];
  });
  return found.sort((a, b) => a[0] - b[0])[0];
})()"""


async def ask(router: Router, **fields: Any) -> None:
    async with router.session.post(router.url + "/v1/completions", json=BODY | fields) as answer:
        await answer.read()


async def open_page(page: Page, url: str, **look: Any) -> None:
    await page.show(f"{url}/dashboard", **look)
    await page.until(IS_LIVE)


async def test_names_of_nodes_and_models_stay_text() -> None:
    p = FakeNode("prefill", fakes.prefill, (MODEL,), node_id=MARKUP + "p" * 500)
    d = FakeNode("decode", fakes.decode, (MODEL,), node_id=MARKUP + "d")
    async with running(p, d), serving([p], [d]) as router, browser(find_chromium()) as page:
        await ask(router, model=MODEL)
        await ask(router, model="<b>none</b>")
        await open_page(page, router.url)
        await page.until("document.querySelectorAll('#newest tbody tr').length === 2")
        assert await page.evaluate("window.hit") is None
        assert await page.evaluate("document.querySelectorAll('img, b, main script').length") == 1, "the longest phase"
        names = await page.evaluate(
            "[...document.querySelectorAll('#nodes tbody th > div')].map(e => e.firstChild.data)"
        )
        assert names == [(MARKUP + "p" * 500)[:100], MARKUP + "d"]
        text = await page.evaluate("document.body.innerText")
        assert MARKUP in text
        assert not set("\u202e\u2028\u0000") & set(text)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "long names wrap"
        assert page.problems == [], "no exception, no violation of the policy, no failed load"
        blocked = "try { document.body.innerHTML = '<i>x</i>'; 'made' } catch (error) { error.name }"
        assert await page.evaluate(blocked) == "TypeError", "the browser refuses markup from text on this page"


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
async def test_it_is_readable(width: int, is_dark: bool) -> None:
    p, d = FakeNode("prefill", fakes.prefill, node_id="p"), FakeNode("decode", fakes.decode, node_id="d")
    gone = FakeNode("decode", fakes.decode, node_id="gone")
    gone.is_up = False
    async with running(p, d, gone), serving([p], [d, gone]) as router, browser(find_chromium()) as page:
        await ask(router, model="demo")
        await ask(router, model="none")
        await open_page(page, router.url, width=width, is_dark=is_dark)
        contrast, element = await page.evaluate(LOWEST_CONTRAST)
        assert contrast >= 4.5, element
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        states = await page.evaluate("[...document.querySelectorAll('#nodes .ok, #nodes .bad')].map(e => e.innerText)")
        assert states[0].startswith("●")
        assert any(state.startswith("✕ no answer for") for state in states), "not by colour alone"
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        roles = [node["role"]["value"] for node in tree if not node["ignored"]]
        assert roles.count("table") == 5
        assert {"columnheader", "rowheader", "cell", "status"} <= set(roles)
        assert page.problems == []


async def test_a_pause_stops_the_requests() -> None:
    d = FakeNode("decode", fakes.decode, node_id="d")
    async with running(d), serving(None, [d]) as router, browser(find_chromium()) as page:
        await open_page(page, router.url)
        await page.evaluate("document.getElementById('pause').click()")
        assert await page.evaluate("document.getElementById('pause').ariaPressed") == "true"
        assert (await page.evaluate("document.getElementById('status').textContent")).startswith("Paused at ")
        await ask(router, model="demo")
        assert await page.evaluate("document.querySelectorAll('#newest small').length") == 0
        await page.evaluate("document.getElementById('pause').click()")
        await page.until("document.querySelectorAll('#newest small').length === 1")


async def test_a_router_that_restarts_is_shown_again(tmp_path: Path) -> None:
    d = FakeNode("decode", fakes.decode, node_id="d")
    async with running(d), browser(find_chromium()) as page:
        (tmp_path / "first").mkdir()
        async with routers(tmp_path / "first", "--decode", d.url) as router:
            url = router.url
            await open_page(page, url)
        lost = await page.until("document.querySelector('#status.lost')?.textContent")
        assert lost.startswith("No data since ")
        assert await page.evaluate("document.querySelectorAll('#nodes tbody tr').length") == 1, "the last ones stay"
        port = url.rpartition(":")[2]
        async with routers(tmp_path, "--decode", d.url, "--port", port), aiohttp.ClientSession() as session:
            await page.until(IS_LIVE)
            assert await page.evaluate("document.querySelector('#status.lost')") is None
            async with session.post(f"{url}/v1/completions", json=BODY) as answer:
                await answer.read()
            await page.until("document.querySelectorAll('#newest small').length === 1")
