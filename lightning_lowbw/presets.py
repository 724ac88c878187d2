"""The named methods, as cells of when x what x where. No other module depends on the names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning_lowbw.arguments import arguments_of, from_mapping, shows, sorted_into
from lightning_lowbw.comm.topology import Algorithm, TopologyChoice, Where
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.low_rank import LowRank
from lightning_lowbw.payloads.payload import Payload
from lightning_lowbw.payloads.quantized import Quantized
from lightning_lowbw.payloads.top_k import TopK
from lightning_lowbw.payloads.whole import Whole
from lightning_lowbw.schedules.every_k import AUTO, EveryK, Rule
from lightning_lowbw.schedules.every_step import EveryStep

# As in the paper and in PaddlePaddle Fleet: 99.9 % is kept back.
DGC_SPARSITY = (0.999,)
SPARSE_LOCO: dict[str, Any] = {
    "density": 1 / 64,
    "chunk": 4096,
    "value_dtype": "int2",
    "min_numel": 4096,
    "decay": 0.95,
    "mean_over": "senders",
}


def Compression(**changes: Any) -> TopK:
    """Return SparseLoCo's payload: the 64 largest of each 4096 elements in two bits, with a decay of 0.95.

    Args:
        **changes: arguments of `TopK`.

    Raises:
        ConfigurationError: an argument is unknown, or out of range.
    """
    return from_mapping(TopK, {**SPARSE_LOCO, **changes}, "compression")


@shows(arguments_of(EveryStep, TopK))
def DGC(*, topology: TopologyChoice = "flat", **knobs: Any) -> Method:
    """Return deep gradient compression: every step, the k largest elements of each tensor.

    `sparsity` is 99.9 % by default, not "auto" as in `DGCStrategy`, because in plain loops the length of the run is not
    known. `Strategy(DGC(sparsity="auto"))` has the method of `DGCStrategy()`.

    Args:
        topology: as of `Where`.
        **knobs: fields of `EveryStep` and `TopK`.

    Raises:
        ConfigurationError: a knob is unknown or out of range, or the payload's own density is given beside stairs.

    Examples:
        >>> DGC(sparsity=[0.75, 0.999], rampup_step=100).when.density(50)
        0.0010000000000000009
    """
    if "density" not in knobs:  # one stair; with a density there are no stairs
        knobs = {"sparsity": DGC_SPARSITY, **knobs}
    elif "sparsity" in knobs:
        raise ConfigurationError(
            f"sparsity={knobs['sparsity']!r} and density={knobs['density']!r}: both say how much is sent; give one."
        )
    when, what = sorted_into("DGC", knobs, EveryStep, TopK)
    return Method(when=EveryStep(**when), what=TopK(**what), where=Where(topology=topology, algorithm="sharded"))


@shows(arguments_of(EveryK))
def LocalSGD(
    k_steps: int = 8,
    begin_step: int | float = 1,
    *,
    compression: Mapping[str, Any] | TopK | str | None = None,  # in this order LightningCLI tries them
    topology: TopologyChoice = "flat",
    **knobs: Any,
) -> Method:
    """Return local SGD: every k steps, the weights.

    Args:
        k_steps: local steps between two averages.
        begin_step: synchronous steps before the first local one.
        compression: None; "bfloat16", "float16", "int8" or "int4": send the change of the parameters since the last
            average in few bits, with error feedback. Or a `TopK`, or a mapping of the fields that differ from
            SparseLoCo's: send only the largest elements of the change (SparseLoCo).
        topology: as of `Where`.
        **knobs: the other fields of `EveryK`.

    Raises:
        ConfigurationError: a knob is unknown or out of range, or two cannot be combined.
    """
    (others,) = sorted_into("LocalSGD", knobs, EveryK)  # names an unknown knob; `EveryK` checks their values
    what: Payload
    if isinstance(compression, str):
        what = Quantized(value_dtype=compression)
    elif isinstance(compression, Mapping):
        what = from_mapping(TopK, {**SPARSE_LOCO, **compression}, "compression")
    else:
        what = Whole() if compression is None else compression
    when = EveryK(k_steps=k_steps, begin_step=begin_step, **others)
    return Method(when=when, what=what, where=Where(topology=topology))


@shows({name: parameter for name, parameter in arguments_of(LocalSGD).items() if name != "k_steps"})
def AdaptiveLocalSGD(
    init_k_steps: int = 1,
    max_k_steps: int = 16,
    begin_step: int | float = 1,
    *,
    rule: Rule = "fleet",
    **knobs: Any,
) -> Method:
    """Return local SGD whose period k follows the learning rate and the loss.

    Args:
        init_k_steps: the first k.
        max_k_steps: the largest k.
        begin_step: synchronous steps before the first local one.
        rule: "fleet", "adacomm" or "qsr".
        **knobs: of `LocalSGD`.

    Raises:
        ConfigurationError: as `LocalSGD`.
    """
    if "k_steps" in knobs:  # LocalSGD would accept it, but here the first k has another name
        raise ConfigurationError(f"k_steps={knobs['k_steps']!r}: the first k is init_k_steps here.")
    return LocalSGD(init_k_steps, begin_step, max_k_steps=max_k_steps, rule=rule, **knobs)


def Hierarchical(
    topology: TopologyChoice = "auto", algorithm: Algorithm | None = None, *, inter_dtype: str = "float32"
) -> Method:
    """Return DDP on two levels: every step, whole gradients; each node sends its gradient once.

    Args:
        topology: as of `Where`.
        algorithm: as of `Where`.
        inter_dtype: as of `Where`.

    Raises:
        ConfigurationError: a value is out of range.
    """
    return Method(where=Where(topology=topology, algorithm=algorithm, inter_dtype=inter_dtype))


def QuantizedGradients(
    value_dtype: str = "int8", *, rampup_begin_step: int = 0, topology: TopologyChoice = "flat"
) -> Method:
    """Return DDP in few bits per value: every step, whole gradients, with error feedback.

    Args:
        value_dtype: "int8", "int4", "bfloat16" or "float16".
        rampup_begin_step: steps that send float32 first, as DDP.
        topology: as of `Where`.

    Raises:
        ConfigurationError: a value is out of range.

    Examples:
        >>> QuantizedGradients("int4").what
        Quantized(value_dtype='int4')
    """
    when = EveryStep(rampup_begin_step=rampup_begin_step)
    return Method(when=when, what=Quantized(value_dtype=value_dtype), where=Where(topology=topology))


def PowerSGD(rank: int = 2, *, start_step: int = 0, topology: TopologyChoice = "flat") -> Method:
    """Return PowerSGD: every step, each matrix as the product of two thin ones, with error feedback.

    Args:
        rank: columns of the factors.
        start_step: steps that send float32 first, as DDP.
        topology: as of `Where`.

    Raises:
        ConfigurationError: a value is out of range.
    """
    return Method(when=EveryStep(rampup_begin_step=start_step), what=LowRank(rank=rank), where=Where(topology=topology))


DILOCO: dict[str, Any] = {"k_steps": 100, "begin_step": 0, "outer": "nesterov"}
# The names for `Trainer(strategy=...)`: the preset of each, and the arguments that differ from its defaults.
PRESETS: dict[str, partial[Method]] = {
    "dgc": partial(DGC, sparsity="auto"),
    "bfloat16": partial(Hierarchical, topology="flat", inter_dtype="bfloat16"),
    "float16": partial(QuantizedGradients, value_dtype="float16"),
    "int8": partial(QuantizedGradients, value_dtype="int8"),
    "int4": partial(QuantizedGradients, value_dtype="int4"),
    "powersgd": partial(PowerSGD),
    "local_sgd": partial(LocalSGD),
    "post_local_sgd": partial(LocalSGD, begin_step=0.5),
    "adaptive_local_sgd": partial(AdaptiveLocalSGD),
    "diloco": partial(LocalSGD, **DILOCO),
    # The next two are chosen by benchmarks/results/steps_to_loss.md for few replicas; the paper, for many: 100 steps.
    "hidden_local_sgd": partial(LocalSGD, **{**DILOCO, "k_steps": 8}, delay_steps=7),
    "streaming_diloco": partial(LocalSGD, **{**DILOCO, "k_steps": 16}, num_fragments=AUTO, delay_steps=15),
    # The authors' values for one worker, up to 15B parameters, with `MuonAdamW` as the inner optimizer.
    "muloco": partial(LocalSGD, **{**DILOCO, "k_steps": 30}),
    "sparse_loco": partial(LocalSGD, k_steps=15, begin_step=0, compression=Compression()),
    "hierarchical": partial(Hierarchical),
}


def preset(name: str) -> Method:
    """Return the method that a name stands for.

    Raises:
        ConfigurationError: no method has this name.

    Examples:
        >>> preset("diloco").when.outer
        'nesterov'
    """
    if name not in PRESETS:
        raise ConfigurationError(f"method {name!r}: choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]()
