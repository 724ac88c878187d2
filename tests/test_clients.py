"""docs/compatibility.md is what was measured, of every client, and nothing fails that trains with ddp."""

from __future__ import annotations

from clients import run


def test_the_page_is_what_the_runs_have_shown() -> None:
    assert run.DOCUMENT.read_text() == run.document(run.read()), "python -m clients.run writes it"


def test_nothing_fails_with_ours_alone() -> None:
    results = run.read()
    assert run.ours_alone(results) == []
    trained = {
        client for client, ways in results["runs"].items() if all("loss" in ways.get(way, {}) for way in run.WAYS)
    }
    assert len({run.clients()[client]["project"] for client in trained}) >= 12
