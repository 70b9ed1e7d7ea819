"""What a run shows, on a terminal and in a log."""

from __future__ import annotations

import io

from rich.console import Console as RichConsole

from agentrl.metrics.console import Console
from agentrl.metrics.live import draw, sparkline

METRICS = {
    "batch/reward_mean": 0.5124,
    "batch/staleness_mean": 1.2,
    "batch/staleness_max": 3.0,
    "engine/tokens_per_s": 18432.0,
    "learner/tokens_per_s": 901.2,
    "idle/engine": 0.12,
    "idle/learner": 0.333,
    "buffer/running": 30.0,
    "buffer/buffered": 10.0,
    "buffer/training": 24.0,
    "seconds/step": 1.26,
}


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _plain(**options: object) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console("quickstart", total_steps=50, capacity=72, stream=stream, **options), stream  # type: ignore[arg-type]


def _drawn(console: Console) -> str:
    terminal = RichConsole(file=io.StringIO(), width=80, record=True, force_terminal=False)
    terminal.print(draw(console.board))
    return terminal.export_text()


def test_a_log_gets_one_aligned_line_per_step() -> None:
    console, stream = _plain()
    console.step(9, METRICS)
    console.evaluation({"set": "heldout", "step": 0, "em": 0.31, "interval": [0.28, 0.35]})
    console.step(10, METRICS | {"batch/reward_mean": 1.0})
    first, evaluation, second = stream.getvalue().splitlines()
    assert first.startswith("step  9/50  reward=0.512   em=-      stale=1.20   gen_tok/s=18432   learn_tok/s=901     idle_engine=0.12")
    assert first.endswith("idle_learner=0.33  buffer=64/72  s=1.3")
    assert evaluation == "eval heldout@0  em=0.310  interval=[0.280, 0.350]"
    assert second.startswith("step 10/50  reward=1.000   em=0.310  stale")
    assert len(first) == len(second)


def test_metrics_that_are_missing_show_as_a_dash() -> None:
    console, stream = _plain()
    console.step(1, {})
    assert "reward=-" in stream.getvalue()


def test_long_work_says_every_few_seconds_how_far_it_is() -> None:
    clock = Clock()
    console, stream = _plain(clock=clock)
    for done in range(0, 101, 10):
        console.phase("warm start", done=done, total=100, detail=f"loss {done / 100:.2f}")
        clock.now_s += 2.0
    assert stream.getvalue().splitlines() == [
        "phase warm start  0/100  loss 0.00",
        "phase warm start  30/100  loss 0.30",
        "phase warm start  60/100  loss 0.60",
        "phase warm start  90/100  loss 0.90",
        "phase warm start  100/100  loss 1.00",
    ]


def test_terminal_escapes_in_text_are_stripped() -> None:
    console, stream = _plain()
    console.message("worker 0: \x1b[2Jpassage said \x1b]0;owned\x07\nnothing")
    console.phase("\x1b[31mprepare")
    assert stream.getvalue().splitlines() == ["worker 0: passage said nothing", "phase prepare"]


def test_off_says_nothing() -> None:
    console, stream = _plain(mode="off")
    console.step(1, METRICS)
    console.message("x")
    console.close()
    assert stream.getvalue() == ""


def test_the_live_board_shows_everything_within_eighty_columns() -> None:
    console, _ = _plain(mode="off")
    for step in range(1, 14):
        console.step(step, METRICS | {"batch/reward_mean": step / 13})
    console.evaluation({"set": "heldout", "step": 10, "em": 0.913, "interval": [0.88, 0.95]})
    console.phase("training")
    text = _drawn(console)
    for shown in (
        "quickstart",
        "13/50",
        "▁",
        "█  1.000",
        "heldout@10  0.913  [0.880, 0.950]",
        "mean 1.20  max 3",
        "generated 18432",
        "30 running",
        "24 training",
    ):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_live_board_shows_progress_of_long_work_and_no_empty_rows() -> None:
    console, _ = _plain(mode="off")
    console.phase("warm start", done=300, total=1200, detail="loss 1.23")
    text = _drawn(console)
    assert "300/1200" in text
    assert "warm start  loss 1.23" in text
    assert "reward" not in text
    assert "buffer" not in text


def test_markup_in_names_is_text() -> None:
    console = Console("[red]run[/red]", total_steps=None, capacity=1, mode="off")
    console.phase("[bold]x[/bold]")
    assert "[red]run[/red]" in _drawn(console)
    assert "[bold]x[/bold]" in _drawn(console)


def test_a_live_display_on_a_stream_draws_and_leaves_the_messages_above() -> None:
    stream = io.StringIO()
    with Console("quickstart", total_steps=50, capacity=72, mode="live", stream=stream) as console:
        console.step(1, METRICS)
        console.message("worker 0 was restarted")
    shown = stream.getvalue()
    assert shown.index("worker 0 was restarted") < shown.index("1/50")


def test_steps_that_a_rollback_took_back_leave_the_curve() -> None:
    console, _ = _plain(mode="off")
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        console.step(step, {"batch/reward_mean": reward})
    assert console.board.rewards == [0.1, 0.25]


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
