"""Whatever a public constructor is given: it runs, or an error says what is allowed."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lightning_lowbw as lowbw
from lightning_lowbw import ConfigurationError, Method, ShardedStrategy, Strategy, Topology
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS

CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(lowbw, name) for name in lowbw.__all__ if name[0].isupper() and not name.endswith("Error")},
    "Topology.blocks": Topology.blocks,
}
del CONSTRUCTORS["MuonAdamW"]  # an optimizer: of a module, and with torch's own arguments
# Objects of Lightning and torch: what they are is told where they are used.
OBJECTS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
OBJECTS |= {"process_group", "process_group_backend", "bucket_cap_mb_list"}
SAYS = re.compile(r"give|[Cc]hoose|[Ll]eave|take|[Aa]llowed|each rank from 0 on|use |Use |set ")
MISNAMED = re.compile(r"unexpected keyword argument 'nonsense'|missing \d required")  # Python's own TypeError

NAMES = ["auto", "flat", "int8", "int4", "bfloat16", "float32", "exact", "stop", "nesterov", "slowmo", "average"]
NAMES += ["fleet", "qsr", "leader", "senders", "all_gather", "0.9", "", "nan"]
numbers = st.integers(-2, 9) | st.sampled_from([10**9, 10**400, -(10**400)]) | st.floats(allow_nan=True)
plain = st.none() | st.booleans() | numbers | st.fractions(0, 1).map(float) | st.sampled_from(NAMES)
others = st.binary(max_size=2) | st.just(object()) | st.sets(st.floats(0, 0.9), max_size=2)
values = st.recursive(
    plain | others,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.integers(0, 2), each, max_size=2)
    ),
    max_leaves=4,
)
keys = st.sampled_from(["every", "payload", "k_steps", "density", "chunk", "topology"])
mappings = st.dictionaries(keys, plain, max_size=3)
every = {"every": st.sampled_from(["step", "k", "x"])}
kinds = st.fixed_dictionaries(every, optional={"k_steps": values, "schedule": values})


def quickly(max_examples: int) -> Any:
    """Return the settings: the same examples in every run, and few, because all of them take seconds together."""
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    options = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": slow}
    return settings(max_examples=max_examples, **options)


def arguments_of(constructor: Callable[..., Any]) -> list[str]:
    names = [name for name in inspect.signature(constructor).parameters if name not in OBJECTS]
    return [name for name in names if name not in DDP_KEYWORDS or name in ("timeout", "bucket_cap_mb", "static_graph")]


def use(built: Any) -> None:
    """Do with a value what is done before a training begins."""
    assert repr(built)
    if isinstance(built, (Strategy, ShardedStrategy)):
        built = built.method
    if isinstance(built, Method):
        assert Method(**built.describe()) == built
        built = built.when
    if isinstance(built, EveryStep):
        assert all(0 < built.density(step) <= 1 for step in (0, 1, 10**6))


@pytest.mark.parametrize("name", CONSTRUCTORS)
@quickly(15)
@given(data=st.data())
def test_it_runs_or_says_what_is_allowed(name: str, data: st.DataObject) -> None:
    constructor = CONSTRUCTORS[name]
    names = arguments_of(constructor)
    some = st.sampled_from([*names, "nonsense"])
    given_values = data.draw(st.dictionaries(some, values | mappings | kinds, max_size=3))
    needs_method = name in ("Strategy", "ShardedStrategy", "ElasticStrategy")
    if needs_method and (data.draw(st.booleans()) or "method" not in given_values):
        given_values["method"] = lowbw.LocalSGD(begin_step=0)
    try:
        built = constructor(**given_values)
    except (ConfigurationError, TypeError) as caught:
        error = caught
    else:
        assert "nonsense" not in given_values
        use(built)
        return
    says = SAYS if isinstance(error, ConfigurationError) else MISNAMED
    assert says.search(str(error)), f"{given_values}: {error}"


def test_a_timeout_is_a_number_of_seconds() -> None:
    for timeout in (0, -1, math.nan, math.inf, 1e300, "20", True, [20]):
        with pytest.raises(ConfigurationError, match="give the seconds that a collective may take"):
            lowbw.DGCStrategy(timeout=timeout)
    assert lowbw.DGCStrategy(timeout=20)._timeout.total_seconds() == 20
