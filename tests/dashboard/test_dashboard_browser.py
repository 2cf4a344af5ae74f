"""The dashboard in a real browser: quiet, in light and dark, and live without reloading."""

from __future__ import annotations

import pytest
from dashboards import put_record, wait_for
from sample_runs import hostile_run, plain_run

from ejkernel.ops import PersistentCache


@pytest.mark.parametrize("dark", [False, True])
def test_index_and_run_pages_open_quietly(started, browser, dark):
    put_record("20260101T000000-plain", plain_run())
    put_record("20260102T000000-hostile", hostile_run())
    put_record("20260103T000000-damaged", "{")
    PersistentCache().put("cpu|x", "matmul@v2", "0123456789abcdef", {"block": 64})
    dashboard = started()
    page = browser.open(dashboard.url, dark=dark)
    assert page.count("#runs tbody tr") == 3
    assert page.count("#stored tbody tr") == 1
    background = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(13, 17, 23)") is dark
    page.click("#theme")
    assert page.ask("getComputedStyle(document.body).backgroundColor") != background
    page.click("#theme")
    assert page.complaints() == []
    assert all(address.startswith((dashboard.url, "data:")) for address in page.requests())

    page.click("a[href='/runs/20260101T000000-plain']")
    page.wait("location.pathname === '/runs/20260101T000000-plain'")
    page.wait("document.readyState === 'complete'")
    page.click("#tab-operations")
    assert page.count("#operation-1 .row.measured") == 14
    assert page.ask("getComputedStyle(document.body).backgroundColor") == background
    page.click("a[href='/']")
    page.wait("location.pathname === '/' && document.readyState === 'complete'")
    page.click("#stored a")
    page.wait("location.pathname === '/store' && document.readyState === 'complete'")
    assert page.shows("#summary")
    assert page.complaints() == []

    for path in ("runs/20260102T000000-hostile", "store"):
        assert browser.open(f"{dashboard.url}{path}", dark=dark).complaints() == []


def test_it_fits_a_phone(started, browser):
    put_record("20260101T000000-plain", plain_run())
    page = browser.open(started().url, width=390, height=844)
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert page.shows("#runs tbody tr")


def test_a_run_appears_advances_and_ends_without_reloading(started, browser, tuning):
    dashboard = started()
    page = browser.open(dashboard.url)
    page.ask("window.stayed = true")
    assert "No tuning run is under way" in page.ask("document.querySelector('#live').textContent")
    assert page.count("#runs tbody tr") == 0
    process = tuning()
    page.wait("document.querySelector('#live progress[max]') !== null")
    assert "slow_row_sum" in page.ask("document.querySelector('#live h2').textContent")
    tried = "[...document.querySelectorAll('#live dd')].map(e => e.textContent)[1] || ''"
    seen = []

    def over():
        seen.append(page.ask(tried))
        return process.poll() is not None

    wait_for(over)
    assert {"1 of 6", "2 of 6", "3 of 6", "4 of 6", "5 of 6"} & set(seen)
    assert len({text for text in seen if text.endswith(" of 6")}) >= 3
    page.wait("document.querySelector('#live').textContent.includes('No tuning run is under way')")
    page.wait("document.querySelectorAll('#runs tbody tr').length === 1")
    page.wait("document.querySelectorAll('#stored tbody tr').length === 1")
    assert "slow_model:example" in page.ask("document.querySelector('#runs').textContent")
    assert page.ask("window.stayed") is True
    assert page.complaints() == []


def test_a_dashboard_that_ended_is_said(started, browser):
    dashboard = started()
    page = browser.open(dashboard.url)
    assert dashboard.end()[0] == 0
    page.wait("document.querySelector('#live .lost') !== null")
    assert "does not answer any more" in page.ask("document.querySelector('#live').textContent")


def test_with_a_token_the_page_stays_live(started, browser):
    dashboard = started("--token", "a-token-of-a-test-0123456789")
    page = browser.open(dashboard.url)
    assert page.ask("location.search") == ""
    put_record("20260101T000000-plain", plain_run())
    page.wait("document.querySelectorAll('#runs tbody tr').length === 1")
    assert page.complaints() == []
