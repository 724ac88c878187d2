"""Keyword arguments for DDP."""

from __future__ import annotations

from lightning_lowbw import DGCStrategy


def test_keywords_of_ddp_go_through() -> None:
    strategy = DGCStrategy(find_unused_parameters=True, bucket_cap_mb=5, process_group_backend="gloo")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 5}
    assert strategy.process_group_backend == "gloo"
