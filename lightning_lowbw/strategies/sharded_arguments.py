"""Arguments that `ShardedStrategy` refuses: keywords of DDP, and methods that need whole tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning_lowbw.arguments import check_flag
from lightning_lowbw.engine.method import Method, Where
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.when.every_k import AUTO
from lightning_lowbw.when.every_step import EveryStep


def refuse_keywords(unknown: Mapping[str, Any], strategy: type) -> None:
    """Raise ConfigurationError for keywords that the strategy does not have."""
    reasons = {
        "find_unused_parameters": "FSDP does not search for unused parameters and need not: they have no gradient",
        "static_graph": "the graph is DDP's, and a sharded model has no DDP",
        "gradient_as_bucket_view": "the buckets are DDP's, and a sharded model has none",
        "process_group": "the groups follow from topology",
        "data_parallel_size": "it is the ranks of a node, by topology, divided by tensor_parallel_size",
        "uneven": "the ranks of a node take each step together, so all need as many batches",
    }
    for name in unknown:
        reason = f": {reasons[name]}. Leave it out" if name in reasons else ": unknown keyword"
        own = [each for each in inspect.signature(strategy).parameters if each != "unknown"]
        raise ConfigurationError(f"{strategy.__name__}({name}=...){reason}. Allowed: {', '.join(own)}.")


def between_nodes(method: Method) -> Method:
    """Return a method for flat peers, of which each is a node.

    Raises:
        ConfigurationError: it cannot be used with shards, with the reason.
    """
    when, where = method.when, method.where
    if isinstance(when, EveryStep):
        refused = {
            "sparsity='auto'": when.is_auto
            and "it measures steps of DDP. Give the numbers, as in DGC(sparsity=[0.99], rampup_begin_step=100)",
        }
    else:
        refused = {
            "delay_steps='auto'": when.delay_steps == AUTO
            and "shards would measure different delays, and average at different steps. Give a number of steps",
            f"rule={when.rule!r}": when.rule in ("fleet", "adacomm")
            and "it follows the loss, which differs between the shards of a node. Take 'fixed' or 'qsr'",
            f"num_fragments={when.num_fragments!r}": when.has_fragments
            and "parts are balanced by bytes, which differ between shards. Leave it out",
        }
    refused |= {
        f"algorithm={where.algorithm!r}": where.algorithm not in (None, "sharded")
        and "each rank exchanges its shard with those of the other nodes. Leave it out",
        f"inter_dtype={where.inter_dtype!r}": where.inter_dtype != "float32"
        and f"there is no dense sum on two levels. Take NarrowGradients({where.inter_dtype!r})",
    }
    for given, reason in refused.items():
        if reason:
            raise ConfigurationError(f"{given} with a sharded model: {reason}.")
    return Method(when=when, what=method.what, where=Where())


def check_offload(offload_state: object, method: Method) -> None:
    """Raise ConfigurationError where what a method keeps cannot be in the host's memory, with the reason."""
    check_flag("offload_state", offload_state)
    if offload_state and not method.averages_weights:
        raise ConfigurationError(
            "offload_state=True: this method uses its state in every step, and moving that over the bus would take "
            "longer than the exchange. Leave it out, or average weights: LocalSGD(k_steps=...)."
        )
