"""A method is when x what x where, as one value: printed, compared (also between ranks), and written in YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.arguments import from_mapping, sorted_into
from lightning_lowbw.comm.agreement import agree
from lightning_lowbw.comm.peers import Peers, make_peers
from lightning_lowbw.comm.topology import TopologyChoice, Where
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.payloads.payload import PAYLOADS, Payload
from lightning_lowbw.payloads.whole import Whole
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.schedules.schedule import SCHEDULES, Schedule
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.plain_loop import attach, check_beginning
from lightning_lowbw.sync.synchronizer import Synchronizer


@dataclass(frozen=True, kw_only=True)
class Method:
    """A schedule (when), a payload (what) and a topology (where).

    Args:
        when: `EveryStep` (gradients, before the optimizer's step) or `EveryK` (weights, after k steps). Each of the
            three may be a mapping, as `describe` returns it.
        what: `Whole`, `Quantized` (few bits per value), `TopK` (the largest elements) or `LowRank`.
        where: `Where`, or its topology.

    Raises:
        ConfigurationError: the three cannot be combined, with the reason.

    Examples:
        >>> from lightning_lowbw import TopK
        >>> method = Method(when=EveryStep(), what=TopK(density=0.01))
        >>> Method(**method.describe()) == method
        True
    """

    when: Schedule = EveryStep()  # noqa: RUF009 - frozen
    what: Payload = Whole()  # noqa: RUF009 - frozen
    where: Where = Where()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        object.__setattr__(self, "when", _value(self.when, "every", Schedule, SCHEDULES, "when"))
        object.__setattr__(self, "what", _value(self.what, "payload", Payload, PAYLOADS, "what"))
        where: Any = self.where
        if isinstance(where, Mapping):
            where = from_mapping(Where, where, "where")
        object.__setattr__(self, "where", where if isinstance(where, Where) else Where(topology=where))
        # Each value has checked itself; this checks the combination.
        self._check_where()
        self.what.check(self.when)

    def _check_where(self) -> None:
        where = self.where
        narrow = f"inter_dtype={where.inter_dtype!r}" if where.inter_dtype != "float32" else ""
        algorithm = f"algorithm={where.algorithm!r}"
        is_leader, is_flat = where.algorithm == "leader", where.algorithm == "flat"
        if is_leader and where.is_flat:
            raise ConfigurationError(
                f"{algorithm} with topology={where.topology!r}: it is about what nodes of several ranks send to each "
                "other. Leave it out, or give a topology such as 'auto'."
            )
        if is_leader and not self.what.sends_all:
            raise ConfigurationError(
                f"{algorithm} with {self.what}: only the first rank of each node would exchange something, and this "
                "payload needs every rank of a node, each for its part. Take algorithm='sharded', or what=Whole()."
            )
        if self.when.averages_weights and (is_flat or narrow):
            raise ConfigurationError(
                f"{narrow or algorithm} every k steps: it is for sums of gradients in every step, and weights are "
                "averaged here. Leave it out. (what=Quantized(value_dtype='bfloat16') averages in few bits.)"
            )
        if narrow and not (self.what.sends_all or self.when.begin_step or self.when.is_auto):
            raise ConfigurationError(
                f"{narrow} with {self.what}, from step 0: it is about dense steps, and there are none. Leave it "
                "out, or give rampup_begin_step > 0."
            )

    @property
    def acts_alone(self) -> bool:
        """Whether the method changes the training of a single rank: by outer steps, if it averages whole weights."""
        return self.when.outer != "none" and self.what.sends_all

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients, or their means in a node, are ever exchanged: in synchronous steps, or inside nodes."""
        is_synchronous = not self.when.averages_weights or self.when.begin_step != 0 or self.when.is_always_synchronous
        return is_synchronous or self.where.topology != "flat"

    @property
    def compresses_gradients(self) -> bool:
        """Whether the largest elements of gradients are sent, after a warm-up of stairs of sparsity."""
        return self.what.takes_density and not self.when.averages_weights

    @property
    def kind(self) -> str:
        """The kind of state that a worker keeps: "replicas", "gradients" or, if nothing is kept back, "whole"."""
        if self.when.averages_weights:
            return "replicas"
        return "whole" if self.what.sends_all else "gradients"

    def describe(self) -> dict[str, Any]:
        """Return plain values from which the method can be made again: ``Method(**method.describe())``."""
        # Plain lists and numbers: this is what a YAML file has, and what the ranks compare.
        when = {"every": self.when.key, **asdict(self.when)}
        what = {"payload": self.what.key, **asdict(self.what)}
        topology = self.where.topology
        where = {**asdict(self.where), "topology": getattr(topology, "nodes", topology)}
        return {"when": when, "what": what, "where": where}

    def settings(self) -> dict[str, object]:
        """Return `describe` with one level of names, to be compared between ranks."""
        return {f"{axis}.{name}": value for axis, values in self.describe().items() for name, value in values.items()}

    def at(self, topology: TopologyChoice | None) -> Method:
        """Return the method with another topology; None leaves it."""
        return self if topology is None else replace(self, where=replace(self.where, topology=topology))

    def replace(self, **knobs: Any) -> Method:
        """Return the method with other values of some fields of its schedule and its payload.

        Raises:
            ConfigurationError: neither has such a field, or a value is out of range.

        Examples:
            >>> from lightning_lowbw import TopK
            >>> Method(what=TopK()).replace(rampup_begin_step=10, density=0.01).when.density(10, 0.01)
            0.01
        """
        when, what = sorted_into("The method", knobs, type(self.when), type(self.what))
        return replace(self, when=replace(self.when, **when), what=replace(self.what, **what))

    def make_peers(self, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> Peers:
        """Return the peers of this rank.

        Collective: all ranks.

        Args:
            process_group: the group of flat peers; None is the world.
            **kwargs: arguments of `comm.peers.make_peers`.
        """
        return make_peers(self.where, process_group, **kwargs)

    def make_synchronizer(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        peers: Peers,
        named_buffers: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> Synchronizer:
        """Return this rank's worker for an optimizer, which is called for each step; see `Synchronizer`.

        Raises:
            ConfigurationError: the optimizer or the peers cannot be used.
        """
        if self.when.averages_weights:
            return LocalSync(self, optimizer, named_parameters, peers, named_buffers)
        return GradientSync(self, optimizer, named_parameters, peers)

    def attach(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        topology: TopologyChoice | None = None,
        process_group: dist.ProcessGroup | None = None,
        named_buffers: Mapping[str, Tensor] | None = None,
    ) -> Synchronizer:
        """Return this rank's worker for an optimizer of a plain loop, in which `optimizer.step()` does the rest.

        After the last step of a method that averages weights all ranks must call `worker.finish()`. If they do not, and
        the last average is some steps ago, rank 0 logs a warning when the program ends.

        Collective: all ranks.

        Args:
            optimizer: any torch optimizer except LBFGS.
            named_parameters: the parameters of the whole model, not wrapped in `DistributedDataParallel`; the state and
                the patterns of `exclude` use their names.
            topology: replaces the method's own topology.
            process_group: the group of flat peers; None is the world.
            named_buffers: for `EveryK`: to be averaged with this optimizer's parameters; a batch norm's
                ``X.running_var`` belongs to its ``X.running_mean``. A tensor that the module puts in place of another
                is put into this mapping, too. Other methods leave each rank its own buffers.

        Raises:
            ConfigurationError: the optimizer cannot be used, the names are of another model, a pattern of `exclude`
                matches no parameter, the topology does not fit the world, or the model is in
                `DistributedDataParallel`; where it is wrapped later, the first step raises.
            DisagreementError: on all ranks; their methods, optimizers, these optimizers' parameters or the buffers
                differ. Weights that differ, or the states of the optimizers, are reported at the first step.
        """
        check_beginning(self.when)
        method, buffers = self.at(topology), named_buffers or {}
        agree("method", method.settings(), process_group)  # the messages of different methods have different sizes
        peers = method.make_peers(process_group, is_hidden=method.when.delay_steps > 0)
        make = partial(method.make_synchronizer, optimizer, peers=peers, named_buffers=partial(dict, buffers))
        return attach(make, optimizer, named_parameters, process_group)


def as_method(method: Method | Mapping[str, Any], topology: TopologyChoice | None = None) -> Method:
    """Return the user's method as a value, with another topology unless that is None.

    Raises:
        ConfigurationError: the value is no method, or an argument is unknown or out of range.
    """
    if isinstance(method, Mapping):
        method = from_mapping(Method, method, "method")
    if not isinstance(method, Method):
        raise ConfigurationError(
            f"method={method!r}: give a Method, such as DGC(...) or LocalSGD(...), or a mapping of when, what, where."
        )
    return method.at(topology)


def _value(given: Any, key: str, base: type, kinds: Mapping[str, type], axis: str) -> Any:
    """Return the value that a mapping with the kind under `key` describes; a value of one of the kinds unchanged."""
    if isinstance(given, Mapping):
        kind = str(given.get(key))
        if kind not in kinds:
            raise ConfigurationError(f"{axis}: {key}={kind!r}: choose one of {', '.join(sorted(kinds))}.")
        return from_mapping(kinds[kind], {name: each for name, each in given.items() if name != key}, axis)
    if not isinstance(given, base):
        allowed = ", ".join(kind.__name__ for _, kind in sorted(kinds.items()))
        raise ConfigurationError(f"{axis}={given!r}: give one of {allowed}, or a mapping with {key!r}.")
    return given
