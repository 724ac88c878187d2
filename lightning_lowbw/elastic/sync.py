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
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.collectives import (
    Collectives,
    TensorWork,
    TrafficLedger,
    all_gather_bytes,
    all_reduce_bytes,
    broadcast_flat_,
)
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.elastic.membership import GivesUp, Membership, Quorum, Row, Settings, digest_of, run_of
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import CPU, as_real, checksum, copies, copy_all_, order_of
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.sync.fragments import Average, Sums, average_status
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.state import Named, on_cpu
from lightning_lowbw.sync.status import SAVE, STOP, Status, any_of

_logger = logging.getLogger(LOGGER)
ANCHORS = 1 << 32  # checksums are compared modulo this
CHUNK = 1 << 18  # elements of a checksum at a time, the same on all devices: the result depends on it
EARLY_S = 0.5  # a member that has joined asks for its first quorum so long before the other members
END_S = 0.2  # between two last quorums
SETTLE_S = 10.0  # limit for a hidden round before a save or a validation
EQUAL = ("run", "num_averages", "tokens_seen", "contributed")  # attributes that are the same on all members


# Communication ------------------------------------------------------------------------------------------------------


class MemberCollectives(Collectives):
    """Collectives of the members of the current round, on the CPU; blocking.

    A lost member fails the round: nothing is communicated from then on, and the returned values have no meaning. All
    processes of a group go on together up to `Membership.commit`, which returns False on every process.

    Attributes:
        has_failed: whether a collective of this round has failed.
        is_hidden: whether a thread waits for the collectives, and no step.
    """

    is_hidden = False

    def __init__(self, membership: Membership, ledger: TrafficLedger) -> None:
        super().__init__(None, ledger, "inter")
        self._membership = membership
        self.begin(Quorum(0, ("",)))

    def begin(self, quorum: Quorum) -> None:
        """Begin a round of the members of a quorum; a group is alone before the first round."""
        self.has_failed = False
        self.num_ranks, self.rank = len(quorum.members), quorum.rank

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        staged = tensor.cpu()
        self._run(lambda group: group.allreduce([staged]), all_reduce_bytes(tensor.nbytes, self.num_ranks))
        return TensorWork(tensor if staged is tensor else tensor.copy_(staged))

    begin_sum_ = begin_all_reduce_

    def begin_all_gather(self, message: Tensor, out: Tensor | None = None) -> TensorWork:
        sent = message.contiguous().cpu()
        rows = sent.new_zeros(self.num_ranks, sent.numel())
        rows[self.rank] = sent
        nbytes = all_gather_bytes(message.nbytes, self.num_ranks)
        self._run(lambda group: group.allgather([list(rows.unbind())], [sent]), nbytes)
        received = rows.to(message.device)
        return TensorWork(received if out is None else out.copy_(received.view(out.shape)))

    def _run(self, begin: Callable[[dist.ProcessGroup], Any], nbytes: int) -> None:
        if self.num_ranks == 1 or self.has_failed:
            return
        try:
            with nullcontext() if self.is_hidden else self.ledger.waiting(CPU):
                self._membership.collective(begin)
        except RuntimeError as error:
            _logger.warning("The round has failed and is repeated, because a member was lost: %s", error)
            self.has_failed = True
        self._record(nbytes)


class Members(Peers):
    """The processes of all members: each group is a node, whose processes exchange equal parts with other groups.

    Args:
        membership: finds the members.
        ledger: counts the traffic.

    Attributes:
        membership: as given.
        between: collectives of this process and the processes with its rank in the other groups.
        weights: weights of the members in the mean of this round.
    """

    may_grow = True
    between: MemberCollectives

    def __init__(self, membership: Membership, ledger: TrafficLedger | None = None) -> None:
        super().__init__(None, ledger)
        self.membership = membership
        self.between = MemberCollectives(membership, self.ledger)
        self.node = Collectives(None, self.ledger, "intra")
        self.local_rank, self.num_local_ranks = self.node.rank, self.node.num_ranks
        self.is_two_level = self.ledger.has_levels = self.num_local_ranks > 1

    @property
    def num_ranks(self) -> int:
        return self.num_participants * self.num_local_ranks

    @property
    def rank(self) -> int:
        return self.between.rank * self.num_local_ranks + self.local_rank

    @property
    def num_participants(self) -> int:
        return self.between.num_ranks

    @property
    def weight(self) -> float:
        return self.weights[self.between.rank] / self.num_local_ranks if self.weights else super().weight

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        part = self.between.begin_all_reduce_(self.node.reduce_scatter(tensor)).wait()
        return TensorWork(tensor.copy_(self.node.gather_parts(part, tensor.numel())) if self.is_two_level else part)

    begin_sum_ = begin_all_reduce_

    def begin_gather(self, message: Tensor) -> TensorWork:
        received = self.between.begin_all_gather(message).wait()
        shape = self.num_local_ranks, self.num_participants, message.numel()
        return TensorWork(self.node.all_gather(received.view(-1)).view(shape))

    def broadcast_(self, tensor: Tensor) -> None:
        self.node.broadcast_(tensor)

    def close(self) -> None:
        self.membership.close()


