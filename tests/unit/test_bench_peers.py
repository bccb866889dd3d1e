"""The side-by-side benchmark: what it makes of figures, which are made up here; that it counts jobs rightly; and that
nothing it has started stays. The systems themselves are not installed here."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.peers import common, figures, plots, report, targets
from benchmarks.peers.__main__ import PAGE, chosen
from benchmarks.peers.measure import Failed, Marks, Measured, Process, Sizes, measure
from benchmarks.peers.run import write
from benchmarks.peers.systems import HERE, HOLDFAST, HOLDFAST_SQLITE, LIMIT, LIMIT_SQLITE, SYSTEMS, System
from tests.servers import Server

BY_NAME = {system.name: system for system in SYSTEMS}
OURS, SAQ, LITEQUEUE = BY_NAME[HOLDFAST], BY_NAME["saq"], BY_NAME["litequeue"]


def measured(**known: float) -> Measured:
    return Measured(figures=known, versions={"it": "1.0"}, how={"bulk": "in bulk", "jobs": 10})


def a_run() -> figures.Run:
    """Three rounds, of which the second was a slow minute for all."""
    return figures.Run(
        {"date": "today"},
        [
            {
                HOLDFAST: measured(drain_rate=2000, drain_worker_us=10),
                "saq": measured(drain_rate=200, drain_worker_us=100),
            },
            {
                HOLDFAST: measured(drain_rate=200, drain_worker_us=90),
                "saq": measured(drain_rate=10, drain_worker_us=910),
            },
            {HOLDFAST: measured(drain_rate=2400, drain_worker_us=12), "saq": Measured(failure="drain: <it> hung")},
        ],
    )


def test_a_figure_is_the_median_of_the_rounds_that_have_it() -> None:
    run = a_run()
    assert figures.spread(run, HOLDFAST, "drain_rate") == figures.Spread(2000, 200, 2400)
    assert figures.spread(run, "saq", "drain_rate") == figures.Spread(105, 10, 200)
    assert figures.spread(run, "saq", "call_p50") is None


def test_a_ratio_is_of_the_same_round_and_above_one_when_we_are_better() -> None:
    run = a_run()
    assert figures.ratio(run, SAQ, figures.DRAIN) == 15  # of 10 and 20
    assert figures.ratio(run, SAQ, figures.WORKER_CPU) == pytest.approx((10 + 910 / 90) / 2)
    assert figures.ratio(run, LITEQUEUE, figures.DRAIN) is None


def test_what_is_on_sqlite_is_compared_with_holdfast_on_sqlite() -> None:
    run = figures.Run(
        {},
        [
            {
                HOLDFAST: measured(drain_rate=9),
                HOLDFAST_SQLITE: measured(drain_rate=4),
                "litequeue": measured(drain_rate=2),
            }
        ],
    )
    assert figures.ratio(run, LITEQUEUE, figures.DRAIN) == 2


def test_server_cpu_is_that_of_both_steps_or_not_known() -> None:
    assert figures.figures(measured(bulk_server_us=5, drain_server_us=7))["server_us"] == 12
    assert "server_us" not in figures.figures(measured(bulk_server_us=5))


def test_the_report_names_every_system_what_failed_and_what_is_missing() -> None:
    text = report.markdown(a_run(), [OURS, SAQ, LITEQUEUE], PAGE)
    assert "| holdfast | 2,000 (200..2,400) | - |" in text
    assert "- saq: drain: <it> hung (1 of 3 rounds)" in text
    assert text.count("| litequeue | -") >= len(report.TABLES)
    assert "| drain, inline, against SAQ | ≥ 10 × saq | 15 × (2,000 against 105) | met |" in text
    assert "| worker CPU per job, inline, µs | ≤ 30 | 12 | met |" in text
    assert "| enqueue, one at a time | ≥ 1 × best | - | not measured |" in text


def test_the_commands_of_a_system_do_not_break_its_row() -> None:
    run = figures.Run({}, [{"saq": Measured(commands={"drain": {"get": 2.0, "client|setinfo": 0.5}, "idle": {}})}])
    assert "| saq | get 2 client\\|setinfo 0.5 | none |" in report.markdown(run, [SAQ], PAGE)


def test_a_missed_target_stays_in_the_table() -> None:
    run = figures.Run(
        {}, [{HOLDFAST: measured(call_p50=3), "saq": measured(call_p50=2), "huey": measured(call_p50=1.5)}]
    )
    rows = {row.what: row for row in targets.judged(run, [OURS, SAQ, BY_NAME["huey"]])}
    row = rows["call p50"]
    assert (row.wanted, row.measured, row.verdict) == ("≥ 1 × huey", "0.5 × (3 against 1.5)", "**missed**")


def test_the_limit_is_no_peer_and_stands_apart() -> None:
    run = figures.Run(
        {}, [{HOLDFAST: measured(drain_rate=30), LIMIT: measured(drain_rate=50), "saq": measured(drain_rate=2)}]
    )
    systems = [OURS, SAQ, BY_NAME[LIMIT]]
    rows = {row.what: row for row in targets.judged(run, systems)}
    assert rows["drain, inline, against the limit"].measured == "0.6 × (30 against 50)"
    best = targets.Target("drain", HOLDFAST, figures.DRAIN, 1, "best")
    assert targets._rival(run, systems, best) is SAQ
    text = report.markdown(run, systems, PAGE)
    tables, _, limits = text.partition("## The limits")
    assert "| limit |" not in tables
    assert "| drain, jobs/s | 50 | 30 | 0.6 × |" in limits


def test_a_run_without_peers_tells_only_the_targets_it_can_judge() -> None:
    run = figures.Run({}, [{HOLDFAST: measured(drain_rate=30)}], {"redis 7.0.15": 328.4})
    text = report.markdown(run, [OURS], PAGE)
    assert "How many times better" not in text
    assert "not measured" not in text
    assert "| redis 7.0.15 | 328 |" in text


def test_jobs_that_ran_twice_are_told() -> None:
    run = figures.Run({}, [{"saq": measured(drain_rate=1, drain_again=3)}])
    assert "- saq: up to 3 jobs ran more than once in a drain" in report.markdown(run, [SAQ], PAGE)


@pytest.mark.parametrize("known", [{}, {"drain_rate": 0.0}, {"drain_rate": 5.0}])
def test_a_plot_is_well_formed_with_few_figures_or_none(known: dict[str, float]) -> None:
    run = figures.Run({}, [{"saq": Measured(figures=known)}])
    ET.fromstring(plots.svg(run, [SAQ], figures.DRAIN, "a < b"))


def test_a_plot_has_a_bar_for_each_system_the_best_first_and_within_its_frame() -> None:
    run = figures.Run(
        {}, [{HOLDFAST: measured(drain_rate=50_000), "saq": measured(drain_rate=50), "huey": measured(drain_rate=900)}]
    )
    image = ET.fromstring(plots.svg(run, [SAQ, BY_NAME["huey"], OURS, LITEQUEUE], figures.DRAIN, "drain"))
    names = [text.text for text in image.findall(".//{*}text") if text.get("text-anchor") == "end"][1:]
    widths = [float(rect.get("width", 0)) for rect in image.findall(".//{*}rect")][1:]
    assert names == ["holdfast", "huey", "saq"]
    assert widths == sorted(widths, reverse=True)
    assert 0 < widths[-1] < widths[0] <= plots.WIDTH - plots.LEFT


def test_everything_is_written(tmp_path: Path) -> None:
    write(a_run(), [OURS, SAQ], PAGE, tmp_path)
    names = {"peers.json", "peers.md", "peers-drain.svg", "peers-worker-cpu.svg"}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_each_adapter_is_listed_and_each_listed_one_is_there() -> None:
    assert {system.adapter for system in SYSTEMS} == {file.name for file in HERE.glob("with_*.*")}
    assert len(BY_NAME) == len(SYSTEMS)


def test_each_figure_of_the_tables_is_measured_or_follows() -> None:
    code = (HERE / "measure.py").read_text()
    steps = ("enqueue_", "bulk_", "drain_")
    for table in report.TABLES:
        for metric in table.metrics:
            name = metric.name
            written = f'"{name}"' in code or (name.startswith(steps) and f'_{name.partition("_")[2]}"' in code)
            assert written or name == "server_us", name


def test_a_choice_of_systems_brings_what_they_are_compared_with() -> None:
    assert [system.name for system in chosen("taskiq,litequeue")] == [
        HOLDFAST, "taskiq, stream", "taskiq, list", HOLDFAST_SQLITE, "litequeue"
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="there are"):
        chosen("sidekiq")


MARKING = """
import os, threading
from common import mark
def some(first):
    for n in range(first, first + 1000): mark(n)
