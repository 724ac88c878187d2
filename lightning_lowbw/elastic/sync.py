"""Local SGD whose members come, go and are slow: a round averages the members that are there, weighted by their tokens.

A round of one member, after its local steps:

    heal        a member that is behind takes the state of a member that is not, and moves its own work there:
                w = new anchor + (w - old anchor);  meanwhile the other members train and have rounds
    quorum      the members of the round, with a row of each: its tokens, steps and anchor; all members compute the
                weights of the mean from these. A member with other settings than the members that train is refused
    exchange    the changes of the weights, as in `sync.local`; a member is one participant
    commit      or nothing has happened: the residuals are as before, and the round is repeated
    apply       anchor = outer(anchor, mean);  w = anchor, plus the work that has not been averaged

With `delay_steps`, a thread runs quorum and exchange during the next local steps, whose changes are kept:
w = anchor + (w - w at the begin). A hidden round that fails is repeated without the thread.

If an exchange fails here, another member may still have applied it. If a member takes the state of another member after
that, it drops the work of the round, its tokens and its residuals, because it does not know whether these have been
counted. A member that starts from a checkpoint does so, too. All other members keep their work.

Shared by all members, and taken by a member that is behind: the anchor (`start`), the outer velocity, averaged buffers,
the numbers of rounds and steps, tokens seen, and the round in which each member was last averaged. Everything else
belongs to one member.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.collectives import Collectives, broadcast_flat_
from lightning_lowbw.elastic.membership import GivesUp, Quorum, Row, Settings, digest_of, run_of
from lightning_lowbw.elastic.peers import Members
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import CPU, as_real, checksum, copy_all_, order_of
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.sync.fragments import Average, Sums, average_status
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.replica import Replica
from lightning_lowbw.sync.state import Named, on_cpu
from lightning_lowbw.sync.status import SAVE, STOP, Status, any_of

_logger = logging.getLogger(LOGGER)
ANCHORS = 1 << 32  # checksums are compared modulo this
CHUNK = 1 << 18  # elements of a checksum at a time, the same on all devices: the result depends on it
EARLY_S = 0.5  # a member that has joined asks for its first quorum so long before the other members
END_S = 0.2  # between two last quorums
SETTLE_S = 10.0  # limit for a hidden round before a save or a validation
EQUAL = ("run", "num_averages", "tokens_seen", "contributed")  # attributes that are the same on all members


# A round --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of this member with which a round was begun.

    Attributes:
        step: completed optimizer steps.
        steps: steps of the round.
        tokens: tokens of these steps.
        lr: largest learning rate.
        residuals: residuals before the exchange.
        prepared: arguments of `Replica.send_average`.
    """

    step: int
    steps: int
    tokens: float
    lr: float
    residuals: Mapping[str, Tensor]
    prepared: tuple[Average, Named, Named]


class Round:
    """The communication of one member in a round, up to the commit: in a step, or in a thread beside local steps.

    Args:
        replica: the replica of this member.
        members: the processes of all members.

    Attributes:
        hidden: the work of the round in the thread; None if there is no such round.
    """

    def __init__(self, replica: Replica, members: Members) -> None:
        self._replica, self._members = replica, members
        self.hidden: Work | None = None
        self._result = Future[tuple[Quorum | None, Average | None]]()

    def ask(self, row: Row, settings: Settings, gives_up: GivesUp) -> Quorum | None:
        """Wait for a quorum, with a row that lacks the checksum of the anchor, which takes a pass over memory."""
        anchor = int(checksum(self._replica.start.values(), at_a_time=CHUNK)) % ANCHORS
        return self._members.membership.quorum(row._replace(anchor=float(anchor)), settings, gives_up)

    def exchange(self, quorum: Quorum, work: Work) -> Average | None:
        """Exchange the work of a round; if no member has any work, only wait for the members, and return None."""
        self._members.begin(quorum)
        if not quorum.weights:
            self._members.between.begin_all_gather(torch.zeros(1))
            return None
        # The rows have told everything but the learning rate.
        status = average_status(Sums(lr=work.lr), None, 0.0, 0, self._members, self._replica.params.device)
        return self._replica.send_average(*work.prepared, status)

    def hide(self, work: Work, row: Row, settings: Settings, gives_up: GivesUp) -> None:
        """Begin a round in a thread, with the weights as they are now."""
        self.hidden, self._result = work, Future()
        self._members.between.is_hidden = True

        def run() -> None:
            try:
                with torch.no_grad(), torch.cuda.device_of(torch.empty(0, device=self._replica.params.device)):
                    quorum = self.ask(row, settings, gives_up)
                    average = None if quorum is None or quorum.healed is not None else self.exchange(quorum, work)
                    self._result.set_result((quorum, average))
            except BaseException as error:  # noqa: BLE001 - raised by the wait for the round
                self._result.set_exception(error)

        threading.Thread(target=run, name="lowbw-round", daemon=True).start()

    def wait(self) -> tuple[Quorum | None, Average | None]:
        """Wait for the round in the thread, which is no longer hidden."""
        self.hidden = None
        with self._members.ledger.waiting(CPU):
            found = self._result.result()
        self._members.between.is_hidden = False
        return found


