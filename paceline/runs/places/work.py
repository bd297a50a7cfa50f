"""Work on parts, side by side, and what ends it: Ctrl-C, the end of the allocation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from paceline.core.errors import PacelineError, UserError
from paceline.core.hardware import Cluster
from paceline.machines import slurm
from paceline.machines.host_lists import UnknownJobError, from_allocation
from paceline.runs.places.part import Part

ASK_AGAIN_S = 2.0


def side_by_side(
    parts: Sequence[Part], stop: Event, work: Callable[[Part], None]
) -> bool:  # fmt: skip
    """Call `work` on every part, each in a thread; whether the user has broken it off.

    Ctrl-C sets `stop`, by which the threads end their runs. So does the first exception, which is
    raised again when all have ended.
    """
    interrupted = False
    with ThreadPoolExecutor(len(parts)) as pool:
        runs = [pool.submit(work, part) for part in parts]
        pending: set[Future[None]] = {*runs}
        while pending:
            try:
                done, pending = wait(pending, return_when=FIRST_EXCEPTION)
                if any(run.exception() for run in done):
                    stop.set()
            except KeyboardInterrupt:
                interrupted = True
                stop.set()
    for run in runs:
        run.result()
    return interrupted


def allocation_fault(cluster: Cluster) -> str | None:
    """Why the Slurm job that all runs are steps of has no hosts any more; None while it has.

    A Slurm that does not answer once, or gives no clear answer twice, is no fault of the job.
    """
    job = cluster.slurm.allocation if cluster.launcher == "slurm" else None
    if job is None:
        return None
    for pause_s in (ASK_AGAIN_S, 0.0):
        try:
            from_allocation(job)
        except UserError as fault:
            return str(fault)
        except UnknownJobError as fault:
            return f"job {job} is unknown to Slurm: {fault}"
        except PacelineError:
            time.sleep(pause_s)
        else:
            return None
    return None


def abandon_left(folders: Sequence[Path]) -> list[str]:
    """Cancel the jobs that runs whose controllers died have left in Slurm's queue; their numbers."""
    return [number for folder in folders if (number := slurm.abandon(folder))]