threads = [threading.Thread(target=some, args=(1000 * place,)) for place in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if os.fork() == 0:
    mark(9000)
    mark(5)
    os._exit(0)
os.wait()
mark(9001)
"""


def test_marks_of_threads_and_forked_processes_are_all_counted(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "BENCH_FOLDER": str(tmp_path)}
    subprocess.run([sys.executable, "-c", MARKING], env=environment, check=True)
    marks = Marks(tmp_path)
    assert marks.read() == 8002
    assert marks.read() == 8002
    assert set(marks.begun) == {*range(8000), 9000, 9001}
    assert marks.again == 1


def test_marks_that_are_half_written_are_left_for_later(tmp_path: Path) -> None:
    marks, file = Marks(tmp_path), tmp_path / "marks-1"
    whole = common.MARK.pack(1, 10) + common.MARK.pack(2, 20)
    file.write_bytes(whole[:-4])
    assert marks.read() == 1
    file.write_bytes(whole)
    assert marks.read() == 2


TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("SomeError: so it is", "so much for that", sep="\\n", file=sys.stderr, flush=True)
sys.stdout.write('{"child": %d}\\n' % child.pid)
sys.stdout.flush()
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    """A process that is dead, but was not waited for yet, is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_whatever_a_process_has_started_dies_with_it(tmp_path: Path) -> None:
    process = Process("client", [sys.executable, "-c", TREE], {}, tmp_path, tmp_path)
    child = process.answer()["child"]
    assert is_alive(child)
    assert process.cpu_s() > 0
    process.kill()
    assert not is_alive(child)
    assert process.last_words() == "SomeError: so it is"


def test_a_client_that_ends_fails_with_what_it_said(tmp_path: Path) -> None:
    process = Process("client", [sys.executable, "-c", "raise ValueError('no such option')"], {}, tmp_path, tmp_path)
    with pytest.raises(Failed, match="start: the client ended: ValueError: no such option"):
        process.answer()
    process.kill()


LITTLE = Sizes(enqueued=20, jobs=300, calls=5, waited=100, picked=3, idle_s=0.1)


def test_a_round_of_holdfast_itself_has_every_figure() -> None:
    """The one adapter that needs nothing installed, on a file: the others are of the same make."""
    result = measure(BY_NAME[HOLDFAST_SQLITE], None, LITTLE)
    assert result.failure == ""
    wanted = {metric.name for table in report.TABLES for metric in table.metrics}
    of_a_server = {name for name in wanted if "server" in name or "commands" in name or name == "idle_sent"}
    assert set(result.figures) >= wanted - of_a_server - {"drain_worker_us"}
    assert "drain_again" not in result.figures


@pytest.mark.parametrize("name", [LIMIT, LIMIT_SQLITE])
def test_a_round_of_a_limit_has_the_figures_that_it_is_for(name: str) -> None:
    with Server("valkey") if name == LIMIT else nullcontext() as server:
        result = measure(BY_NAME[name], server, LITTLE)
    assert result.failure == ""
    known = {metric.name for metric, _ in report.LIMITED} - {"drain_worker_us", "server_us"}
    assert set(result.figures) >= known
    assert ("idle_sent" in result.figures) == (name == LIMIT)
    assert "drain_again" not in result.figures


def test_a_system_that_cannot_start_is_told_as_failed() -> None:
    result = measure(System("broken", "with_nothing.py", (), 10, on="sqlite"), None, Sizes())
    assert result.failure.startswith("start: the client ended: ")
    assert result.figures == {}
