"""The tool `torch`: PyTorch's profiler in training programs, and traces from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import PROFILES_FOLDER
from paceline.profiles.attribution import breakdowns, critical_path, top_kernels
from paceline.profiles.kineto import read_timeline
from paceline.profiles.profile import Profile, profile_of, refuse_duplicate_ranks
from paceline.profiles.tools import wrap_ranks

ENDINGS = (".json.gz", ".json")
RUN_FILES = "rank-*.trace.json.gz"
"""Files of a run, written by the native trainer or by the hook."""
HOOKED_ENGINES = ("command", "deepspeed_chat", "hf_trainer", "megatron", "torchtitan")
"""Engines whose ranks are Python programs that can be profiled by an optimizer hook."""
HOOK = Path(__file__).with_name("step_hook_program.py")
HOOK_FOLDER = f"{PROFILES_FOLDER}/hook"


def unsupported(spec: RunSpec) -> str | None:
    """Return why the engine cannot be profiled: containers and own scripts take no hook."""
    if spec.engine not in ("native", *HOOKED_ENGINES):
        return (
            f"engine {spec.engine} cannot be profiled from here; enable its own profiler and read "
            "the trace with --from"
        )
    if spec.engine != "native" and spec.profile is not None and spec.profile.first_step == 1:
        return f"the start of the first step of engine {spec.engine} is unknown; use --steps 2-4"
    return None


def attach(job: Job, spec: RunSpec) -> Job:
    """Return the job with a hook for the profiler; the native trainer attaches its own."""
    assert spec.profile is not None
    if spec.engine == "native":
        return job
    request = spec.profile
    variables = {
        "PYTHONPATH": f"{{folder}}/{HOOK_FOLDER}{{paths}}",
        "PACELINE_PROFILED_RANKS": ",".join(map(str, request.ranks)),
        "PACELINE_PROFILED_STEPS": f"{request.first_step}-{request.last_step}",
    }
    hook = {f"{HOOK_FOLDER}/sitecustomize.py": HOOK.read_text(encoding="utf-8")}
    return wrap_ranks(job, request.ranks, env=variables, files=hook)


def read(folder: Path) -> Profile:
    """Return the profile of a run folder; raises UserError for missing or incomplete traces."""
    traces = sorted((folder / PROFILES_FOLDER).glob(RUN_FILES))
    if not traces:
        raise UserError(
            str(folder / PROFILES_FOLDER),
            "holds no trace: the run ended before its profiled steps, its program uses no PyTorch "
            "optimizer, or it starts Python with -I, -E or another PYTHONPATH",
            remedy="see logs/; --steps A-B profiles earlier steps",
        )
    return _profile(traces, [str(path.relative_to(folder)) for path in traces])


def read_file(path: Path) -> Profile:
    """Return the profile of one trace, or of a folder with one trace per rank."""
    if not path.is_dir():
        return _profile([path], [str(path)])
    traces = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
    if not traces:
        raise UserError(str(path), "holds no trace", allowed=", ".join(f"*{e}" for e in ENDINGS))
    return _profile(traces, [str(file) for file in traces])


def _profile(paths: Sequence[Path], names: Sequence[str]) -> Profile:
    timelines = [read_timeline(path) for path in paths]
    refuse_duplicate_ranks(names, [timeline.rank for timeline in timelines])
    return profile_of(
        "torch",
        names,
        [each for timeline in timelines for each in breakdowns(timeline)],
        kernels=top_kernels(timelines),
        critical_path=critical_path(timelines),
    )
