"""What the formats say, and that no text of a kernel or an error can break out of them."""

from __future__ import annotations

import dataclasses
import html.parser
import re
import time

import pytest
from sample_runs import HOSTILE, attention, empty_run, hostile_run, large_run, loss, plain_run

from ejkernel.formatting import described
from ejkernel.report import FORMATS, BeforeAfter, Candidate, Gain, Run, render
from ejkernel.report.axis import Axis
from ejkernel.report.formatting import headline, how_sure
from ejkernel.report.space import dimensions, maps
from ejkernel.speedup import PlainJax


class Outline(html.parser.HTMLParser):
    """The elements and attributes of a page; complains about what is not closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.open, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("make", [plain_run, hostile_run, large_run, empty_run])
def test_a_page_is_well_formed_and_asks_for_nothing(make):
    text = render(make(), "html")
    outline = Outline(text)
    assert not re.search(r"https?://", text)
    assert {"html", "head", "body", "main", "script", "style"} <= set(outline.tags)
    addresses = [value for name, value in outline.attributes if name in ("src", "href")]
    assert all(address.startswith(("#", "data:,")) for address in addresses)
    identities = [value for name, value in outline.attributes if name == "id"]
    assert len(identities) == len(set(identities))


def test_hostile_texts_are_shown_and_do_nothing():
    text = render(hostile_run(), "html")
    outline = Outline(text)
    assert outline.tags.count("script") == 1
    assert "img" not in outline.tags
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    words = " ".join("".join(outline.words).split())
    for hostile in HOSTILE:
        if "\x00" not in hostile:
            assert " ".join(hostile.split()) in words
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_only_the_script_of_the_page_may_run():
    policy = re.search(
        r'http-equiv="Content-Security-Policy" content="([^"]+)"', render(plain_run())
    )
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert re.search(r"script-src &#x27;sha256-[\w+/]{43}=&#x27;", policy[1])


def test_markdown_keeps_hostile_texts_in_their_cells():
    text = render(hostile_run(), "md")
    assert not re.search(r"(?<!\\)<", text)
    assert not re.search(r"(?<!\\)`", text)
    assert not re.search(r"(?<!\\)\]\(", text)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in tables}
    assert cells <= {12, 11, 7, 4, 3}  # of the four tables, nothing else


def test_the_summary_says_how_much_how_sure_and_how_long():
    text = " ".join("".join(Outline(render(plain_run())).words).split())
    assert "The whole model is 1.25× as fast as before" in text
    assert "The speedup lies between 1.20× and 1.31×" in text
    assert "42.0 s" in text
    assert "3.0e-07" in text
    assert "RESOURCE_EXHAUSTED" in text
    assert "no kernel of that name" in text


@pytest.mark.parametrize("form", ["html", "md"])
def test_plain_jax_stands_next_to_the_default_and_the_tuned_config(form):
    def words(run):
        text = render(run, form)
        return "".join(Outline(text).words) if form == "html" else text.replace("\\", "")

    shown = words(plain_run())
    for text in ("plain JAX", "default config", "over plain", "over default", "2.10×"):
        assert text in shown
    assert "dot_product_attention" in shown
    assert "8.65 ms; speedup of tuned 2.10× (1.90× to 2.40×)" in shown
    stopped = PlainJax("naive", 0.5, more_than=20.0, reason="stopped")
    slow = dataclasses.replace(attention(), plain=stopped)
    assert "> 20×" in words(run_of(slow))
    assert "2.10×" not in words(run_of(dataclasses.replace(slow, plain=None)))


def run_of(operation):
    return dataclasses.replace(plain_run(), operations=(operation,))


@pytest.mark.parametrize("form", ["html", "md"])
def test_a_candidates_row_shows_the_figure_that_decided(form):
    base = Candidate({"n": 1}, "measured", 1.0, (1.0,) * 3)
    close = Candidate({"n": 2}, "measured", 0.98, (0.98,) * 3, speedup=Gain(1.02, 0.97, 1.08))
    chosen = Candidate({"n": 3}, "measured", 0.8, (0.8,) * 3, speedup=Gain(1.25, 1.2, 1.3))
    operation = dataclasses.replace(
        attention(),
        config={"n": 3}, heuristic={"n": 1}, seconds=0.8, heuristic_seconds=1.0,
        gain=Gain(1.25, 1.2, 1.3), plain=None, candidates=(base, close, chosen),
    )  # fmt: skip
    text = render(run_of(operation), form)
    assert "1.20× to 1.30×" in text
    then = "</small><small>" if form == "html" else ", "
    assert f"0.97× to 1.08×{then}undecided" in text
    assert f"1.20× to 1.30×{then}undecided" not in text


def test_without_the_model_the_operations_speak():
    run = dataclasses.replace(plain_run(), model=None)
    top = headline(run)
    assert top.figure == "1.23×"  # (7.4 + 10) / (4.12 + 10)
    assert "The whole model was not run" in top.sentence


@pytest.mark.parametrize("winner", [0.0, None, 1e-3, 1e12])
@pytest.mark.parametrize("other", [0.0, 1e-15, 1e12])
@pytest.mark.parametrize("form", FORMATS)
def test_any_time_that_a_record_may_have_is_shown(form, winner, other):
    run = plain_run()

    def candidate(number, one):
        seconds = None if one.seconds is None else (0.0 if number % 2 else other)
        return dataclasses.replace(one, seconds=seconds, samples=(0.0, other))

    operations = tuple(
        dataclasses.replace(
            operation,
            seconds=winner,
            heuristic_seconds=other,
            took=0.0,
            candidates=tuple(candidate(i, one) for i, one in enumerate(operation.candidates)),
        )
        for operation in run.operations
    )
    text = render(dataclasses.replace(run, operations=operations, seconds=0.0), form)
    assert run.operations[0].op_id.partition("@")[0].replace("_", "") in re.sub(r"[\\_]", "", text)


def test_a_ratio_that_no_two_times_have_is_refused():
    with pytest.raises(ValueError, match="no ratio"):
        Gain(1.0, 5e-324, 1.0)


def test_numbers_of_any_size_are_drawn():
    candidates = tuple(
        Candidate({"a": a, "b": b}, "measured", 1e-3) for a in (1, 10**400) for b in (1, 2.5)
    )
    run = plain_run()
    huge = dataclasses.replace(run.operations[0], candidates=candidates)
    assert "1000000" in render(dataclasses.replace(run, operations=(huge,)), "html")


def test_noise_is_not_sold_as_a_gain():
    model = BeforeAfter("the model", (1.0, 1.1, 1.0), (0.9, 1.1, 1.0), Gain(1.09, 0.94, 1.26))
    top = headline(dataclasses.replace(plain_run(), model=model))
    assert top.figure == "≈ 1×"
    assert "%" not in top.sentence
    assert "as far as can be measured" in top.title
    assert top.finding.level == "open"


def test_a_model_that_became_slower_is_not_called_faster():
    model = BeforeAfter("the model", (1.0,) * 5, (1.2,) * 5, Gain(0.83, 0.8, 0.86))
    assert headline(dataclasses.replace(plain_run(), model=model)).title == (
        "The model is slower than before"
    )


def test_nothing_measured_is_said():
    assert headline(empty_run()).title == "Nothing was measured"
    assert "No operation was tuned" in render(empty_run())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "sure"),
        ({"sure": False}, "likely the best"),
        ({"sure": False, "gain": Gain(1.02, 0.99, 1.05)}, "close"),
        ({"incomplete": "60 seconds are spent"}, "interrupted"),
        ({"sure": False, "gain": None}, "not known"),
        ({"seconds": None, "candidates": ()}, "not measured"),
    ],
)
def test_how_sure(changes, word):
    assert how_sure(dataclasses.replace(attention(), **changes)).word == word


def test_a_heuristic_that_stays_is_no_failure():
    assert how_sure(loss()).word == "heuristic stays"


def test_a_map_has_the_dimensions_that_belong_together():
    first = maps(attention())[0]
    assert {first.down, first.across} == {"fwd.q", "fwd.kv"}
    assert first.rows == first.columns == (64, 128, 256, 512)
    assert first.cells[128, 256].candidate.config["fwd"]["q"] == 256
    assert first.cells[512, 512].candidate.verdict == "failed"


def test_one_dimension_makes_no_map():
    assert dimensions(loss()) == ["rows"]
    assert maps(loss()) == []


def test_a_config_of_hundreds_of_fields_takes_no_minutes():
    candidates = tuple(
        Candidate({f"f{field}": number % (field + 2) for field in range(200)}, "measured", 1.0)
        for number in range(60)
    )
    began = time.process_time()
    assert len(maps(dataclasses.replace(attention(), candidates=candidates))) == 6
    assert time.process_time() - began < 10


def test_the_dimension_that_matters_comes_first():
    run = large_run()
    assert dimensions(attention())[:2] in (["fwd.q", "fwd.kv"], ["fwd.kv", "fwd.q"])
    assert set(dimensions(run.operations[0])) == {"m", "n", "stages", "k"}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"a": 1, "b": None}, "a=1"),
        ({"fwd": {"q": 1, "k": 2}, "bwd": {"q": 3}}, "fwd(q=1 k=2) bwd(q=3)"),
        ({"shape": [1, 2], "t": {"$dtype": "bfloat16"}}, "shape=1×2 t=bfloat16"),
        ("plain", "config=plain"),
        ({}, "default"),
        (None, "default"),
    ],
)
def test_configs_in_a_line(config, text):
    assert described(config) == text


@pytest.mark.parametrize("values", [[1e-9, 2e-9], [1e-3] * 3, [1e-6, 5.0], [3.0], [0.1, 0.11, 0.9]])
def test_an_axis_has_room_and_marks(values):
    axis = Axis.over(values)
    assert all(0 < axis.at(value) < 100 for value in values)
    assert 2 <= len(axis.ticks()) <= 6
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks())


def test_a_large_page_stays_small():
    text = render(large_run())
    assert len(text) < 2_500_000
    assert "Show all 286 measured" in text


def test_results_can_be_rendered_as_they_are():
    with pytest.raises(TypeError, match="AutotuningResult"):
        render("a string")
    assert isinstance(Run.loads(render(plain_run(), "json")), Run)
