"""Checks of the drivers: that a payload fits the peers, the model and the optimizer, and that all ranks train alike."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.agreement import agree, digest, failing_together
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import checksum
from lightning_lowbw.payloads.params import Params, is_compressible
from lightning_lowbw.payloads.payload import Payload
from lightning_lowbw.schedules.schedule import Schedule

LAUNCHED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # by torchrun, srun, mpirun
LITTLE_KEPT = 0.5  # fraction of the elements: a user hardly means to keep back less than this, and to send the rest
PLAIN = (bool, int, float, str, type(None))  # types of values that can be compared between ranks
# Entries of torch's optimizers that a method makes different on each rank; other entries may be scratch space.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")
# Optimizers that share their work between ranks: of torch, of Muon's reference code and of modded-nanogpt.
COMMUNICATING = ("ZeroRedundancyOptimizer", "MuonWithAuxAdam", "DistAdam")


# Checks of one rank ---------------------------------------------------------------------------------------------------


def warn_alone() -> None:
    """Warn that there is only one rank, in a plain loop; a strategy says it itself."""
    found = [f"{name} is {number}" for name in LAUNCHED if (number := os.environ.get(name, "1")) not in ("", "1")]
    started = f" {found[0]}, so other processes were started, and each trains alone." if found else ""
    missing = "with one rank" if dist.is_initialized() else "without a process group"
    warnings.warn(
        f"attach {missing}: there is no other rank to communicate with, so this trains as without it.{started} Start "
        "several ranks, as with torchrun, and call torch.distributed.init_process_group in each before attach.",
        stacklevel=5,  # the caller of `Method.attach`
    )


def warn_of_compression(what: Payload, when: Schedule, params: Params, peers: Peers) -> None:
    """Warn, on rank 0, if a payload compresses little.

    Either most of the elements are sent: perhaps a density was given as a sparsity, or the reverse. Or trained
    parameters are float64 or complex: these are sent whole.
    """
    if what.sends_all or peers.num_participants == 1 or peers.rank > 0:
        return
    stairs = when.stairs
    densities = [1.0 - each for each in stairs if each] if stairs else [what.density]  # 0 is a dense stair: it is meant
    sent = [each for each in densities if each > 1.0 - LITTLE_KEPT]
    if sent and what.takes_density:
        given = f"sparsity={list(stairs)}" if stairs else f"density={what.density}"
        warnings.warn(
            f"{given}: {', '.join(f'{100.0 * each:.4g} %' for each in sent)} of the elements are sent. Sparsity is the "
            "fraction that is kept back, density the fraction that is sent.",
            stacklevel=5,  # the caller of `Method.attach`
        )

    wide = [name for name, each in params.by_name().items() if each.requires_grad and not is_compressible(each)]
    if wide:
        is_one = len(wide) == 1
        which = f"Parameter {wide[0]!r} is" if is_one else f"{len(wide)} parameters, such as {wide[0]!r}, are"
        warnings.warn(
            f"{which} float64, complex or views with gaps: {'it is' if is_one else 'they are'} sent whole. "
            "float32, bfloat16 and float16 are compressed, as with Trainer(precision='32-true').",
            stacklevel=5,  # the caller of `Method.attach`
        )


def warn_if_incomplete(optimizer: Optimizer, when: Schedule) -> None:
    """Warn that sparse steps use error feedback without a correction; called on rank 0, if that is the case."""
    advice = "" if when.begin_step else "; a dense phase (rampup_begin_step > 0) helps"
    warnings.warn(
        f"{type(optimizer).__name__}: gradients are compressed with error feedback only. Elements that are "
        "kept back reach this optimizer late and in bursts, which costs some accuracy for Adam-type optimizers"
        f"{advice}. torch.optim.SGD, Adam and AdamW have corrections.",
        stacklevel=5,  # the caller of `Method.attach`
    )


def refuse_second_weights(optimizer: Optimizer) -> None:
    """Raise ConfigurationError if an optimizer has a second set of weights, which no average would include."""
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigurationError(
            f"{type(optimizer).__name__} has train() and eval(), which exchange the weights for a second set that it "
            "keeps; methods that average weights would average one of the two. Take one that exchanges gradients, such "
            "as 'dgc' or 'int8'."
        )


def refuse_shared_steps(optimizer: Optimizer) -> None:
    """Raise ConfigurationError if an optimizer gathers results of the other ranks in its own step.

    Between averages each rank steps with its own gradient, so a gathered result would come from the gradient of one
    rank.
    """
    if any(cls.__name__ in COMMUNICATING for cls in type(optimizer).__mro__):
        raise ConfigurationError(
            f"{type(optimizer).__name__} communicates in its step, and where weights are averaged each rank steps with "
            "gradients of its own. Take an optimizer that does not communicate, or a method that exchanges gradients, "
            "such as 'dgc' or 'int8'."
        )


# Checks between all ranks ---------------------------------------------------------------------------------------------


def plain_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return the named values that can be compared between ranks; a tensor of one element becomes a number."""
    numbers = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in values.items()
    }
    return {name: value for name, value in numbers.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    # A device with a number, such as "cuda:1", differs between ranks.
    return isinstance(value, PLAIN) and not re.fullmatch(r"(cuda|xpu|hpu|mps|npu):\d+", str(value))


def agree_on_model(
    named_parameters: Iterable[tuple[str, Parameter]],
    group: dist.ProcessGroup | None = None,
    *,
    compares_weights: bool = False,
) -> None:
    """Check that the model is the same on all ranks; DDP's own error about models that differ does not say where.

    Collective: all ranks of the group, blocking.

    Args:
        named_parameters: the parameters of the model.
        group: None is the world.
        compares_weights: whether the weights must be equal already, because no broadcast makes them equal.

    Raises:
        DisagreementError: on all ranks; names, shapes, dtypes, layouts, `requires_grad` or weights differ.
    """
    parameters = list(named_parameters)
    with failing_together(group):  # a lazy layer has no shape yet
        settings: dict[str, object] = {
            f"parameter {name}": (tuple(p.shape), str(p.dtype), p.stride(), "trains" if p.requires_grad else "frozen")
            for name, p in parameters
        }
        if compares_weights:
            plain = {name: p for name, p in parameters if type(p) is Parameter}  # not frozen weights in few bits
            settings |= {f"weights of {name} (init_sync=False)": digest([p])[:8] for name, p in plain.items()}
    agree("model", settings, group)


def agree_on_optimizers(
    optimizers: Sequence[Optimizer],
    named_parameters: Iterable[tuple[str, Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    topic: str = "optimizers",
) -> None:
    """Check that the optimizers, their param groups and the plain values in these are the same on all ranks.

    Collective: all ranks of the group, blocking.

    Args:
        optimizers: the optimizers of the model.
        named_parameters: the parameters of the model.
        group: None is the world.
        topic: the subject of the error message.

    Raises:
        DisagreementError: on all ranks.
    """
    names = {id(parameter): name for name, parameter in named_parameters}
    settings: dict[str, object] = {"optimizers": [type(optimizer).__name__ for optimizer in optimizers]}
    for number, optimizer in enumerate(optimizers):
        for index, of_group in enumerate(optimizer.param_groups):
            prefix = f"optimizer {number}, param group {index}"
            settings[f"{prefix}, parameters"] = [names.get(id(p), tuple(p.shape)) for p in of_group["params"]]
            settings |= {f"{prefix}, {key}": value for key, value in plain_values(of_group).items()}
    agree(topic, settings, group)


def agree_on_beginning(
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    step: int,
    group: dist.ProcessGroup | None,
    *,
    compares_weights: bool,
    compares_state: bool,
) -> None:
    """Check, at the first step after `attach` or after a state was loaded, that the ranks are at the same step.

    Their weights must be equal, except between two averages. At step 0 the states of the optimizers must be equal, too.
    A method makes them different later, and then each rank needs its own `worker.state_dict()` to go on.

    Collective: all ranks of the group, blocking.

    Args:
        parameters: the parameters of the optimizer, by name.
        step: optimizer steps completed.
        group: None is the world.
        compares_weights: whether the weights must be equal.
        compares_state: whether the optimizer's state must be equal.

    Raises:
        DisagreementError: on all ranks.
    """
    with failing_together(group):
        settings: dict[str, object] = {"worker.step": step}
        if compares_weights:
            settings |= _checksums("checksum of {}", parameters)
        if compares_state:
            entries = {name: optimizer.state.get(p) for name, p in parameters.items()}
            for moment in MOMENTS:
                of_moment = {name: e[moment] for name, e in entries.items() if isinstance(e, Mapping) and moment in e}
                settings |= _checksums(f"checksum of the optimizer's {moment} of {{}}", of_moment)
    agree(
        "first step (all begin with the same weights; to resume, each rank loads its own worker.state_dict(), after "
        "the model and the optimizer)",
        settings,
        group,
    )


def _checksums(title: str, tensors: Mapping[str, object]) -> dict[str, object]:
    """Return a checksum of each plain tensor by name; waits for a GPU once."""
    plain = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.layout == torch.strided}
    if not plain:
        return {}
    device = next(iter(plain.values())).device
    sums = torch.stack([torch.as_tensor(checksum([tensor]), device=device) for tensor in plain.values()])
    return {title.format(name): number for name, number in zip(plain, sums.tolist(), strict=True)}


def compare_batches(
    batch: int, step: int, group: dist.ProcessGroup | None, settings: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Compare the batches of the ranks: a rank that has left out a step, or taken one more, would mix batches or hang.

    Collective: all ranks of the group, blocking.

    Args:
        batch: the number of the batch in the run.
        step: optimizer steps completed.
        group: None is the world.
        settings: more about this rank's place.

    Raises:
        DisagreementError: on all ranks; they are at different places.
    """
    topic = (
        "batch (of the run) of an optimizer step. A rank in a later one has left out optimizer.step(), and all must "
        "take the same steps. Before the exchange .grad is a rank's own: never branch on it, to skip a step or to clip"
    )
    agree(topic, {"batch": batch, "optimizer steps": step, **settings}, group)


def agree_on_end(step: int, parameters: Mapping[str, Parameter], group: dist.ProcessGroup | None) -> None:
    """Check, after the last step, that the ranks have taken the same steps, and have the same weights.

    Collective: all ranks of the group, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    checksums = _checksums("checksum of {}", parameters)
    agree("end of the training", {"worker.step": step, **checksums}, group)
