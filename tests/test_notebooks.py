"""What a notebook shows of results and decisions, and its progress bar."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import sys
import types

import jax.numpy as jnp
import pytest

from ejkernel.modules.supported import support_table, supported
from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Kernel,
    Tuner,
    autotune,
)
from ejkernel.ops.config.outcome import Outcome, Trial, Verdict
from ejkernel.ops.execution.results import Skipped
from ejkernel.ops.registry import Stats
from ejkernel.ops.tuner.progress import Bar, NotebookBar, in_notebook

HOSTILE = "<script>alert(1)</script> | `x` [y](z)"


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = HOSTILE


def shown_safely(thing):
    html, markdown = thing._repr_html_(), thing._repr_markdown_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "\\<script\\>" in markdown
    assert "<table" in html
    assert "| --- |" in markdown
    return html, markdown


def test_results():
    result = AutotuningResult(
        "cpu|x",
        [Entry(f"op{HOSTILE}@v1", "0" * 16, Config(), HOSTILE, 1e-3, 2e-3)],
        [Skipped("other", HOSTILE)],
    )
    html, markdown = shown_safely(result)
    assert "2.00" in html
    assert "2.00" in markdown
    assert "not tuned: other" in html
    assert str(result).startswith("tuned for cpu|x\noperation")


def test_outcomes():
    trials = (
        Trial(Config("a"), Verdict.MEASURED, 1e-3, (1e-3,)),
        Trial(Config(), Verdict.FAILED, reason=HOSTILE),
    )
    html, _ = shown_safely(Outcome(Config("a"), trials))
    assert "measured 1 of 2 candidates" in html


class Doubled(Kernel[Config, object]):
    def run(self, x, *, cfg):
        return 2 * x

    def candidate_cfgs(self, inv):
        return [Config("a"), Config("b")]

    def heuristic_cfg(self, inv):
        return Config()


def test_decisions():
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    html, markdown = shown_safely(executor.decide(Doubled(name="doubled"), jnp.ones(3)))
    for text in (html, markdown):
        assert "heuristics" in text
        assert "not by overlay" in text


def test_tables_of_what_is_supported():
    assert "flash\\_attention" in support_table()._repr_markdown_()
    x = jnp.ones((1, 8, 1, 8))
    assert "supports it" in support_table("flash_attention", x, x, x)._repr_html_()


# --- the progress bar ----------------------------------------------------------------------------


class Screen:
    """Stands for IPython: keeps what was displayed and what became of it."""

    def __init__(self, monkeypatch, kernel=True):
        self.drawn = []
        shell = types.SimpleNamespace(kernel=object() if kernel else None)
        ipython = types.ModuleType("IPython")
        ipython.get_ipython = lambda: shell
        display = types.ModuleType("IPython.display")
        display.display = self.display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, data, raw, display_id):
        assert display_id is True
        self.update(data, raw)
        return self

    def update(self, data, raw):
        assert raw is True
        assert data["text/plain"] == ""
        self.drawn.append(data["text/html"])


def test_a_bar_in_a_notebook(monkeypatch):
    screen = Screen(monkeypatch)
    moments = iter(range(1000))
    bar = NotebookBar("<op>", clock=lambda: next(moments))
    bar.update(total=10, completed=0, what="compiling")
    bar.update(advance=1)
    bar.update(advance=2)
    assert "&lt;op&gt;" in screen.drawn[0]
    assert "3/10 compiling" in screen.drawn[-1]
    assert 'value="3' in screen.drawn[-1]
    bar.stop()
    assert screen.drawn[-1] == ""


def test_a_bar_does_not_flood_a_notebook(monkeypatch):
    screen = Screen(monkeypatch)
    bar = NotebookBar("op", clock=lambda: 0.0)
    for _ in range(500):
        bar.update(advance=1)
    assert len(screen.drawn) == 1


def test_tuning_shows_a_bar_in_a_notebook_and_nothing_in_a_log(monkeypatch, capsys):
    assert not in_notebook()
    autotune(lambda x: Doubled(name="doubled")(x).sum(), jnp.ones(3))
    assert capsys.readouterr().err == ""
    screen = Screen(monkeypatch)
    assert in_notebook()
    autotune(lambda x: Doubled(name="doubled")(x).sum(), jnp.ones(4))
    assert any("racing" in drawn for drawn in screen.drawn)
    assert screen.drawn[-1] == ""
    count = len(screen.drawn)
    quiet = ConfigSelectorChain(ConfigCache(), tuner=Tuner(progress=False))
    autotune(lambda x: Doubled(name="doubled")(x).sum(), jnp.ones(5), selector=quiet)
    assert len(screen.drawn) == count


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    Screen(monkeypatch, kernel=False)
    assert not in_notebook()


def test_a_bar_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # to Rich this is a terminal
    monkeypatch.setenv("COLUMNS", "200")
    with Bar("tuning [bold]x[/bold] a[0]", wanted=True) as bar:
        bar.update(total=3, completed=1, what="racing 2")
    assert "tuning [bold]x[/bold] a[0]" in capsys.readouterr().err


CELLS = [
    "import jax, jax.numpy as jnp\n"
    "from ejkernel.ops import autotune, Tuner, ConfigSelectorChain, ConfigCache, default_executor\n"
    "from ejkernel.modules import flash_attention\n"
    "q = jnp.ones((1, 64, 2, 16))",
    "result = autotune(lambda q: flash_attention(q, q, q), q)",
    "result",
    "from ejkernel.modules.flash_attention import _kernel\n"
    "default_executor().decide(_kernel, q, q, q, causal=False, softmax_scale=1.0)",
]


@pytest.mark.long
def test_a_real_notebook(tmp_path, monkeypatch):
    """Executed by a real kernel: needs nbclient and ipykernel, which only this test wants."""
    reason = "NOT TESTED: a real notebook; pip install nbclient ipykernel"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent.parent))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    drawn = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            if message["msg_type"] in ("display_data", "update_display_data"):
                drawn.append(message["content"]["data"].get("text/html", ""))
            return super().process_message(message, cell, cell_index)

    Client(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("<progress" in html and "racing" in html for html in drawn)
    assert drawn[-1] == ""
    for cell, says in ((notebook.cells[2], "tuned for"), (notebook.cells[3], "chosen by")):
        data = cell.outputs[-1]["data"]
        assert "<table" in data["text/html"]
        assert says in data["text/html"]
        assert "| --- |" in data["text/markdown"]
    assert not [
        output
        for cell in notebook.cells
        for output in cell.outputs
        if output.get("name") == "stderr" or output["output_type"] == "error"
    ]


# --- what is returned for reading ----------------------------------------------------------------


def explanations():
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    kernel = Doubled(name="doubled_for_reading")
    trials = (Trial(Config(), Verdict.MEASURED, 1e-3, (1e-3,)),)
    outcome = Outcome(Config(), trials)
    entry = Entry("op@v1", "0" * 16, Config(), HOSTILE, 1e-3, 2e-3, "here", outcome)
    yield executor.explain(kernel, jnp.ones(3))
    yield AutotuningResult("cpu|x", [entry]).explain(0)
    yield outcome.explain()


def test_explanations_are_texts_and_tables():
    for text in explanations():
        assert isinstance(text, str)
        shown_safely(text)
        again = pickle.loads(pickle.dumps(text))
        assert type(again) is str
        assert again == text


def test_counts_of_selections():
    counts = Stats({f"op{HOSTILE}@v1": {"memory": 2, "heuristics": 1}}, {"other@v1": 3}, 1.0)
    html, markdown = shown_safely(counts)
    for text in (html, markdown):
        assert "2 hits, 1 misses, 3 tunings" in text
        assert "heuristics" in text
    assert str(counts).startswith("2 hits, 1 misses, 3 tunings\n  op")


def test_supported_is_shown_as_a_table_in_a_notebook(monkeypatch, capsys):
    displayed = []
    screen = Screen(monkeypatch)
    sys.modules["IPython.display"].display = displayed.append
    supported("rms_norm")
    assert displayed[0] == support_table("rms_norm")
    assert capsys.readouterr().out == ""
    assert not screen.drawn


def test_targets_are_a_table():
    from ejkernel import targets

    assert "cuda-sm90" in targets.available()._repr_html_()
