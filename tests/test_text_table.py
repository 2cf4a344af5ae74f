"""Tables as text: one line per row where it fits, details under it where it does not."""

from __future__ import annotations

import pytest

from ejkernel.formatting import described, duration, lasting, shortened
from ejkernel.text_table import WIDTH, table_lines

HEADER = ("operation", "tuned", "speedup", "config", "call")
ROW = ("flash_attention@v1", "65.2 µs", "1.58×", "block_q=128 block_k=64", "float32[1,512,8,32]")


def texts(*args, **kwargs):
    return [line.text for line in table_lines(*args, **kwargs)]


def test_a_row_that_fits_is_one_line():
    _, rule, row = texts(HEADER, [ROW], details=2, width=100)
    assert row.split("  ")[-1] == ROW[-1]
    assert set(rule) == {"-", " "}


def test_details_go_under_the_line_with_their_names():
    lines = table_lines(HEADER, [ROW, ROW], right=(1, 2), details=2, width=60)
    assert [line.kind for line in lines] == ["header", "header", *["row", "detail", "detail"] * 2]
    assert lines[2].text == "flash_attention@v1  65.2 µs    1.58×"
    assert lines[3].text == "  config  block_q=128 block_k=64"
    assert lines[4].text == "  call    float32[1,512,8,32]"


def test_a_detail_that_says_nothing_is_left_out():
    lines = texts(HEADER, [(*ROW[:3], "–", ROW[4])], details=2, width=40)
    assert not [line for line in lines if "config" in line]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_screen(width):
    long = " ".join(f"backward_block_{name}=128" for name in "abcdefghijk")
    for line in texts(HEADER, [(*ROW[:3], long, long)], details=2, width=width):
        assert len(line) <= width


def test_a_line_that_goes_on_is_marked():
    lines = texts(("a", "b"), [("x", "word " * 40)], details=1, width=WIDTH)
    assert len(lines) > 5
    assert all(line.lstrip().startswith("… ") for line in lines[4:])
    assert all(len(line) <= WIDTH for line in lines)


def test_a_log_has_whole_sentences():
    sentence = "word " * 40
    lines = texts(("a", "b"), [("x", sentence)], details=1, wrap=False)
    assert lines[-1] == f"  b  {sentence.strip()}"


def test_a_first_column_without_room_for_others_has_its_own_line():
    lines = texts(("config", "time", ""), [("c" * 70, "1.00 ms", "best")], width=WIDTH)
    assert lines[-2:] == ["c" * 70, "  1.00 ms  best"]


@pytest.mark.parametrize(
    ("signature", "short"),
    [
        ("", ""),
        ("float32[8]", "float32[8]"),
        ("float32[8], float32[8], int32[8]", "2 × float32[8], int32[8]"),
        ("float32[8], causal=True, window=(4, 0)", "float32[8] causal window=(4, 0)"),
        ("vmap[4](grad[0](float32[8]))", "vmap[4](grad(float32[8]))"),
        ("grad[0, bias](float32[8], bias=float32[8])", "grad[0, bias](float32[8] bias=float32[8])"),
        ("Params(float32[2], float32[2]), x=1", "Params(float32[2], float32[2]) x=1"),
    ],
)
def test_short_calls(signature, short):
    assert shortened(signature) == short


def test_nothing_temporary_is_shown():
    def gelu(x):
        return x

    class Config:
        pass

    for thing in (gelu, lambda x: x, Config, Config()):
        text = lasting(repr(thing))
        assert "0x" not in text
        assert "<locals>" not in text
    assert lasting(repr(gelu)) == "gelu"
    assert described({"activation": gelu}) == "activation=gelu"


def test_one_way_to_write_a_time():
    assert [duration(s) for s in (1.03e-4, 2.5, 75)] == ["103 µs", "2.50 s", "1 min 15 s"]
