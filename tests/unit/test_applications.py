"""Which application serves a queue: warnings about a namespace that two share, and nothing for a deploy."""

from __future__ import annotations

from holdfast._core.applications import Comparison, compare_applications
from holdfast._core.replies import WorkerFacts


def facts(source: str, *queues: str, signatures: str = "", app: str = "tasks:app") -> WorkerFacts:
    return {"app": app, "source": source, "queues": list(queues), "signatures": signatures}


def test_workers_of_one_application_are_not_compared_further() -> None:
    same = [facts("shop", "send", "pay", signatures="aaaaaabbbbbb"), facts("shop", "pay", signatures="bbbbbb")]
    assert compare_applications(same) == Comparison([], [])


def test_queue_that_two_applications_serve_is_a_warning() -> None:
    (warning,), versions = compare_applications([facts("/a/tasks.py", "send", "own"), facts("/b/tasks.py", "send")])
    assert warning.startswith(
        "different applications serve queue send: tasks:app (/a/tasks.py) and tasks:app (/b/tasks.py)"
    )
    assert versions == []


def test_app_of_another_name_in_the_same_project_is_another_application() -> None:
    (warning,), _ = compare_applications([facts("shop", "a", "b"), facts("shop", "a", "b", app="other:app")])
    assert "serve queue a and 1 more queue: other:app (shop) and tasks:app (shop)" in warning


def test_two_versions_of_an_application_are_information() -> None:
    warnings, (version,) = compare_applications(
        [facts("shop", "send", signatures="aaaaaa"), facts("shop", "send", signatures="bbbbbb")]
    )
    assert warnings == []
    assert "two versions of tasks:app (shop) serve queue send with different parameters" in version


def test_applications_without_a_common_queue_can_share_a_namespace() -> None:
    assert compare_applications([facts("shop", "a"), facts("bank", "b")]) == Comparison([], [])


def test_worker_compares_only_the_queues_that_it_serves() -> None:
    others = [facts("shop", "a"), facts("bank", "a")]
    assert compare_applications(others, {"b"}) == Comparison([], [])


def test_worker_of_another_release_or_without_an_app_is_left_out() -> None:
    known = facts("shop", "a", signatures="aaaaaa")
    assert compare_applications([known, {"queues": ["a"]}, facts("", "a", app="")]) == Comparison([], [])
    assert compare_applications([known, facts("shop", "a")]) == Comparison([], [])
