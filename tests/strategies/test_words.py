"""The `repr` of a strategy says what will happen."""

from __future__ import annotations

import pytest

from lightning_lowbw import (
    DGC,
    AdaptiveLocalSGDStrategy,
    Compression,
    DGCStrategy,
    HierarchicalStrategy,
    LocalSGD,
    LocalSGDStrategy,
    NarrowGradients,
    Strategy,
)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            DGCStrategy(),
            "DGCStrategy(every step, as many of the largest elements of each tensor as cost 5 % of a step, as "
            "bfloat16; topology='flat')",
        ),
        (
            DGCStrategy(budget=0.1, pretrained=True, exchange="all_gather", correction="error_feedback"),
            "DGCStrategy(every step, as many of the largest elements of each tensor as cost 10 % of a step, as "
            "bfloat16, without a warm-up, by all_gather, with error_feedback; topology='flat')",
        ),
        (
            DGCStrategy(sparsity=[0.999]),
            "DGCStrategy(every step, the 0.1 % largest elements of each tensor as bfloat16, from step 0; "
            "topology='flat')",
        ),
        (
            DGCStrategy(
                rampup_begin_step=500,
                rampup_step=1500,
                sparsity=[0.75, 0.999],
                value_dtype="int8",
                exchange="reduce_scatter",
                correction="error_feedback",
                bucket_cap_mb=5,
            ),
            "DGCStrategy(every step, the 25 %, later 0.1 % largest elements of each tensor as int8, from step 500 over "
            "1500 steps, by reduce_scatter, with error_feedback; topology='flat', "
            "bucket_cap_mb=5)",
        ),
        (
            DGCStrategy(sparsity=[0.9], exchange="dense"),
            "DGCStrategy(every step, the 10 % largest elements of each tensor as float32, from step 0, by dense; "
            "topology='flat')",
        ),
        (
            LocalSGDStrategy(),
            "LocalSGDStrategy(every 8 steps after step 1, whole parameters in float32; topology='flat')",
        ),
        (
            LocalSGDStrategy(4, begin_step=0.5, value_dtype="bfloat16", inner_momentum="reset", uneven="stop"),
            "LocalSGDStrategy(every 4 steps after 50 % of the run, whole changes in bfloat16, reset of the inner "
            "momentum; topology='flat', uneven='stop')",
        ),
        (
            LocalSGDStrategy(15, 0, outer="nesterov", num_fragments=3, delay_steps="auto", compression=Compression()),
            "LocalSGDStrategy(every 15 steps after step 0, the 1.562 % largest changes of each chunk of 4096 as int2, "
            "in 3 fragments, outer optimizer 'nesterov', hidden behind measured steps; topology='flat')",
        ),
        (
            LocalSGDStrategy(100, 0, num_fragments="auto"),
            "LocalSGDStrategy(every 100 steps after step 0, whole parameters in float32, in up to 4 fragments; "
            "topology='flat')",
        ),
        (
            LocalSGDStrategy(compression=Compression(density=0.5, chunk=None), node_k_steps=2, topology=2),
            "LocalSGDStrategy(every 8 steps after step 1, the 50 % largest changes of each tensor as int2, inside "
            "nodes every 2 steps; topology=2)",
        ),
        (
            AdaptiveLocalSGDStrategy(2, begin_step="first_lr_decay", delay_steps=1),
            "AdaptiveLocalSGDStrategy(every 2 to 16 steps after the first decay of the learning rate by rule 'fleet', "
            "whole parameters in float32, hidden behind 1 steps; topology='flat')",
        ),
        (
            HierarchicalStrategy(2, inter_dtype="bfloat16"),
            "HierarchicalStrategy(every step, whole gradients; topology=2, inter_dtype='bfloat16')",
        ),
        (
            Strategy(LocalSGD(k_steps=3), topology="auto"),
            "Strategy(every 3 steps after step 1, whole parameters in float32; topology='auto')",
        ),
        (
            Strategy(NarrowGradients("int4", rampup_begin_step=100)),
            "Strategy(every step, whole gradients as int4, from step 100; topology='flat')",
        ),
        (
            Strategy(DGC(sparsity=[0.9])),
            "Strategy(every step, the 10 % largest elements of each tensor as bfloat16, from step 0; topology='flat')",
        ),
    ],
)
def test_a_strategy_says_what_will_happen(strategy: Strategy, expected: str) -> None:
    assert repr(strategy) == expected
