"""`wavefill bench sweep` and `compare`: what they send, the ratios, the report."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.responses import JSONResponse

from server.bench.compare import compare, comparison_table, order_of_turn
from server.bench.metrics import Objectives, RequestResult, Summary, summarize
from server.bench.plot import Axis, Series, linear_ticks, log_ticks, number, plot
from server.bench.report import SweepPoint, sweep_report
from server.cli.main import main
from tests.support.bench.bench_server import BenchFakeServer, listening
from tests.support.cli.pseudo_terminal import pseudo_terminal

SMALL = ("--input-len", "7", "--output-len", "6", "--warmup", "1")


def bench(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def summary(speed: float, good: float | None = None) -> Summary:
    """Of one request: 100 tokens in 1 / `speed` seconds."""
    result = RequestResult(0.0, (0.1 / speed, 0.5 / speed, 1 / speed), 10, 0, 100)
    return replace(summarize([result], Objectives()), good_requests_per_s=good)


def test_each_load_of_a_sweep_has_its_clients_and_prompts_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, html, file = BenchFakeServer(), tmp_path / "s.html", tmp_path / "s.json"
    with listening(fake) as url:
        words = ("--concurrency", "1", "3", "--num-prompts", "9", "--goodput", "e2e:60000")
        files = ("--html", str(html), "--json", str(file))
        assert bench("sweep", "--url", url, *SMALL, *words, *files, "--api-key", "secret-key") == 0
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(prompts) == len(set(prompts)) == 1 + 2 * 9
    assert fake.most_open == 3
    figures = json.loads(file.read_text())
    assert [point["load"] for point in figures["points"]] == [1, 3]
    assert [point["summary"]["completed"] for point in figures["points"]] == [9, 9]
    printed = capsys.readouterr().out
    assert re.search(r"^ +3( +[\d.,]+){7}$", printed, re.MULTILINE), printed
    assert f"report: {html}" in printed
    text = html.read_text("utf-8")
    assert text.count("<svg") == 4 and "secret-key" not in text + file.read_text()


def test_a_sweep_over_rates_that_fail_says_so_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    fake, html = BenchFakeServer(), tmp_path / "s.html"
    fake.refuse = lambda index: JSONResponse({}, 500) if index >= 9 else None
    with listening(fake) as url:
        words = ("--rate", "400", "500", "--num-prompts", "8", "--html", str(html))
        assert bench("sweep", "--url", url, *SMALL, *words) == 1
    assert "500 requests/s: 8 requests failed (8 x HTTP 500)" in capsys.readouterr().out
    assert html.read_text("utf-8").count("<svg") == 4


def test_the_report_is_one_file_that_loads_nothing_and_is_well_formed() -> None:
    points = [SweepPoint(load, summary(load, 1.0)) for load in (1, 2, 64)]
    html = sweep_report("<model> & co", "clients", points, {"date": "today", "url": "http://x"})
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", html)
    assert "&lt;model&gt; &amp; co" in html and "<model>" not in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)


def test_loads_without_an_answer_are_left_out_of_the_plots() -> None:
    points = [SweepPoint(1, summary(1)), SweepPoint(2, summarize([], Objectives()))]
    html = sweep_report("t", "clients", points, {})
    assert "<td>2</td>" in html
    # Two lines in each plot of latency and one in the others, of one point each.
    assert html.count("<circle") == 2 + 2 + 2 + 2


def test_the_plot_puts_values_where_its_axes_say() -> None:
    axis = Axis([10.0, 40.0], 0.0, 100.0)
    assert not axis.log and axis.ticks == [0, 10, 20, 30, 40]
    assert (axis.pixel(0), axis.pixel(20), axis.pixel(40)) == (0, 50, 100)
    wide = Axis([1.0, 1000.0], 0.0, 90.0)
    assert wide.log and wide.pixel(10) == pytest.approx(30)
    svg = plot("x", "y", [Series("a", [1.0, 2.0], [3.0, 6.0], ["one", "two"])])
    circles = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)
    (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in circles)
    assert x1 < x2 and y1 > y2 and "a, two: 2, 6" in svg


@pytest.mark.parametrize(
    ("most", "ticks"), [(1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (47, [0, 10, 20, 30, 40, 50])]
)
def test_linear_ticks_are_round_and_reach_the_largest(most: float, ticks: list[float]) -> None:
    assert linear_ticks(most) == pytest.approx(ticks)


def test_logarithmic_ticks_enclose_the_values() -> None:
    assert log_ticks(3, 90) == [2, 5, 10, 20, 50, 100]
    assert log_ticks(5, 5) == [5, 10]
    assert log_ticks(0.001, 10_000)[0] == 0.001


def test_numbers_have_three_digits() -> None:
    found = [number(value) for value in (0, 0.25, 1.5, 98, 12_000, 1234.5)]
    assert found == ["0", "0.25", "1.5", "98", "12,000", "1,234"]


def test_servers_take_turns_with_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, file = BenchFakeServer(), BenchFakeServer(), tmp_path / "c.json"
    with listening(one) as a, listening(two) as b:
        words = ("--turns", "2", "--num-prompts", "4", "--concurrency", "2", "--json", str(file))
        assert bench("compare", a, b, *SMALL, *words) == 0
    sent = [sorted(body["prompt"] for body in fake.bodies[1:]) for fake in (one, two)]
    assert sent[0] == sent[1] and len({tuple(prompt) for prompt in sent[0]}) == 8
    printed = capsys.readouterr().out
    assert "B / A" in printed and "1 figure in 2" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    figures = json.loads(file.read_text())
    assert len(figures["turns"]) == 2 and len(figures["figures"][0]["ratios"]) == 2


def test_the_first_of_a_turn_changes() -> None:
    assert [order_of_turn(turn) for turn in range(3)] == [(0, 1), (1, 0), (0, 1)]


def test_ratios_are_of_each_turn_and_only_all_turns_together_decide() -> None:
    turns = [(summary(1), summary(2)), (summary(1), summary(4)), (summary(2), summary(6))]
    found = {each.name: each for each in compare(turns)}
    output = found["output tokens / s"]
    assert (output.ratio, output.lowest, output.highest) == pytest.approx((3, 2, 4))
    assert output.verdict == found["TTFT p50, ms"].verdict == "B"
    assert found["TTFT p50, ms"].ratio == pytest.approx(1 / 3)
    assert "good requests / s" not in found
    mixed = {each.name: each for each in compare([*turns, (summary(2), summary(1))])}
    assert mixed["output tokens / s"].verdict == "either"
    swapped = {each.name: each for each in compare([(b, a) for a, b in turns])}
    assert swapped["E2E p50, ms"].verdict == "A"
    assert "3.000" in comparison_table([output])


def test_a_server_that_fails_ends_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:

    one, two = BenchFakeServer(), BenchFakeServer()
    two.refuse = lambda index: JSONResponse({}, 500) if index else None
    with listening(one) as a, listening(two) as b:
        assert bench("compare", a, b, *SMALL, "--turns", "2", "--num-prompts", "3") == 1
    assert f"{b}: 3 failed: HTTP 500" in capsys.readouterr().err


def test_on_a_terminal_a_bar_shows_how_far_a_load_is(tmp_path: Path) -> None:

    wavefill = Path(sys.executable).parent / "wavefill"
    words = ("--concurrency", "2", "--num-prompts", "30", "--html", str(tmp_path / "a.html"))
    with listening(BenchFakeServer()) as url:
        command = (wavefill, "bench", "sweep", "--url", url, *SMALL, *words)
        with pseudo_terminal(command) as terminal:
            assert terminal.wait(60) == 0
    assert re.search(r"\u2588.* \d+%  \d+ / 30  2 clients", terminal.text)
    lines = [line for line in terminal.lines if line.strip()]
    assert all(len(line) <= 80 for line in lines[:-1]), lines  # the last is a path
    assert not any("/ 30" in line for line in lines), "the bar was left"
