"""docs/compatibility.md is what was measured, of every client, and nothing fails that trains with ddp."""

from __future__ import annotations

import re

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


def test_every_project_is_installed_in_a_version_of_ours() -> None:
    required, pinned = (
        {re.split(r"[\[=]", line)[0].lower().replace("_", "-") for line in path.read_text().splitlines()}
        for path in (run.ROOT / "clients" / "requirements.txt", run.ROOT / "clients" / "constraints.txt")
    )
    assert {about["project"] for about in run.clients().values()} <= required
    assert {line for line in required if not line.startswith("#")} <= pinned
