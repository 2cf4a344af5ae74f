"""The report in a real browser: it opens, draws, answers to mouse, keyboard and phone."""

from __future__ import annotations

import pytest
from sample_runs import changed_run, empty_run, hostile_run, large_run, plain_run

from ejkernel.report import Diff, write

TABS = ("summary", "operations", "sure", "environment")


@pytest.fixture(scope="module")
def pages(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    made = {
        "plain": plain_run,
        "hostile": hostile_run,
        "large": large_run,
        "empty": empty_run,
        "diff": lambda: Diff.of(plain_run(), changed_run()),
        "hostile-diff": lambda: Diff.of(hostile_run(), hostile_run()),
    }
    files = {name: write(make(), folder / f"{name}.html") for name, make in made.items()}

    def opened(name, **options):
        return browser.open(files[name], **options)

    return opened


@pytest.mark.parametrize("name", ["plain", "hostile", "large", "empty", "diff", "hostile-diff"])
def test_it_opens_quietly_and_alone(pages, name):
    page = pages(name)
    assert page.complaints() == []
    assert len([address for address in page.requests() if address.startswith("file:")]) == 1
    assert all(address.startswith(("file:", "data:")) for address in page.requests())


def test_tabs_by_mouse_keyboard_and_link(pages):
    page = pages("plain")
    assert page.shows("#summary")
    assert not page.shows("#operations")
    page.click("#tab-operations")
    assert page.shows("#operations")
    assert not page.shows("#summary")
    page.press("ArrowRight")
    assert page.shows("#sure")
    assert page.ask("document.activeElement.id") == "tab-sure"
    page.press("Home")
    assert page.shows("#summary")
    page.click("a[href='#operation-2']")
    page.wait("document.querySelector('#operation-2').getClientRects().length > 0")
    assert page.ask("document.querySelector('#tab-operations').ariaSelected") == "true"
    assert page.complaints() == []


def test_plots_are_drawn(pages):
    page = pages("plain")
    page.click("#tab-operations")
    assert page.count("#operation-1 .row.measured") == 14
    assert page.count("#operation-1 .row.rejected") == 2
    widths = page.ask(
        "[...document.querySelectorAll('#operation-1 .row.measured .mark')]"
        ".map(mark => mark.getBoundingClientRect().left)"
    )
    assert len(set(widths)) > 5  # at places of their own, the fastest at the left
    assert widths == sorted(widths)
    assert page.count("#operation-1 .heat td[style]") >= 14
    colours = page.ask(
        "new Set([...document.querySelectorAll('#operation-1 [data-map=\"0\"] td[style]')]"
        ".map(cell => getComputedStyle(cell).backgroundColor)).size"
    )
    assert colours > 4


@pytest.mark.parametrize(
    ("where", "tab", "says"),
    [
        ("#summary .row.best", "summary", "tuned: 9 runs"),
        ("#operation-1 .row.best", "operations", "12 samples from"),
        ("#operation-1 .row.rejected", "operations", "wrong: 3 of 64 differ"),
        ("#operation-1 .heat td.best", "operations", "4.12 ms per call"),
        ("#sure .row.gain", "sure", "between 1.20× and 1.31×"),
    ],
)
def test_tooltips(pages, where, tab, says):
    page = pages("plain")
    page.click(f"#tab-{tab}")
    assert not page.shows("#tip")
    page.hover(where)
    assert page.shows("#tip")
    assert says in page.ask("document.querySelector('#tip').textContent")
    box = page.ask(
        "(b => [b.left, b.right, b.top])(document.querySelector('#tip').getBoundingClientRect())"
    )
    assert box[0] >= 0
    assert box[1] <= 1100
    assert box[2] >= 0
    page.hover("h1")
    assert not page.shows("#tip")


def test_tooltips_by_keyboard(pages):
    page = pages("plain")
    page.click("#tab-operations")
    page.ask("document.querySelector('#operation-1 .filters button:last-child').focus()")
    page.press("Tab")
    page.wait("document.activeElement.matches('#operation-1 .row')")
    assert page.shows("#tip")
    page.press("ArrowDown")
    described = page.ask("document.activeElement.getAttribute('aria-describedby')")
    assert described == "tip"
    assert page.ask("document.activeElement.previousElementSibling.matches('.best')")
    page.press("Escape")
    assert not page.shows("#tip")


def test_filters_and_maps(pages):
    page = pages("plain")
    page.click("#tab-operations")
    assert page.shows("#operation-1 .row.rejected")
    page.click("#operation-1 [data-filter=rejected]")
    assert not page.shows("#operation-1 .row.rejected")
    assert page.ask("document.querySelector('[data-filter=rejected]').ariaPressed") == "false"
    assert page.shows("#operation-1 [data-map='0']")
    assert not page.shows("#operation-1 [data-map='1']")
    page.ask(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#operation-1 select'))"
    )
    assert page.shows("#operation-1 [data-map='1']")
    assert not page.shows("#operation-1 [data-map='0']")


def test_many_candidates_are_folded(pages):
    page = pages("large")
    page.click("#tab-operations")
    visible = (
        "[...document.querySelectorAll('#operation-1 .row.measured')]"
        ".filter(row => row.offsetParent).length"
    )
    assert page.ask(visible) == 24
    page.click("#operation-1 .show-all")
    assert page.ask(visible) == 286


def test_light_and_dark(pages):
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = pages("plain"), pages("plain", dark=True)
    assert light.ask(colour) != dark.ask(colour)
    was = dark.ask(colour)
    dark.click("#theme")
    assert dark.ask(colour) == light.ask(colour)
    dark.click("#theme")
    assert dark.ask(colour) == was


@pytest.mark.parametrize("name", ["plain", "hostile", "large", "diff", "hostile-diff"])
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_needs_no_scrolling_sideways(pages, name, width):
    page = pages(name, width=width, height=700)
    for tab in TABS if "diff" not in name else ("summary", "operations", "environment"):
        page.ask(f"document.querySelector('#tab-{tab}').click()")
        page.ask("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.ask("document.documentElement.scrollWidth") <= width, tab


@pytest.mark.parametrize("name", ["plain", "large", "diff"])
def test_values_of_an_axis_do_not_lie_on_each_other(pages, name):
    for width in (320, 390, 1100):
        page = pages(name, width=width)
        page.ask("document.querySelectorAll('section').forEach(s => { s.hidden = false; })")
        page.ask("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        overlaps = page.ask(
            "[...document.querySelectorAll('.axis-marks')].map(marks => [...marks.children]"
            ".map(mark => mark.getBoundingClientRect()).filter(box => box.width)"
            ".sort((a, b) => a.left - b.left)"
            ".some((box, i, all) => i && box.left < all[i - 1].right))"
        )
        assert True not in overlaps, width
        assert len(overlaps) >= 1


def test_everything_can_be_reached_and_has_a_name(pages):
    page = pages("plain")
    nameless = page.ask(
        "[...document.querySelectorAll('button, a, select, [role=region], [role=tabpanel]')]"
        ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length"
        " || e.getAttribute('aria-labelledby'))).length"
    )
    assert nameless == 0
    assert page.ask("document.documentElement.lang") == "en"


def test_the_colours_of_text_can_be_told_from_what_is_behind(pages):
    """Contrast of 4.5 to 1, as the web's guidelines want it, of every kind of text."""
    script = """
    (() => {
      const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
      const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const paint = (layers) => {
        canvas.fillStyle = '#fff'; canvas.fillRect(0, 0, 1, 1);
        for (const colour of layers) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
        return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
      };
      const bad = [];
      for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.getClientRects().length || e.closest('svg')) continue;
        const behind = [];
        for (let p = e; p; p = p.parentElement) behind.unshift(getComputedStyle(p).backgroundColor);
        const back = paint(behind), front = paint([...behind, getComputedStyle(e).color]);
        const ratio = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
        if (ratio < 4.5) bad.push([e.className, e.textContent.slice(0, 30), ratio]);
      }
      return bad;
    })()
    """
    for dark in (False, True):
        for name in ("plain", "diff"):
            page = pages(name, dark=dark)
            for tab in TABS if name == "plain" else ("summary", "operations", "environment"):
                page.click(f"#tab-{tab}")
                assert page.ask(script) == [], (name, dark, tab)


def test_the_whole_report_in_a_cell_of_a_notebook(browser, tmp_path):
    file = tmp_path / "cell.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{plain_run()._repr_html_()}")
    page = browser.open(file)
    inside = page.frames()[-1]
    page.ask("document.querySelector('#tab-operations').click()", context=inside)
    shown = "document.querySelector('#{}').getClientRects().length > 0"
    assert page.ask(shown.format("operations"), context=inside)
    page.ask("document.querySelector('#tab-summary').click()", context=inside)
    page.ask("document.querySelector(\"a[href='#operation-2']\").click()", context=inside)
    assert page.ask(shown.format("operation-2"), context=inside)
    page.ask("document.querySelector('#theme').click()", context=inside)
    assert page.complaints() == []


def test_it_can_be_read_without_scripts(pages):
    page = pages("plain")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.reload")
    page.wait("document.readyState === 'complete'")
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    for panel in TABS:
        assert page.shows(f"#{panel}")
    assert page.shows("#operation-1 .history svg")
    assert page.shows("#operation-1 .shares")


def test_the_search_is_drawn_within_its_plot(pages):
    for options in ({}, {"width": 390, "height": 800}):
        page = pages("plain", **options)
        page.click("#tab-operations")
        inside = page.ask(
            "(() => { const box = document.querySelector('#operation-1 .history svg')"
            ".getBoundingClientRect();"
            "return [...document.querySelectorAll('#operation-1 .history svg *')]"
            ".map(mark => mark.getBoundingClientRect())"
            ".every(b => b.left > box.left - 7 && b.right < box.right + 7"
            " && b.top > box.top - 7 && b.bottom < box.bottom + 7); })()"
        )
        assert inside
        assert page.count("#operation-1 .history .tried") == 13
        assert page.count("#operation-1 .history .mark") == 1
        assert page.count("#operation-1 .history .untimed") == 2
    page.hover("#operation-1 .history .mark")
    assert "trial 10: fwd(q=256 kv=128)" in page.ask("document.querySelector('#tip').textContent")


def test_names_of_parameters_are_not_broken_up(pages):
    for width in (390, 1100):
        page = pages("plain", width=width)
        page.click("#tab-operations")
        heights = page.ask(
            "[...document.querySelectorAll('#operation-1 .shares tr')]"
            ".map(row => row.getBoundingClientRect().height)"
        )
        assert max(heights) < 40


def test_a_sample_beyond_the_plot_has_its_mark_at_the_edge(pages):
    page = pages("plain")
    page.click("#tab-operations")
    assert page.count("#operation-1 .beyond") >= 1
    distance = page.ask(
        "(() => { const mark = document.querySelector('#operation-1 .beyond');"
        "return Math.abs(mark.getBoundingClientRect().right"
        " - mark.closest('svg').getBoundingClientRect().right); })()"
    )
    assert distance < 3


def test_the_chosen_cell_is_framed(pages):
    page = pages("plain")
    page.click("#tab-operations")
    framed = "#operation-1 [data-map='0'] td.best"
    assert page.count(framed) == 1
    assert page.ask(f'getComputedStyle(document.querySelector("{framed}")).outlineStyle') == "solid"


def test_a_comparison_has_its_tabs_plots_and_tips(pages):
    page = pages("diff")
    assert page.shows("#summary")
    page.hover("#summary .row.gain")
    assert "speedup lies between" in page.ask("document.querySelector('#tip').textContent")
    page.click("#tab-operations")
    assert page.count("#operations .overview tbody tr:not(.below)") == 4
    page.click("#tab-environment")
    assert page.count("#environment .differs") == 2
    assert page.complaints() == []
