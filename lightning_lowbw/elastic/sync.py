"""Local SGD whose members come, go and are slow: a round averages the members that are there, weighted by their tokens.

A member is a group of processes, one Lightning run. Its processes take local steps together. At the end of a round the
leader of the group, its first process, has a round with the leaders of the other groups:

    heal        a member that is behind takes the state of a member that is not, and moves its own work there:
                w = new anchor + (w - old anchor);  meanwhile the other members train and have rounds
    quorum      the members of the round, with a row of each: its tokens, steps and anchor; all members compute the
                weights of the mean from these. A member with other settings than the members that train is refused
    bring       the processes of the group copy their weights to the host, and bring their shards to the leader
    exchange    the changes of the weights, as in `sync.local`; a member is one participant
    commit      or nothing has happened: the residuals are as before, and the round is repeated
    hand out    anchor = outer(anchor, mean), which the processes of the group receive
    apply       w = anchor, plus the work that has not been averaged; on all processes at the same step

With `delay_steps`, a thread runs all parts but the last one during the next local steps, whose changes are kept:
w = anchor + (w - w at the begin). A hidden round that fails is repeated without the thread.

If an exchange fails here, another member may still have applied it. If a member takes the state of another member after
that, it drops the work of the round, its tokens and its residuals, because it does not know whether these have been
counted. A member that starts from a checkpoint does so, too. All other members keep their work.

Shared by all members, and taken by a member that is behind: the anchor (`start`), the outer velocity, averaged buffers,
the numbers of rounds and steps, tokens seen, and the round in which each member was last averaged. Everything else
belongs to one member.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import compress
from operator import or_
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.elastic.group import Group, Orders
from lightning_lowbw.elastic.membership import Quorum, Row, judge_of, settings_text
from lightning_lowbw.elastic.process_tensors import ProcessTensors
from lightning_lowbw.elastic.site import Site
from lightning_lowbw.elastic.transfer import POLL_S
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import CPU, device_of
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.payloads.whole import Whole
from lightning_lowbw.sync.buffers import wide_copies
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.replica import COPY
from lightning_lowbw.sync.state import on_cpu
from lightning_lowbw.sync.status import STOP

_logger = logging.getLogger(LOGGER)
EARLY_S = 0.5  # a member that has joined asks for its first quorum so long before the other members
END_S = 0.2  # between two last quorums
FEW_ROUNDS = 5  # from which the usual change of a group is known
THREADS_OF_STEPS = 4  # threads of the steps for each thread of a hidden round
SETTLE_S = 10.0  # limit for a hidden round before a save or a validation
EQUAL = ("run", "num_averages", "tokens_seen", "contributed")  # attributes that are the same on all members
# Attributes that the leader decides on, and all processes of its group have after a round.
TOLD = (*EQUAL, "step", "num_skipped", "has_communicated", "healed", "is_hiding", "_steps", "_ends_s")


@dataclass
class _Round:
    """A round of the leader: the row that it has told, and the members that it has found.

    Attributes:
        row: as told to the other members; without the anchor.
        names: the tensors that are averaged.
        steps: local steps, until the round is concluded.
        quorum: the members; None: not found.
        has_work: whether any member has told work, which is exchanged.
        counts: whether the round counts.
    """

    row: Row = field(default_factory=Row)
    names: Sequence[str] = ()
    steps: int = 0
    quorum: Quorum | None = None
    has_work: bool = False
    counts: bool = False


class ElasticSync(LocalSync):
    """One process of a group, whose averages are rounds of the group's leader; see `LocalSync` for a step.

    It overrides `begin`, `_average_due` and `finish`, and adds values to the state. Methods that begin with ``_each_``
    are orders of the leader: all processes of the group run them.

    Args:
        method: `EveryK` with `Whole` or `TopK`; see `check_elastic`.
        group: the processes of this group.
        named_buffers: returns the buffers by name; floating ones are averaged, as the leader has them; the other ones
            belong to each process.
        round_s: seconds after which a round ends, instead of the method's `k_steps`.
        shapes: the shapes of the whole parameters, if the processes have shards.

    Attributes:
        site: the state of the group; on the leader, else None.
        tokens: tokens of the local steps of this process that have not been averaged; the caller adds the tokens of
            each batch, or a step counts 1.
        tokens_seen: tokens of all members, averaged so far.
        contributed: the round in which each member was last averaged, by name.
        last_step: step at which the training ends, for all members with the same round; infinity: never.
        settings: more values that have to be the same on all members, by name.
        share: returns more state for a member that is behind: plain values and tensors.
        healed: the result of another member's `share`, which the caller is to apply; None if there is nothing.
        should_stop: returns whether this process is asked to stop; then its group does not wait for a quorum.
        forget: drops the momentum of the optimizer.
        max_wait_s: limit for the wait for other groups, after the first round.
        run: the training to which the rounds belong; before the first round, the training that it would begin.
        max_change_ratio: a group whose weights have moved so many times as far in a step as is usual is left out of the
            mean, after its first rounds; None: no group.
        round_metrics: numbers of the last round, for loggers; on the leader.
        num_skipped: steps that the last round has added to `step`: taken by the fastest member and not by this one.
        is_hiding: whether a thread runs a round.
    """

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        group: Group,
        named_buffers: Callable[[], Mapping[str, Tensor]] = dict,
        *,
        round_s: float | None = None,
        shapes: Mapping[Parameter, Sequence[int]] | None = None,
    ) -> None:
        check_elastic(method)
        # The site exchanges; a process of its group only has its weights, and the anchor, which it shows.
        super().__init__(dataclasses.replace(method, what=Whole()), optimizer, named_parameters, group, named_buffers)
        method.what.check_names(self.params.names())
        self.method, self.group, self.replica.needs_start = method, group, False
        self.site: Any = None
        self.membership: Any = group.membership
        self._shapes = {self.params.name_of(p): shape for p, shape in (shapes or {}).items()}
        if group.membership is not None:
            of_leader = self.params.by_name(), self._shapes, group.membership, group.ledger
            self.site = Site(method, *of_leader)
        (self._all,) = self.fragments
        self.tensors = ProcessTensors(self.replica, self._shapes, group.num_ranks, self.site)
        self._round = _Round()  # the present one, or the last one
        self._known: set[str] = set()  # tensors whose anchor the leader has
        self.tokens = self.tokens_seen = 0.0
        self.contributed: dict[str, int] = {}
        self.last_step = math.inf
        self.settings: Mapping[str, object] = {}
        self.share: Callable[[], Mapping[str, Any]] = dict
        self._others: Mapping[str, Any] = {}  # the last result of `share`
        self.healed: Mapping[str, Any] | None = None
        self.num_skipped = 0
        self.should_stop: Callable[[], bool] = lambda: False
        self.forget: Callable[[], None] = lambda: optimizer.state.clear()
        self.run = uuid.uuid4().hex[:12]
        self._is_new = True  # whether it has been in no round yet
        # Whether other members may have counted the work already: after a failed exchange, or in a checkpoint.
        self._is_unsure = True
        self._last_batch = 0  # the batch of the last step
        self.round_s, self.max_wait_s = round_s, math.inf
        self._changes = deque[float](maxlen=FEW_ROUNDS)  # norms of changes per step, of the last rounds
        self._change = 0.0  # that of this round
        # When the last round ended, the seconds that it waited, and bytes sent up to then.
        self._round_s, self._wait_s, self._num_bytes = time.monotonic(), 0.0, 0
        self._last_loss: Tensor | None = None
        self.round_metrics: dict[str, float] = {}
        self.max_change_ratio: float | None = None
        self._ends_s = math.inf  # when the round ends, unless it ends after steps
        self._late_s = math.inf  # when this member stops to wait for other groups
        self._batch_s = math.inf  # when the last batch began
        self._step_s = 0.0  # time of the last step
        self.is_hiding = False
        self._has_ended = Future[None]()  # the exchange of a round, on this process
        self._has_ended.set_result(None)

    # Steps ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the anchor of tensors that have none, on the host; see `LocalSync`.

        Collective: the processes of the group, if there are such tensors.
        """
        if not self.buffers.is_begun:
            self.buffers.agree_on_shapes()
            self.buffers.is_begun, now = True, self.buffers.now()
            floating = [name for name in self.buffers.specs if self.buffers.is_averaged(name) and name in now]
            copies = wide_copies([now[name] for name in floating])
            self.buffers.start = {name: copy.cpu() for name, copy in zip(floating, copies, strict=True)}
        super().begin()
        if len(self.replica.start) + len(self.buffers.start) > len(self._known):
            device_of(self.params.device).join(COPY, on_host=True)
            self._known = {*self.tensors.starts()}
            self._lead(self._keep_anchor)

    @torch.no_grad()
    def join(self) -> None:
        """Take the state of a member that trains and go on in the middle of its round; else have a round without steps.

        Collective: all members, at the end of their rounds; if no member has taken a step, nothing is averaged. If a
        member trains: nothing; the member sends its state in a thread.
        """
        self.begin()
        self.healed, self.num_skipped = None, 0
        self._lead(self._join)

    def _keep_anchor(self) -> None:
        """Keep the anchor of tensors that have none: as they are, or from a state that was loaded."""
        now = self.buffers.now()
        known = {self.params.name_of(p): p for p in self.replica.start}
        new = self.site.look(known, {name: now[name] for name in self.buffers.start})
        if new:  # not after a resume
            self._order("begin", new, False)
            self._order("bring", new)
        anchors, weights = self.site.anchors(), self.site.weights()
        for name in new:
            anchors[name].copy_(weights[name])
        self._order("hand_out", [*anchors])
        num_others = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
        self.site.check_memory(num_others / (self.group.num_ranks if self.group.are_shards else 1))

    def _join(self) -> None:
        self._take_tokens()
        self._offer()
        self._wait_from_now()
        shared = self.membership.state_of_others(self._row(), self._gives_up)
        if shared is not None:
            self._heal(shared)
        if not self.is_complete and (shared is None or self._is_over()):
            self._take_round()

    def observe_loss(self, loss: Tensor) -> None:
        self._last_loss = loss

    def begin_batch(self) -> None:
        """Note that a batch begins, of the training or a validation: this group does not hang."""
        self._batch_s = time.monotonic()
        if self.membership is not None:
            self.membership.note()

    @torch.no_grad()
    def _average_due(self) -> None:
        if self.batch and self.batch == self._last_batch:
            raise ConfigurationError(
                f"Step {self.step} is the second one in batch {self.batch}: all groups end with the same step, which "
                "may be the first of a batch. Take one optimizer step for each batch."
            )
        self._last_batch = self.batch
        self._step_s = max(0.0, time.monotonic() - self._batch_s)
        self.healed, self.num_skipped, self.has_communicated = None, 0, False
        self._wait_from_now()
        is_due = self._is_over() or (self.is_hiding and self._steps >= self._when.delay_steps)
        if self._ends_s < math.inf:  # by the leader's clock
            is_due = self.group.orders.tell(is_due)
        if is_due:
            self._lead(self._end_round)

    def _end_round(self) -> None:
        self._take_tokens()
        if self.is_hiding and not self._take_round():
            return  # the other groups have not come
        if not self.is_complete and self._is_over():
            self.tokens = self.tokens or float(self._steps * self.group.num_ranks)  # if the caller counts none
            if self._when.delay_steps and self.step < self.last_step:
                self._begin_round(is_hidden=True)
            else:
                self._take_round()

    @torch.no_grad()
    def end(self, grace_s: float) -> None:
        """Take part in last quorums, so that members that have missed the last round can take the state.

        This ends after `grace_s`, or when all members that were ever averaged have come.
        """
        self.settle()
        self._lead(partial(self._end, grace_s))

    def _end(self, grace_s: float) -> None:
        ends_s = time.monotonic() + grace_s
        while self.is_complete and time.monotonic() < ends_s:
            self._late_s = ends_s
            self._begin_round()
            counts, quorum = self._end_exchange(), self._round.quorum
            if quorum is None or (counts and self.contributed.keys() <= {*quorum.members}):
                return
            time.sleep(END_S)

    @property
    def _steps(self) -> int:
        return self._all.steps or 0

    @_steps.setter
    def _steps(self, steps: int) -> None:
        self._all.steps = steps

    @property
    def is_complete(self) -> bool:
        """Whether the last step has been averaged."""
        return self.step >= self.last_step and not self._steps and not self.is_hiding

    def _is_over(self) -> bool:
        """Return whether the round ends with this step; by the clock of this process."""
        is_over = self.step >= self.last_step or (self.round_s is None and self._steps >= self.plan.k_steps)
        return is_over or time.monotonic() >= self._ends_s

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

    # Orders -----------------------------------------------------------------------------------------------------------

    def _lead(self, section: Callable[[], Any]) -> None:
        """Run a section on the leader, while the other processes carry out its orders; then all have its values."""
        told = self.group.orders.lead(
            partial(self._carry_out, self.group.orders), section, lambda: {name: getattr(self, name) for name in TOLD}
        )
        for name, value in told.items() if self.site is None else ():
            setattr(self, name, value)

    def _carry_out(self, orders: Orders, name: str, *values: Any) -> Any:
        with torch.no_grad():
            if name in ("bring", "hand_out"):
                return getattr(self.tensors, name)(orders, *values)
            if name in ("measure", "begin", "apply"):
                return getattr(self.tensors, name)(*values)
            return getattr(self, f"_each_{name}")(*values)

    def _order(self, name: str, *values: Any) -> list[Any]:
        return self.group.orders.order(name, *values)

    def _poll(self, orders: Orders | None = None) -> int:
        """Return the requests of all processes."""
        return reduce(or_, (orders or self.group.orders).order("poll"))

    def _gives_up(self, orders: Orders | None = None) -> bool:
        return bool(self._poll(orders)) or time.monotonic() >= self._late_s

    def _each_poll(self) -> int:
        return self.requests.asked | STOP * self.should_stop()

    def _each_forget(self) -> None:
        self.forget()

    def _each_give_tokens(self) -> float:
        tokens, self.tokens = self.tokens, 0.0
        return tokens

    def _take_tokens(self) -> None:
        """Count the tokens of all processes on the leader."""
        self.tokens = sum(self._order("give_tokens"))

    def _each_agree(self, requests: int) -> None:
        self.requests.agree_on(requests)

    def _each_exchange(self, is_hidden: bool) -> None:
        """Exchange the weights that `begin` has copied; `is_hidden`: begin to do so in a thread."""
        wait([self._has_ended])  # this process may still be in the last round
        self.is_hiding, hidden = True, self.group.hidden
        exchange = partial(hidden.lead, partial(self._carry_out, hidden), self._exchange_round)
        if not is_hidden:
            exchange()
            return
        ended = self._has_ended = Future()
        num_threads, has_begun = torch.get_num_threads(), threading.Event()

        def run() -> None:
            torch.set_num_threads(max(1, num_threads // THREADS_OF_STEPS))
            has_begun.set()
            try:
                with torch.no_grad():
                    exchange()
                ended.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised by the wait for the round
                ended.set_exception(error)

        threading.Thread(target=run, name="lowbw-round", daemon=True).start()
        has_begun.wait()
        torch.set_num_threads(num_threads)  # of this thread as before, and of threads to come

    # Rounds -----------------------------------------------------------------------------------------------------------

    def _take_round(self) -> bool:
        """Take part in a round, in the hidden one if there is one. Return False if this member gives up before.

        Raises:
            TimeoutError: the other members have not come in `max_wait_s`.
        """
        self.has_communicated, is_over = True, False
        while not is_over:
            if not self.is_hiding:
                self._begin_round()
            is_over = self._end_exchange()
            if self._round.quorum is None:
                break
        self._order("agree", asked := self._poll())
        if not (is_over or asked):
            raise TimeoutError(
                f"Too few groups have come to the end of round {self.num_averages + 1} in {self.max_wait_s:g} s: the "
                "other groups have ended the training, or are lost. If they come back later, start this group again "
                "from its last checkpoint, with a longer ElasticStrategy(timeout=...)."
            )
        if not is_over:
            self._repeat_last_step()
        return is_over

    def _begin_round(self, *, is_hidden: bool = False) -> None:
        """Begin a round with the present work; in a thread, the steps that follow belong to the next round."""
        if resized := self.buffers.changed():
            raise ConfigurationError(
                f"Step {self.step}: the module has registered, removed or resized buffers since the fit began: "
                f"{', '.join(resized)}. Give them their size before the fit, or name them in the module's "
                "_ddp_params_and_buffers_to_ignore."
            )
        names = list[str]()
        if not self.is_complete:
            self._restart_if_not_finite()
            now = self.buffers.now()
            self.site.look(self.params.by_name(), {name: now[name] for name in self.buffers.start})
            names = self.site.trained()
            self._order("begin", names, False)
        self._round = _Round(self._row(), names, self._steps)
        self.tokens, self._steps, self.has_communicated = 0.0, 0, True
        if is_hidden:
            self._begin_clock()
        with nullcontext() if is_hidden else self.group.ledger.waiting(CPU):
            self._order("exchange", is_hidden)

    def _exchange_round(self) -> None:
        """Ask for the members of a round, and exchange.

        If the round counts the processes of the group have the new anchor, and the weights are as before.
        """
        orders, this = self.group.hidden, self._round
        this.quorum = quorum = self.site.ask(this.row, partial(self._gives_up, orders))
        if quorum is None or quorum.healed is not None:
            return
        if quorum.weights:
            orders.order("bring", this.names)
        average = self.site.exchange(quorum, this.names, this.row.step, self._lr)
        this.has_work, this.counts = average is not None, self.membership.commit()
        if not this.counts:
            self.site.restore_residuals_()
        elif average is not None:
            self.membership.serve(None)
            self.site.move_(quorum, average)
            orders.order("hand_out", this.names)

    def _end_exchange(self) -> bool:
        """Wait for the end of a round, and apply it if it counts, or take the state of another member.

        Return whether local steps follow: else the round is repeated. They follow a round that counts, and a state that
        was taken in the middle of the other members' round.
        """
        self._conclude()
        quorum = self._round.quorum
        if quorum is None or quorum.healed is None:
            return self._round.counts
        self._heal(quorum.healed)
        is_awaited = len(quorum.members) > 1
        return self.is_complete or not (is_awaited or self._is_over())

    def settle(self) -> bool:
        """Apply the hidden round, or restore its work if the other groups do not come; return whether there was one."""
        if not self.is_hiding:
            return False
        self.healed, self.num_skipped, self._late_s = None, 0, time.monotonic() + SETTLE_S

        def section() -> None:
            self._conclude()
            self._repeat_last_step()

        with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive an evaluation
            self._lead(section)
        return True

    def _repeat_last_step(self) -> None:
        """Count the last step as not taken: a resume would take no step after it, and not have its round."""
        if self.step >= self.last_step and not self.is_complete:
            self.step, self.num_skipped = self.step - 1, self.num_skipped - 1

    def _row(self) -> Row:
        """Return the row of this member, without the anchor."""
        settings = {**cast("Method", self.method).settings(), **self.site.settings(), **self.settings}
        return Row(
            rounds=self.num_averages,
            step=self.step,
            tokens=self.tokens,
            state_bytes=float(sum(tensor.nbytes for tensor in self.site.shared().values())),
            settings=settings_text({**settings, "max_change_ratio": self.max_change_ratio}),
            run=self.run,
            is_new=self._is_new,
            has_ended=self.is_complete,
            change=self._change,
            usual=statistics.median(self._changes) if len(self._changes) == FEW_ROUNDS else 0.0,
            max_ratio=self.max_change_ratio or 0.0,
            wait_s=self._wait_s,
        )

    def _conclude(self) -> None:
        """Wait for the end of an exchange; apply the round if it counts, else restore the work."""
        with self.group.ledger.waiting(CPU):
            while not wait([self._has_ended], POLL_S).done:
                self.membership.note()
                self._order("poll")  # which the other processes wait for
        self.is_hiding, this = False, self._round
        self._has_ended.result()
        steps, this.steps = this.steps, 0
        if this.counts:
            self._is_unsure = False
            self._apply()
            if not self._steps:
                self._begin_clock()
        else:
            self._is_unsure = self._is_unsure or this.has_work
            self.tokens, self._steps = self.tokens + this.row.tokens, self._steps + steps
            self.membership.serve(self.shared_state)

    def _apply(self) -> None:
        """Apply a round that counts; the anchor has been moved."""
        this, quorum = self._round, self._round.quorum
        assert quorum is not None
        rows, weights = dict(zip(quorum.members, quorum.rows, strict=True)), quorum.weights
        self._is_new = False
        if not self.num_averages:
            self.run = rows[judge_of(rows)].run
        self.membership.serve(None)
        latest = max(row.step for row in rows.values())
        before, self.step = self.step, int(min(self.step + latest - this.row.step, self.last_step))
        self.num_skipped += self.step - before
        if this.has_work:
            self._order("apply", this.names, self._steps > 0)
            if latest >= self.last_step:  # steps since the begin of the round come after the end
                self._steps = 0
            self.num_averages += 1
            self.tokens_seen += sum(row.tokens for row in compress(rows.values(), weights))
            # A new mapping: the old one may be shared.
            self.contributed = self.contributed | dict.fromkeys(compress(rows, weights), self.num_averages)
            left_out = [name for name, weight in zip(rows, weights, strict=True) if rows[name].tokens and not weight]
            if quorum.members[quorum.rank] in left_out:
                self._order("forget")  # the momentum has the same direction
            else:
                self._changes.append(self._change)
            if left_out:
                _logger.warning(
                    "Round %d: the weights of %s have moved more than %g times as far in a step as is usual, and are "
                    "left out. Look at its learning rate and its data; ElasticStrategy(max_change_ratio=None) takes "
                    "all changes.",
                    *(self.num_averages, " and ".join(left_out), self.max_change_ratio),
                )
            self._tell(quorum)
        self._offer()

    def _tell(self, quorum: Quorum) -> None:
        """Log a round that counts, in one line, and keep its numbers for loggers."""
        now_s, (num_bytes, _), waited_s = time.monotonic(), self.group.ledger.of_slow_network, self.site.wait_s
        slowest = min(zip(quorum.rows, quorum.members, strict=True), key=lambda each: each[0].wait_s)[1]
        _logger.info(
            "Round %d: groups %s; %.1f s, with a wait of %.1f s (in the last round for %s); %.1f MB sent%s.",
            *(self.num_averages, ", ".join(quorum.members), now_s - self._round_s, waited_s, slowest),
            *((num_bytes - self._num_bytes) / 1e6, "" if self._last_loss is None else f"; loss {self._last_loss:.4g}"),
        )
        self.group.num_participants = num_groups = len(quorum.members)
        seconds = {"elastic/round_s": now_s - self._round_s, "elastic/wait_s": waited_s}
        self.round_metrics = seconds | {"elastic/groups": float(num_groups)}
        self._round_s, self._num_bytes, self._wait_s = now_s, num_bytes, waited_s

    def _restart_if_not_finite(self) -> None:
        """Go on from the anchor if local steps have left an inf or NaN, without their tokens and momentum."""
        self._change = math.sqrt(sum(self._order("measure"))) / max(1, self._steps)
        if not math.isfinite(self._change):
            self._change = 0.0
            _logger.warning(
                "Step %d has left an inf or NaN: the work of this group in this round is left out. If this repeats, "
                "lower the learning rate or clip the gradients, and start the groups again from their checkpoints.",
                self.step,
            )
            self._order("apply", [*self._known], False)
            self._order("forget")
            self.tokens = 0.0
            self.site.restore_residuals_()

    # State ------------------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Let members that are behind take the state, at any time until the end of the next round."""
        self._others = on_cpu(self.share() if self.healed is None else self.healed)
        self.membership.serve(self.shared_state)

    def shared_state(self) -> dict[str, Any]:
        """Return the state that a member that is behind takes: "tensors", not copied, and plain values."""
        return {
            "tensors": self.site.shared(),
            "velocity": list(map(self.site.replica.params.name_of, self.site.replica.velocity)),
            **{name: getattr(self, name) for name in EQUAL},
            "step": self.step,
            "steps": self._steps or self._round.steps,
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
            self.site.restore_residuals_()
        self.membership.serve(None)
        names = [*self._known]
        self._order("begin", names, True)
        self.site.take_(shared["tensors"], shared["velocity"])
        self._order("hand_out", names)
        self._order("apply", names, bool(self.tokens))
        self._steps = shared["steps"]
        self._is_unsure = False
        self._wait_from_now()
        self._ends_s = time.monotonic() + shared["left_s"]
        for key in (*EQUAL, "step"):
            setattr(self, key, shared[key])
        self.healed = shared["others"]
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
        equal = {name: getattr(self, name) for name in EQUAL}
        site = {} if self.site is None else {"site": self.site.state_dict()}
        return {**super().state_dict(), **site, "start": {}, "elastic": equal, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, value in state.get("elastic", {}).items():
            setattr(self, name, value)
        self.tokens = state["tokens"] if state.get("own") else 0.0  # tokens without the work count for nothing
        self._known, self.buffers.is_begun = set(), False

    @torch.no_grad()
    def _load_own(self, state: Mapping[str, Any]) -> None:
        # The model has the weights of the checkpoint, which is the anchor: the site has it exactly, and hands it out.
        self.replica.start = {}
        self.replica.keep_starts()
        device_of(self.params.device).join(COPY, on_host=True)
        shown = {self.params.name_of(p): start for p, start in self.replica.start.items()}
        super()._load_own({**state, "start": shown})
        if self.site is not None and "site" in state:
            self.site.look(self.params.by_name(), {})  # parameters may have been added since it was made
            self.site.load_state_dict(state["site"])


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
