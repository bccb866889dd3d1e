"""What benchmarks make of what they measured, which is made up here: numbers, the page of all targets, the check
against a baseline. And that what clients send is told from what scripts do, and that the limits settle what they
claim."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from benchmarks import check, scale, targets
from benchmarks.bare import QUEUE, Functions, Statements
from benchmarks.monitor import Monitor
from benchmarks.pages import Judged, number, table
from benchmarks.peers.figures import Run
from benchmarks.peers.measure import Measured
from benchmarks.peers.systems import HOLDFAST, LIMIT
from holdfast._core.jobs import Request, Work
from tests.servers import shared


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.0004, "< 0.001"), (0.0123, "0.012"), (0.5, "0.5"), (0.3529, "0.353"), (2, "2"), (99.96, "100"),
     (123.4, "123"), (1_000_000, "1,000,000")],
)  # fmt: skip
def test_a_number_has_about_three_digits(value: float, words: str) -> None:
    assert number(value) == words


def test_a_bar_in_a_cell_does_not_break_its_row() -> None:
    assert table(["", "n"], [["a|b", "1"]], of_numbers=True) == "|  | n |\n| --- | ---: |\n| a\\|b | 1 |\n"


def test_what_clients_send_is_told_from_what_scripts_do() -> None:
    server = shared("valkey")
    assert server is not None
    server.command("SET", "before", 1)
    with Monitor(server) as monitor:
        server.command("EVAL", "redis.call('SET', KEYS[1], 'of a script')", 1, "sent")
        server.command("SET", "sent", "in two\r\nlines [0 lua]")
        server.command("DEL", "before", "sent")
    assert [command.split()[0] for command in monitor.sent] == ['"EVAL"', '"SET"', '"DEL"']


def test_a_limit_on_a_server_leaves_nothing_of_what_it_settled() -> None:
    server = shared("valkey")
    assert server is not None
    functions = Functions(server.port)
    functions.enqueue([Request(f"limit-{n}", Work(b"x")) for n in range(3)])
    leases = functions.claim(2)
    assert [id for id, _ in leases] == [b"limit-0", b"limit-1"]
    functions.settle(leases)
    assert server.command("HKEYS", f"{{hf/{QUEUE}}}:jobs") == [b"limit-2"]
    functions.settle(functions.claim(2))
    assert functions.claim(2) == []
    functions.close()
    server.command("FLUSHALL")


def test_a_limit_on_a_file_leaves_nothing_of_what_it_settled(tmp_path: Path) -> None:
    statements = Statements(tmp_path / "jobs.db")
    statements.enqueue([statements.row(id, b"x") for id in (b"1", b"2", b"3")])
    leases = statements.claim(2)
    assert leases == [(b"1",), (b"2",)]
    statements.settle(leases)
    assert [row[0] for row in statements.get([(b"1",), (b"2",), (b"3",)])] == [b"3"]
    statements.close()


def written(folder: Path) -> None:
    """A run that meets one target and misses another, and what the other runs leave."""
    measured = {HOLDFAST: Measured({"drain_rate": 40, "call_p50": 1}), LIMIT: Measured({"drain_rate": 100})}
    (folder / "peers.json").write_bytes(msgspec.json.encode(Run({"date": "today"}, [measured])))
    (folder / "limits.json").write_bytes(msgspec.json.encode(Run({}, [], {"valkey 9": 300, "redis 7.0.15": 328.4})))
    curve = scale.Curve("it", "x", "y", [(1, 1)], Judged("a curve", "≤ 3", "2", True))
    (folder / "scale.json").write_bytes(msgspec.json.encode([curve]))


def test_the_page_has_every_target_with_what_was_measured(tmp_path: Path) -> None:
    written(tmp_path)
    page = targets.markdown(tmp_path, {"drain, inline, against the limit": "it is busy elsewhere"})
    assert "| drain, inline, against the limit | ≥ 0.5 × limit | 0.4 × (40 against 100) | **missed** |" in page
    assert "- drain, inline, against the limit: it is busy elsewhere" in page
    assert "| bytes per queued job, Redis 7.0 | ≤ 420 | 328 | met |" in page
    assert "| a curve | ≤ 3 | 2 | met |" in page
    assert "| drain, inline, against SAQ | ≥ 10 × saq | - | not measured |" in page


def test_the_page_names_every_target_when_nothing_was_measured(tmp_path: Path) -> None:
    rows = targets.rows(tmp_path)
    assert all(row.met is None for row in rows)
    points = [(10.0**power, 1.0) for power in (3, 4, 5, 6)]
    assert {scale._dearer("queued", points).what, scale._dearer("kept", points).what} <= {row.what for row in rows}
    assert f"0 of {len(rows)} targets are met" in targets.markdown(tmp_path)


def test_a_curve_is_judged_by_a_million_against_ten_thousand() -> None:
    judged = scale._dearer("queued", [(1e3, 99), (1e4, 10), (1e5, 11), (1e6, 12)])
    assert (judged.measured, judged.met) == ("1.20 ×", False)


def test_a_curve_is_drawn_within_its_frame() -> None:
    image = ET.fromstring(scale.svg(scale.Curve("a < b", "x", "y", [(1, 5), (10, 0), (100, 7)])))
    places = [(float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in image.findall(".//{*}circle")]
    assert len(places) == 3
    assert all(0 < x < scale.WIDTH and scale.TOP <= y <= scale.HEIGHT for x, y in places)


BEFORE = check.Row(calls=0.02, bytes=160.0, client=8.0, server=1.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"calls": 0.03}, "drain: 0.03 calls a job, not 0.02"),
        ({"calls": 0.0201}, "drain: 0.0201 calls a job, not 0.02"),
        ({"bytes": 161.0}, "drain: 161.0 bytes a job, not 160.0"),
        ({"client": 16.0}, "drain: client CPU is 16.0 times that of bare functions, not 8.0"),
        ({"server": 2.2}, "drain: server CPU is 2.2 times that of bare functions, not 1.1"),
    ],
)
def test_a_job_that_has_become_dearer_is_told(change: dict[str, float], words: str) -> None:
    now = {"drain": msgspec.structs.replace(BEFORE, **change)}
    assert check.compare(now, {"drain": BEFORE}) == [words]


def test_a_cheaper_job_and_a_noisy_minute_are_no_news() -> None:
    now = check.Row(calls=0.01, bytes=160.1, client=10.0, server=1.4)
    assert check.compare({"drain": now}, {"drain": BEFORE}) == []


def test_a_row_that_only_one_side_has_is_told() -> None:
    assert len(check.compare({"new": BEFORE}, {"old": BEFORE})) == 2


def test_the_baseline_has_a_row_for_what_is_checked() -> None:
    rows = msgspec.json.decode(check.BASELINE.read_bytes(), type=dict[str, check.Row])
    assert all(row.calls and row.bytes and row.client and row.server for row in rows.values())
