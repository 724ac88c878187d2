"""torchrun for the processes of one group, which start at once: a server imports their modules, and forks them.

    python -m lightning_lowbw.elastic.run --nproc-per-node 1 --max-restarts 100 train.py ...

Options, messages, signals and restarts are the same as with torchrun, whose agent does all the work. Only a rendezvous
on this host is the default, and SIGTERM asks the processes to end if their agent was killed. The server imports the
modules of a training, which takes some ten seconds of a processor; it runs no kernel and does not touch a device.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from multiprocessing import forkserver

import numpy as np
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

# The server leaves out a module that cannot be imported. Triton is not here, because it looks for a device.
PRELOADED = [
    "torch.distributed.run",
    "lightning_lowbw.kernels.cpu",
    "torchft.coordination",
    "torch._dynamo",  # by the first step of an optimizer
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",  # by Lightning's DDPStrategy
]


def end_with_the_agent() -> None:
    """Ask this process to end after its agent was killed: it would train on, with a name that a new group needs."""
    agent = multiprocessing.parent_process()
    assert agent is not None
    agent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def run_script(is_module: bool, script: str, *arguments: str) -> None:
    """Run a script, or a module, in a process that the server has forked, as Python would in a new one."""
    os.setsid()  # Ctrl-C reaches the agent alone, which passes it on
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_the_agent, name="lowbw-agent", daemon=True).start()
    np.random.seed()  # else all processes, also after a restart, draw the numbers of the server
    multiprocessing.set_start_method(None, force=True)  # workers of a DataLoader start as in any program
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a kill loses no line
    sys.argv = [script, *arguments]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # without an error torch's agent would wait for ever for a result
    except SystemExit as end:
        if end.code not in (None, 0):  # the same
            raise
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves these out
    agent = multiprocessing.parent_process()
    if agent is not None and not agent.is_alive():  # torch would wait for ever for the agent to take the result
        os._exit(0)


def main() -> None:
    """Start the processes of a group, and start them all again if one has failed."""
    options = parse_args(
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1", *sys.argv[1:]]
    )
    config, *_ = config_from_args(options)
    config.start_method = "forkserver"
    multiprocessing.set_forkserver_preload(PRELOADED)
    # The server ignores a signal to all processes of a service, so that the processes of the group have time to save.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGTERM, before)
    try:
        elastic_launch(config, run_script)(options.module, options.training_script, *options.training_script_args)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.get_first_failure()[1].exitcode)


if __name__ == "__main__":
    main()