# The state of one member: functions of its replica --------------------------------------------------------------------


def tensors_of(replica: Replica) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are averaged, and their anchors."""
    buffers = replica.buffers.now()
    now = [*(p.detach() for p in replica.start), *(buffers[name] for name in replica.buffers.start)]
    return list(map(as_real, now)), [*replica.start.values(), *replica.buffers.start.values()]


def set_work_(replica: Replica, work: Sequence[Tensor] | None) -> None:
    """Set the weights to the anchor plus the work that has not been averaged; None: to the anchor."""
    now, anchors = tensors_of(replica)
    copy_all_(now, anchors if work is None else list(torch._foreach_add(anchors, list(work))))
    (fragment,) = replica.fragments
    fragment.moved = {} if work is None else dict.fromkeys(replica.start)


def set_residuals_(replica: Replica, residuals: Mapping[str, Tensor]) -> None:
    """Set the residuals; a residual that is not given becomes zero."""
    for name, residual in replica.residuals.items():
        residual.copy_(residuals[name]) if name in residuals else residual.zero_()


def settings_of(replica: Replica) -> dict[str, str]:
    """Return the form of the tensors that are averaged, which is the same on all members, by name."""
    settings = {}
    for p in replica.start:
        # Averages send elements in the order of memory, which channels_last changes.
        in_memory = "" if order_of(p) == tuple(range(p.dim())) else f", dimensions in memory {[*order_of(p)]}"
        settings[f"parameter {replica.params.name_of(p)}"] = f"{p.dtype} of shape {[*p.shape]}{in_memory}"
    floating = ((name, t) for name, t in replica.buffers.now().items() if name in replica.buffers.start)
    return settings | {f"buffer {name}": f"{t.dtype} of shape {[*t.shape]}" for name, t in floating}


def shared_tensors(replica: Replica) -> Named:
    """Return the tensors of the anchor, which are the same on all members, in one order."""
    name_of = replica.params.name_of
    return {
        **{f"start/{name_of(p)}": start for p, start in replica.start.items()},
        **{f"velocity/{name_of(p)}": velocity for p, velocity in replica.velocity.items()},
        **{f"buffers/{name}": start for name, start in replica.buffers.start.items()},
    }


def take_anchor_(replica: Replica, tensors: Mapping[str, Tensor], velocity: Iterable[str], node: Collectives) -> None:
    """Take the anchor of another member.

    Collective: the processes of the group.

    Args:
        replica: the replica of this member.
        tensors: the other member's `shared_tensors`; empty on all processes of the group but the first one.
        velocity: names of the parameters that have an outer velocity there.
        node: the processes of the group.
    """
    starts = {replica.params.name_of(p): (p, start) for p, start in replica.start.items()}
    replica.velocity = {p: torch.empty_like(start) for p, start in map(starts.__getitem__, velocity)}
    for key, tensor in shared_tensors(replica).items():
        if tensors:
            tensor.copy_(tensors[key])
        if node.num_ranks > 1:
            broadcast_flat_([tensor], node.broadcast_)


# One member -----------------------------------------------------------------------------------------------------------


class ElasticSync(LocalSync):
    """The replica of one group, whose averages are rounds; see `LocalSync` for a step.

    It overrides `_average_due` and `finish`, and adds values to the state.

    Args:
        method: `EveryK` with `Whole` or `TopK`; see `check_elastic`.
        members: the processes of all members.
        named_buffers: returns the buffers by name; floating ones are averaged, the other ones belong to each member.
        round_s: seconds after which a round ends, instead of the method's `k_steps`.

    Attributes:
        tokens: tokens of the local steps that have not been averaged; the caller adds the tokens of each batch, or
            a step counts 1.
        tokens_seen: tokens of all members, averaged so far.
        contributed: the round in which each member was last averaged, by name.
        last_step: step at which the training ends, for all members with the same round; infinity: never.
        settings: more values that have to be the same on all members, by name.
        share: returns more state for a member that is behind: plain values and tensors.
        healed: the result of another member's `share`, which the caller is to apply; None if there is nothing.
        should_stop: returns whether this process is asked to stop; then it does not wait for a quorum.
        max_wait_s: limit for the wait for other groups, after the first round.
        run: the training to which the rounds belong; before the first round, the training that it would begin.
        num_skipped: steps that the last round has added to `step`: taken by the fastest member and not by this one.
    """

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        members: Members,
        named_buffers: Callable[[], Mapping[str, Tensor]] = dict,
        *,
        round_s: float | None = None,
    ) -> None:
        check_elastic(method)
        super().__init__(method, optimizer, named_parameters, members, named_buffers)
        if self._when.delay_steps and members.num_local_ranks > 1:
            raise ConfigurationError(
                f"{method}, in a group of {members.num_local_ranks} processes: a round is hidden in groups of one "
                "process. Leave out delay_steps, or start each process as a group of its own."
            )
        self.members, self.membership = members, members.membership
        self.round = Round(self.replica, members)
        (self._all,) = self.fragments
        self.tokens = self.tokens_seen = 0.0
        self.contributed: dict[str, int] = {}
        self.last_step = math.inf
        self.settings: Mapping[str, object] = {}
        self.share: Callable[[], Mapping[str, Any]] = dict
        self._others: Mapping[str, Any] = {}  # the last result of `share`
        self.healed: Mapping[str, Any] | None = None
        self.num_skipped = 0
        self.should_stop: Callable[[], bool] = lambda: False
        self.run = uuid.uuid4().hex[:12]
        self._is_new = True  # whether it has been in no round yet
        # Whether other members may have counted the work already: after a failed exchange, or in a checkpoint.
        self._is_unsure = True
        self._last_batch = 0  # the batch of the last step
        self.round_s, self.max_wait_s = round_s, math.inf
        self._ends_s = math.inf  # when the round ends, unless it ends after steps
        self._late_s = math.inf  # when this member stops to wait for other groups
        self._batch_s = math.inf  # when the last batch began
        self._step_s = self._longest_s = 0.0  # time of the last step, and of the longest

    # Steps ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def join(self) -> None:
        """Take the state of a member that trains and go on in the middle of its round; else have a round without steps.

        Collective: all members, at the end of their rounds; if no member has taken a step, nothing is averaged. If a
        member trains: nothing; the member sends its state in a thread.
        """
        self.begin()
        self.healed, self.num_skipped = None, 0
        self._offer()
        self._wait_from_now()
        shared = self.membership.state_of_others(*self._row_and_settings(), self._gives_up)
        if shared is not None:
            self._heal(shared)
        if not self.is_complete and (shared is None or self._is_over()):
            self._take_round()

    def begin_batch(self) -> None:
        """Note that a batch begins, of the training or a validation: this group does not hang."""
        self._batch_s = time.monotonic()
        self.membership.note(self._longest_s)

    @torch.no_grad()
    def _average_due(self) -> None:
        if self.batch and self.batch == self._last_batch:
            raise ConfigurationError(
                f"Step {self.step} is the second one in batch {self.batch}: all groups end with the same step, which "
                "may be the first of a batch. Take one optimizer step for each batch."
            )
        self._last_batch = self.batch
        self._step_s = max(0.0, time.monotonic() - self._batch_s)
        self._longest_s = max(self._longest_s, self._step_s)
        self.membership.note(self._longest_s)
        self.healed, self.num_skipped, self.has_communicated = None, 0, False
        self._wait_from_now()
        is_due = self.round.hidden is not None and (self._steps >= self._when.delay_steps or self._is_over())
        if is_due and not self._take_round():
            return  # the other groups have not come
        if not self.is_complete and self._is_over():
            self.tokens = self.tokens or float(self._steps)  # if the caller counts none
            if self._when.delay_steps and self.step < self.last_step:
                self._restart_if_not_finite()
                row, settings = self._row_and_settings()
                self.round.hide(self._begin(), row, settings, self._gives_up)
                self._begin_clock()
                self.has_communicated = True
            else:
                self._take_round()

    @torch.no_grad()
    def end(self, grace_s: float) -> None:
        """Take part in last quorums, so that members that have missed the last round can take the state.

        This ends after `grace_s`, or when all members that were ever averaged have come.
        """
        self.settle()
        ends_s = time.monotonic() + grace_s
        while self.is_complete and not self._any_in_node(time.monotonic() >= ends_s)[0]:
            quorum = self._ask(lambda: time.monotonic() >= ends_s)
            if quorum is None or (self._try_round(quorum) and self.contributed.keys() <= {*quorum.members}):
                return
            time.sleep(END_S)

    @property
    def _steps(self) -> int:
        return self._all.steps or 0

    @property
    def is_complete(self) -> bool:
        """Whether the last step has been averaged."""
        return self.step >= self.last_step and not self._steps and self.round.hidden is None

    def _is_over(self) -> bool:
        """Return whether the round ends with this step; the same on all processes of the group."""
        is_over = self.step >= self.last_step or (self.round_s is None and self._steps >= self.plan.k_steps)
        if self._ends_s == math.inf:
            return is_over
        return self._any_in_node(is_over or time.monotonic() >= self._ends_s)[0]

    def _begin_clock(self) -> None:
        self._ends_s = math.inf if self.round_s is None else time.monotonic() + self.round_s

    @property
    def _left_s(self) -> float:
        """Return how long a member that joins takes steps: it has to come before the last of the other members."""
        by_steps = (self.plan.k_steps - self._steps) * self._step_s or math.inf
        return (by_steps if self.round_s is None else self._ends_s - time.monotonic()) - self._step_s - EARLY_S

    def _wait_from_now(self) -> None:
        """Begin to wait for other groups: without limit before the first round, then for `max_wait_s`."""
        self._late_s = time.monotonic() + (self.max_wait_s if self.num_averages else math.inf)

    def _gives_up(self) -> bool:
        return bool(self.requests.asked) or self.should_stop() or time.monotonic() >= self._late_s

    def _any_in_node(self, *flags: bool | Tensor) -> list[bool]:
        message = torch.tensor(flags, dtype=torch.float32, device=self.params.device)
        self.members.node.all_reduce_(message)
        return [number > 0 for number in message.tolist()]

    # Rounds -----------------------------------------------------------------------------------------------------------

    def _take_round(self) -> bool:
        """Take part in a round, in the hidden one if there is one. Return False if this member gives up before.

        Raises:
            TimeoutError: the other members have not come in `max_wait_s`.
        """
        self.has_communicated = True
        is_over, quorum = (False, None) if self.round.hidden is None else self._end_hidden(self.round.hidden)
        while not is_over:
            if quorum is None or quorum.healed is None:
                self._restart_if_not_finite()
                quorum = self._ask(self._gives_up)
            if quorum is None:
                break
            is_over, quorum = self._try_round(quorum), None
        own = self.requests.asked
        asked = self._any_in_node(bool(own & STOP), bool(own & SAVE), self.should_stop())
        self.requests.agree_on(STOP * asked[0] | SAVE * asked[1])
        if not (is_over or any(asked)):
            raise TimeoutError(
                f"Too few groups have come to the end of round {self.num_averages + 1} in {self.max_wait_s:g} s: the "
                "other groups have ended the training, or are lost. If they come back later, start this group again "
                "from its last checkpoint, with a longer ElasticStrategy(timeout=...)."
            )
        if not is_over:
            self._repeat_last_step()
        return is_over

    def _ask(self, gives_up: GivesUp) -> Quorum | None:
        with self.members.ledger.waiting(CPU):
            return self.round.ask(*self._row_and_settings(), gives_up)

    def _try_round(self, quorum: Quorum) -> bool:
        """Try a round; return whether local steps follow: else it is repeated, maybe with the state of another member.

        Local steps follow a round that counts, and a state that was taken in the middle of the other members' round.
        """
        if quorum.healed is not None:
            self._heal(quorum.healed)
            is_awaited = len(quorum.members) > 1
            return self.is_complete or not (is_awaited or self._is_over())
        work = self._begin()
        counts = self._commit(work, quorum, self.round.exchange(quorum, work))
        self._begin_clock()
        return counts

    def _end_hidden(self, work: Work) -> tuple[bool, Quorum | None]:
        """Wait for the hidden round; return whether it counts, and its quorum."""
        self.membership.note(math.inf)
        quorum, average = self.round.wait()
        return self._commit(work, quorum, average), quorum

    def settle(self) -> bool:
        """Apply the hidden round, or restore its work if the other groups do not come; return whether there was one."""
        if self.round.hidden is None:
            return False
        self.healed, self.num_skipped, self._late_s = None, 0, time.monotonic() + SETTLE_S
        with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive an evaluation
            self._end_hidden(self.round.hidden)
        self._repeat_last_step()
        return True

    def _repeat_last_step(self) -> None:
        """Count the last step as not taken: a resume would take no step after it, and not have its round."""
        if self.step >= self.last_step and not self.is_complete:
            self.step, self.num_skipped = self.step - 1, self.num_skipped - 1

    def _row_and_settings(self) -> tuple[Row, dict[str, str]]:
        """Return the row of this member, without the anchor, and the settings that members compare."""
        method, processes = cast("Method", self.method), self.members.num_local_ranks
        settings = {**method.settings(), "processes": processes, **settings_of(self.replica), **self.settings}
        told = {name: f"{value}" for name, value in settings.items()}
        tokens = torch.tensor([self.tokens], dtype=torch.float64).to(self.params.device)
        self.members.node.all_reduce_(tokens)
        state_bytes = processes * sum(tensor.nbytes for tensor in shared_tensors(self.replica).values())
        return Row(
            rounds=self.num_averages,
            step=self.step,
            tokens=float(tokens),
            state_bytes=float(state_bytes),
            settings=digest_of(told),
            run=self.run,
            is_new=self._is_new,
            has_ended=self.is_complete,
        ), told

    def _begin(self) -> Work:
        """Begin a round with the present work; the steps that follow belong to the next round."""
        if resized := self.buffers.changed():
            raise ConfigurationError(
                f"Step {self.step}: the module has registered, removed or resized buffers since the fit began: "
                f"{', '.join(resized)}. Give them their size before the fit, or name them in the module's "
                "_ddp_params_and_buffers_to_ignore."
            )
        trained = [p for p in self._all.parameters if p.requires_grad and p.numel()]  # the same on all members
        prepared = self.replica.prepare_average(self.step, trained, takes_buffers=True)
        residuals = {name: residual.clone() for name, residual in self.replica.residuals.items()}
        work = Work(self.step, self._steps, self.tokens, self._lr, residuals, prepared)
        if self.step >= self.last_step:  # a state without steps would say that the training has ended
            self.membership.serve(None)
        self.tokens, self._all.steps = 0.0, 0
        return work

    def _commit(self, work: Work, quorum: Quorum | None, average: Average | None) -> bool:
        """Apply a round if it counts; else restore the work. Return whether it counts."""
        if quorum is not None and quorum.healed is None and self.membership.commit():
            self._is_unsure = False
            self._apply(work, quorum, average)
            return True
        self._is_unsure = self._is_unsure or average is not None
        set_residuals_(self.replica, work.residuals)
        self.tokens += work.tokens
        self._all.steps = self._steps + work.steps
        self.membership.serve(self.shared_state)
        return False

    def _apply(self, work: Work, quorum: Quorum, average: Average | None) -> None:
        """Apply the average of a round that counts; nothing is communicated.

        Args:
            work: the work with which it was begun; this member may have taken steps since.
            quorum: quorum of the round.
            average: its average; None if there was no work.
        """
        rows, weights = dict(zip(quorum.members, quorum.rows, strict=True)), quorum.weights
        self._is_new = False
        if not self.num_averages:
            self.run = run_of(rows)
        self.membership.serve(None)
        latest = max(row.step for row in rows.values())
        before, self.step = self.step, int(min(self.step + latest - work.step, self.last_step))
        self.num_skipped += self.step - before
        if average is not None:
            if not weights[quorum.rank]:
                set_residuals_(self.replica, work.residuals)  # this member has sent no work
            means, numbers = average.wait_for_whole()
            sums = Sums(*Status.read(numbers.tolist(), self.peers.num_ranks).sums)
            self._all.moved = dict.fromkeys(average.parameters) if self._steps else {}
            self._apply_average(average, means, sums, self._all.moved)
            if latest >= self.last_step:  # steps since the begin of the round come after the end
                self._all.steps = 0
            self.tokens_seen += sum(row.tokens for row in rows.values())
            # A new mapping: the old one may be shared.
            self.contributed = self.contributed | dict.fromkeys(compress(rows, weights), self.num_averages)
        self._offer()

    def _restart_if_not_finite(self) -> None:
        """Go on from the anchor if local steps have left an inf or NaN, without their tokens and momentum."""
        flags = [are_not_finite(tensors_of(self.replica)[0]), self._late_faults().any(self.params.device)]
        if self._any_in_node(any_of(flags, self.params.device))[0]:
            _logger.warning(
                "Step %d has left an inf or NaN: the work of this group in this round is left out. If this repeats, "
                "lower the learning rate or clip the gradients, and start the groups again from their checkpoints.",
                self.step,
            )
            set_work_(self.replica, None)
            set_residuals_(self.replica, {})
            self.optimizer.state.clear()
            self.tokens = 0.0
            self._forget_late_faults()

    # State ------------------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Let members that are behind take the state, at any time until the end of the next round."""
        self._others = on_cpu(self.share() if self.healed is None else self.healed)
        self.membership.serve(self.shared_state)

    def shared_state(self) -> dict[str, Any]:
        """Return the state that a member that is behind takes: "tensors", not copied, and plain values."""
        return {
            "tensors": shared_tensors(self.replica),
            "velocity": list(map(self.params.name_of, self.replica.velocity)),
            **{name: getattr(self, name) for name in EQUAL},
            "step": self.step,
            "steps": self._steps,
            "left_s": self._left_s,
            "others": self._others,
        }

    def _heal(self, shared: Mapping[str, Any]) -> None:
        """Take the state of another member, and move the work of this one to its anchor.

        Work that other members may have counted already is dropped, with its tokens and the residuals; see the module.
        Work that began at the weights of another run is dropped, too.
        """
        if self._is_unsure or shared["run"] != self.run:
            if self.tokens:
                _logger.warning("Work of %g tokens is dropped: other groups may have counted it already.", self.tokens)
            self.tokens = 0.0
            set_residuals_(self.replica, {})
        changes = [now.to(anchor.dtype) - anchor for now, anchor in zip(*tensors_of(self.replica), strict=True)]
        self.membership.serve(None)
        take_anchor_(self.replica, shared["tensors"], shared["velocity"], self.members.node)
        set_work_(self.replica, changes if self.tokens else None)
        self._is_unsure = False
        self._wait_from_now()
        self._ends_s = time.monotonic() + shared["left_s"]
        for key in (*EQUAL, "step"):
            setattr(self, key, shared[key])
        self._all.steps, self.healed = shared["steps"], shared["others"]
        self._offer()
        # A warning: the state may come from an old checkpoint of a group that begins together with this one.
        _logger.warning("This group has taken the state after round %d of run %r.", self.num_averages, self.run)

    def finish(self) -> None:
        """Leave the anchor in the model, after a round that is hidden, without another wait."""
        self.settle()
        self.replica.show()
        self.replica.own = None
        self._all.moved.clear()
        self.tokens, self.loop.differs_after = 0.0, None  # the work is not in the model

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        # Its rank inside the group: the rank among all processes may change with the members.
        rank = self.members.local_rank, self.members.num_local_ranks
        equal = {name: getattr(self, name) for name in EQUAL}
        return {**super().state_dict(), "elastic": equal, "rank": rank, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, value in state.get("elastic", {}).items():
            setattr(self, name, value)
        self.tokens = state["tokens"] if state.get("own") else 0.0  # tokens without the work count for nothing


def check_elastic(method: Method) -> None:
    """Check that members of different speed can train with a method.

    Raises:
        ConfigurationError: they cannot.
    """
    when: Any = method.when
    is_fixed = method.when.averages_weights and not when.is_always_synchronous and when.begin_step == 0
    is_whole = is_fixed and when.rule == "fixed" and when.mixing is None and when.num_fragments == 1
    if not (is_whole and method.what.takes_weights and method.where.topology == "flat"):
        raise ConfigurationError(
            f"{method}: an elastic round ends with one average of all weights, sent by Whole or TopK, and each group "
            "is a node. If a step communicated, one missing or slow group would stop all groups. Take "
            "LocalSGD(k_steps=8, begin_step=0), without rule, mixing, num_fragments and topology."
        )