# A round --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
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


Exchanged = tuple[Quorum | None, Average | None]  # the average is None if nothing is averaged


# One member -----------------------------------------------------------------------------------------------------------


class ElasticSync(LocalSync):
    """The replica of one group; see `LocalSync` for a step.

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
        self.members, self.membership = members, members.membership
        self.round_s = round_s
        super().__init__(method, optimizer, named_parameters, members, named_buffers)
        self.buffers.is_elastic = True
        (self._all,) = self.fragments
        self.tokens = self.tokens_seen = 0.0
        self.contributed: dict[str, int] = {}
        self.last_step = math.inf
        self._batch = 0  # of the last step
        self.settings: Mapping[str, object] = {}
        self.share: Callable[[], Mapping[str, Any]] = dict
        self.healed: Mapping[str, Any] | None = None
        self._others: Mapping[str, Any] = {}  # the last result of `share`
        self.num_skipped = 0
        self.should_stop: Callable[[], bool] = lambda: False
        self.max_wait_s = math.inf
        self.run = uuid.uuid4().hex[:12]
        self._ends_s = math.inf  # when the round ends, unless it ends after steps
        self._is_new = True  # whether it has been in no round yet
        # Whether other members may have counted the work already: after a failed exchange, or in a checkpoint.
        self._is_unsure = True
        self._hidden: tuple[_Work, Future[Exchanged]] | None = None  # a round in the background
        self._batch_s = math.inf  # when the last batch began
        self._step_s = self._longest_s = 0.0  # time of the last step, and of the longest
        self._late_s = math.inf  # when this member stops to wait for other groups
        if self.when.delay_steps and members.num_local_ranks > 1:
            raise ConfigurationError(
                f"{method}, in a group of {members.num_local_ranks} processes: a round is hidden in groups of one "
                "process. Leave out delay_steps, or start each process as a group of its own."
            )

    # Rounds -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def join(self) -> None:
        """Take the state of a member that trains and go on in the middle of its round; else have a round without steps.

        Collective: all members, at the end of their rounds; if no member has taken a step, nothing is averaged. If a
        member trains: nothing; the member sends its state in a thread.
        """
        self.begin_local()
        self.healed, self.num_skipped = None, 0
        self._offer()
        self._wait_from_now()
        settings = self._all_settings()
        if (shared := self.membership.state_of_others(self._row(settings), settings, self._gives_up)) is not None:
            self._heal(shared)
        if not self.is_complete and (shared is None or self._is_over()):
            self._take_round()

    @torch.no_grad()
    def average_due(self) -> bool:
        if self.batch and self.batch == self._batch:
            raise ConfigurationError(
                f"Step {self.step} is the second one in batch {self.batch}: all groups end with the same step, which "
                "may be the first of a batch. Take one optimizer step for each batch."
            )
        self._batch = self.batch
        self._step_s = max(0.0, time.monotonic() - self._batch_s)
        self._longest_s = max(self._longest_s, self._step_s)
        self.membership.note(self._longest_s)
        self.healed, self.num_skipped, self.has_communicated = None, 0, False
        self._wait_from_now()
        is_due = self._hidden is not None and (self._steps >= self.when.delay_steps or self._is_over())
        if is_due and not self._take_round():  # the other groups have not come
            return True
        if not self.is_complete and self._is_over():
            self.tokens = self.tokens or float(self._steps)  # if the caller counts none
            if self.when.delay_steps and self.step < self.last_step:
                self._begin_hidden()
                self.has_communicated = True
            else:
                self._take_round()
        return self.has_communicated

    def begin_batch(self) -> None:
        """Note that a batch begins, of the training or a validation: this group does not hang."""
        self._batch_s = time.monotonic()
        self.membership.note(self._longest_s)

    @property
    def is_complete(self) -> bool:
        """Whether the last step has been averaged."""
        return self.step >= self.last_step and not self._steps and self._hidden is None

    @torch.no_grad()
    def end(self, grace_s: float) -> None:
        """Take part in last quorums, so that members that have missed the last round can take the state.

        This ends after `grace_s`, or when all members that were ever averaged have come.
        """
        self.settle()
        ends_s = time.monotonic() + grace_s
        while self.is_complete and not self._any_in_node(time.monotonic() >= ends_s)[0]:
            quorum = self._next_quorum(lambda: time.monotonic() >= ends_s)
            if quorum is None or (self._try_round(quorum) and self.contributed.keys() <= {*quorum.members}):
                return
            time.sleep(END_S)

    def _is_over(self) -> bool:
        """Return whether the round ends with this step; the same on all processes of the group."""
        is_over = self.step >= self.last_step or (self.round_s is None and self._steps >= self.k_steps)
        if self._ends_s == math.inf:
            return is_over
        return self._any_in_node(is_over or time.monotonic() >= self._ends_s)[0]

    def _any_in_node(self, *flags: bool | Tensor) -> list[bool]:
        message = torch.tensor(flags, dtype=torch.float32, device=self.device)
        self.members.node.all_reduce_(message)
        return [number > 0 for number in message.tolist()]

    @property
    def _steps(self) -> int:
        return self._all.steps or 0

    def _take_round(self) -> bool:
        """Take part in a round, in the hidden one if there is one. Return False if this member gives up before.

        Raises:
            TimeoutError: the other members have not come in `max_wait_s`.
        """
        self.has_communicated = True
        is_over, quorum = (False, None) if self._hidden is None else self._arrived()
        while not is_over:
            if quorum is None:
                self._restart_if_not_finite()
                quorum = self._next_quorum(self._gives_up)
            if quorum is None:
                break
            is_over, quorum = self._try_round(quorum), None
        asked = self._agree_on_requests()
        if not (is_over or any(asked)):
            raise TimeoutError(
                f"Too few groups have come to the end of round {self.num_averages + 1} in {self.max_wait_s:g} s: the "
                "other groups have ended the training, or are lost. If they come back later, start this group again "
                "from its last checkpoint, with a longer ElasticStrategy(timeout=...)."
            )
        if not is_over:
            self._repeat_last_step()
        return is_over

    def _begin_clock(self) -> None:
        self._ends_s = math.inf if self.round_s is None else time.monotonic() + self.round_s

    @property
    def _left_s(self) -> float:
        """Return how long a member that joins takes steps: it has to come before the last of the other members."""
        by_steps = (self.k_steps - self._steps) * self._step_s or math.inf
        return (by_steps if self.round_s is None else self._ends_s - time.monotonic()) - self._step_s - EARLY_S

    def _repeat_last_step(self) -> None:
        """Count the last step as not taken: a resume would take no step after it, and not have its round."""
        if self.step >= self.last_step and not self.is_complete:
            self.step, self.num_skipped = self.step - 1, self.num_skipped - 1

    def _agree_on_requests(self) -> list[bool]:
        """Agree in this group on requests to stop and to save, and on signals to stop; return the three."""
        asked = self._any_in_node(self.stop_requested, self.save_requested, self.should_stop())
        self.agree_on(STOP * asked[0] | SAVE * asked[1])
        return asked

    def _wait_from_now(self) -> None:
        """Begin to wait for other groups: without limit before the first round, then for `max_wait_s`."""
        self._late_s = time.monotonic() + (self.max_wait_s if self.num_averages else math.inf)

    def _gives_up(self) -> bool:
        return bool(self.requests) or self.should_stop() or time.monotonic() >= self._late_s

    def _next_quorum(self, gives_up: GivesUp) -> Quorum | None:
        settings = self._all_settings()
        with self.members.ledger.waiting(CPU):
            return self._ask(self._row(settings), settings, gives_up)

    def _ask(self, row: Row, settings: Settings, gives_up: GivesUp) -> Quorum | None:
        """Ask for a quorum with a row that lacks the checksum of the anchor, which takes a pass over memory."""
        anchor = int(checksum(self.replica.start.values(), at_a_time=CHUNK)) % ANCHORS
        return self.membership.quorum(row._replace(anchor=float(anchor)), settings, gives_up)

    def _try_round(self, quorum: Quorum) -> bool:
        """Try a round; return whether local steps follow: else it is repeated, maybe with the state of another member.

        Local steps follow a round that counts, and a state that was taken in the middle of the other members' round.
        """
        if quorum.healed is not None:
            self._heal(quorum.healed)
            is_awaited = len(quorum.members) > 1
            return self.is_complete or not (is_awaited or self._is_over())
        work = self._begin()
        counts = self._conclude(work, quorum, self._exchange(quorum, work))
        self._begin_clock()
        return counts

    def _begin(self) -> _Work:
        """Begin a round with the present work; the steps that follow belong to the next round."""
        if resized := self.buffers.changed():
            raise ConfigurationError(
                f"Step {self.step}: the module has registered, removed or resized buffers since the fit began: "
                f"{', '.join(resized)}. Give them their size before the fit, or name them in the module's "
                "_ddp_params_and_buffers_to_ignore."
            )
        trained = [p for p in self._all.parameters if p.requires_grad and p.numel()]  # the same on all members
        prepared = self.replica.prepare_average(self.step, trained, takes_buffers=True)
        work = _Work(self.step, self._steps, self.tokens, self._lr, copies(self.replica.residuals), prepared)
        if self.step >= self.last_step:  # a state without steps would say that the training has ended
            self.membership.serve(None)
        self.tokens, self._all.steps = 0.0, 0
        return work

    def _exchange(self, quorum: Quorum | None, work: _Work) -> Average | None:
        """Exchange the work of a round; without any work, only wait for the members."""
        if quorum is None or quorum.healed is not None:
            return None
        self.members.between.begin(quorum)
        weights = quorum.weights
        if not weights:
            self.members.between.begin_all_gather(torch.zeros(1))
            return None
        self.members.weights = weights if len({*weights}) > 1 else ()
        # The rows have told everything but the learning rate.
        status = average_status(Sums(lr=work.lr), None, 0.0, 0, self.peers, self.device)
        return self.replica.send_average(*work.prepared, status)

    def _conclude(self, work: _Work, quorum: Quorum | None, average: Average | None) -> bool:
        """Apply a round if it counts; else restore the work. Return whether it counts."""
        if quorum is not None and quorum.healed is None and self.membership.commit():
            self._is_unsure = False
            self._end_round(quorum, average, work)
            return True
        self._is_unsure = self._is_unsure or average is not None
        self._set_residuals(work.residuals)
        self.tokens += work.tokens
        self._all.steps = self._steps + work.steps
        self.membership.serve(self.shared_state)
        return False

    # A round that is hidden by local steps ----------------------------------------------------------------------------

    def _begin_hidden(self) -> None:
        """Begin a round in a thread, with the weights as they are now."""
        self._restart_if_not_finite()
        settings = self._all_settings()
        row, work, result = self._row(settings), self._begin(), Future[Exchanged]()

        def run() -> None:
            try:
                with torch.no_grad(), torch.cuda.device_of(torch.empty(0, device=self.device)):
                    quorum = self._ask(row, settings, self._gives_up)
                    result.set_result((quorum, self._exchange(quorum, work)))
            except BaseException as error:  # noqa: BLE001 - raised by the wait for the round
                result.set_exception(error)

        self._hidden = work, result
        self._begin_clock()
        self.members.between.is_hidden = True
        threading.Thread(target=run, name="lowbw-round", daemon=True).start()

    def settle(self) -> bool:
        """Apply the hidden round, or restore its work if the other groups do not come; return whether there was one."""
        if self._hidden is None:
            return False
        self.healed, self.num_skipped, self._late_s = None, 0, time.monotonic() + SETTLE_S
        with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive an evaluation
            self._arrived()
        self._repeat_last_step()
        return True

    def _arrived(self) -> tuple[bool, Quorum | None]:
        """Wait for the hidden round, and apply it if it counts. Return whether it does, and a quorum with a state."""
        assert self._hidden is not None
        (work, result), self._hidden = self._hidden, None
        self.membership.note(math.inf)
        with self.members.ledger.waiting(CPU):
            quorum, average = result.result()
        self.members.between.is_hidden = False
        return self._conclude(work, quorum, average), None if quorum is None or quorum.healed is None else quorum

    def _row(self, settings: Settings) -> Row:
        """Return the row of this member; see `_ask`."""
        tokens = torch.tensor([self.tokens], dtype=torch.float64).to(self.device)
        self.members.node.all_reduce_(tokens)
        return Row(
            rounds=self.num_averages,
            step=self.step,
            tokens=float(tokens),
            state_bytes=float(self.members.num_local_ranks * sum(t.nbytes for t in self._shared_tensors().values())),
            settings=digest_of(settings),
            run=self.run,
            is_new=self._is_new,
            has_ended=self.is_complete,
        )

    def _all_settings(self) -> dict[str, str]:
        """Return the values that have to be the same on all members, by name."""
        method = cast("Method", self.method)
        settings = {**method.settings(), "processes": self.members.num_local_ranks}
        # Averages send elements in the order of memory, which channels_last changes.
        for p in self.replica.start:
            in_memory = "" if order_of(p) == tuple(range(p.dim())) else f", dimensions in memory {[*order_of(p)]}"
            settings[f"parameter {self.name_of(p)}"] = f"{p.dtype} of shape {[*p.shape]}{in_memory}"
        floating = ((name, t) for name, t in self.buffers.now().items() if name in self.buffers.start)
        settings |= {f"buffer {name}": f"{t.dtype} of shape {[*t.shape]}" for name, t in floating}
        return {name: f"{value}" for name, value in {**settings, **self.settings}.items()}

    def _end_round(self, quorum: Quorum, average: Average | None, work: _Work) -> None:
        """Apply the average of a round that counts; nothing is communicated.

        Args:
            quorum: quorum of the round.
            average: its average; None if there was no work.
            work: the work with which it was begun; this member may have taken steps since.
        """
        rows, weights = dict(zip(quorum.members, quorum.rows, strict=True)), quorum.weights
        self._is_new = False
        if not self.num_averages:
            self.run = run_of(rows)
        self.membership.serve(None)
        latest = max(row.step for row in rows.values())
        before, self.step = self.step, int(min(self.step + latest - work.step, self.last_step))
        self.num_skipped += self.step - before
        if average is None:
            self._offer()
            return
        if not weights[quorum.rank]:
            self._set_residuals(work.residuals)  # this member has sent no work
        means, numbers = average.wait_for_whole()
        sums = Sums(*Status.read(numbers.tolist(), self.peers.num_ranks).sums)
        self._all.moved = dict.fromkeys(average.parameters) if self._steps else {}
        self.apply_average(average, means, sums, self._all.moved)
        if latest >= self.last_step:  # steps since the begin of the round come after the end
            self._all.steps = 0
        self.tokens_seen += sum(row.tokens for row in rows.values())
        # A new mapping: the old one may be shared.
        self.contributed = self.contributed | dict.fromkeys(compress(rows, weights), self.num_averages)
        self._offer()

    # The work of this member: the change that has not been averaged ---------------------------------------------------

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that are averaged, and their anchors."""
        buffers = self.buffers.now()
        now = [*(p.detach() for p in self.replica.start), *(buffers[name] for name in self.buffers.start)]
        return list(map(as_real, now)), [*self.replica.start.values(), *self.buffers.start.values()]

    def _add_(self, work: Sequence[Tensor] | None) -> None:
        """Set the weights to the anchor plus this work."""
        now, anchors = self._tensors()
        copy_all_(now, anchors if work is None else list(torch._foreach_add(anchors, list(work))))
        self._all.moved = {} if work is None else dict.fromkeys(self.replica.start)

    def _restart_if_not_finite(self) -> None:
        """Go on from the anchor if local steps have left an inf or NaN, without their tokens and momentum."""
        flags = [are_not_finite(self._tensors()[0]), self.late_faults().any(self.device)]
        if self._any_in_node(any_of(flags, self.device))[0]:
            _logger.warning(
                "Step %d has left an inf or NaN: the work of this group in this round is left out. If this repeats, "
                "lower the learning rate or clip the gradients, and start the groups again from their checkpoints.",
                self.step,
            )
            self._add_(None)
            self.optimizer.state.clear()
            self.tokens = 0.0
            self._set_residuals({})
            self.forget_late_faults()

    # The shared state -------------------------------------------------------------------------------------------------

    def _shared_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the anchor, which are the same on all members, in one order."""
        kinds = {"start": self._named(self.replica.start), "velocity": self._named(self.replica.velocity)}
        kinds["buffers"] = self.buffers.start
        return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    def shared_state(self) -> dict[str, Any]:
        """Return the state that a member that is behind takes: "tensors", not copied, and plain values."""
        return {
            "tensors": self._shared_tensors(),
            "velocity": [*self._named(self.replica.velocity)],
            **{name: getattr(self, name) for name in EQUAL},
            "step": self.step,
            "steps": self._steps,
            "left_s": self._left_s,
            "others": self._others,
        }

    def _offer(self) -> None:
        """Let members that are behind take the state, at any time until the end of the next round."""
        self._others = on_cpu(self.share() if self.healed is None else self.healed)
        self.membership.serve(self.shared_state)

    def _heal(self, shared: Mapping[str, Any]) -> None:
        """Take the state of another member, and move the work of this one to its anchor.

        Work that other members may have counted already is dropped, with its tokens and the residuals; see the module.
        Work that began at the weights of another run is dropped, too.
        """
        if self._is_unsure or shared["run"] != self.run:
            if self.tokens:
                _logger.warning("Work of %g tokens is dropped: other groups may have counted it already.", self.tokens)
            self.tokens = 0.0
            self._set_residuals({})
        changes = [now.to(anchor.dtype) - anchor for now, anchor in zip(*self._tensors(), strict=True)]
        work = changes if self.tokens else None
        self.membership.serve(None)
        starts = {self.name_of(p): (p, start) for p, start in self.replica.start.items()}
        self.replica.velocity = {p: torch.empty_like(start) for p, start in map(starts.__getitem__, shared["velocity"])}
        for key, tensor in self._shared_tensors().items():
            if shared["tensors"]:  # on the first process of the group, which broadcasts them
                tensor.copy_(shared["tensors"][key])
            if self.members.num_local_ranks > 1:
                broadcast_flat_([tensor], self.members.node.broadcast_)
        self._add_(work)
        self._is_unsure = False
        self._wait_from_now()
        self._ends_s = time.monotonic() + shared["left_s"]
        for key in (*EQUAL, "step"):
            setattr(self, key, shared[key])
        self._all.steps, self.healed = shared["steps"], shared["others"]
        self._offer()
        # A warning: the state may come from an old checkpoint of a group that begins together with this one.
        _logger.warning("This group has taken the state after round %d of run %r.", self.num_averages, self.run)

    def _named(self, tensors: Mapping[Parameter, Tensor]) -> dict[str, Tensor]:
        return {self.name_of(parameter): tensor for parameter, tensor in tensors.items()}

    def _set_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Set the residuals; a residual that is not given becomes zero."""
        for name, residual in self.replica.residuals.items():
            residual.copy_(residuals[name]) if name in residuals else residual.zero_()

    # The anchor in the model, and checkpoints -------------------------------------------------------------------------

    def finish(self) -> None:
        """Leave the anchor in the model, after a round that is hidden, without another wait."""
        self.settle()
        self.replica.show()
        self.replica.own = None
        self._all.moved.clear()
        self.tokens, self.ending.step = 0.0, None  # the work is not in the model

    def equal_state(self) -> dict[str, Any]:
        return {**super().equal_state(), "elastic": {name: getattr(self, name) for name in EQUAL}}

    def load_equal_state(self, state: Mapping[str, Any]) -> None:
        super().load_equal_state(state)
        for name, value in state.get("elastic", {}).items():
            setattr(self, name, value)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        # Its rank inside the group: the rank among all processes may change with the members.
        rank = self.members.local_rank, self.members.num_local_ranks
        return {**super().state_dict(), "rank": rank, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.tokens = state["tokens"] if state["own"] else 0.0  # tokens without the work count for nothing


def check_elastic(method: Method) -> None:
    """Check that members of different speed can train with a method.

    Raises:
        ConfigurationError: they cannot.
    """
    when: Any = method.when
    is_fixed = method.averages_weights and not when.is_always_synchronous and when.begin_step == 0
    is_whole = is_fixed and when.rule == "fixed" and when.mixing is None and when.num_fragments == 1
    if not (is_whole and method.what.takes_weights and method.where.topology == "flat"):
        raise ConfigurationError(
            f"{method}: an elastic round ends with one average of all weights, sent by Whole or TopK, and each group "
            "is a node. If a step communicated, one missing or slow group would stop all groups. Take "
            "LocalSGD(k_steps=8, begin_step=0), without rule, mixing, num_fragments and topology."
        )
