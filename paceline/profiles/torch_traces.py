"""The tool `torch`: PyTorch's own profiler in the native trainer, and traces from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.profiling import PROFILES_FOLDER
from paceline.core.run import RunSpec
from paceline.profiles.attribution import breakdowns, critical_path, top_kernels
from paceline.profiles.kineto import read_timeline
from paceline.profiles.profile import Profile, profile_of, refuse_doubles
from paceline.profiles.wrapping import wrapped

ENDINGS = (".json.gz", ".json")
OF_RUN = "rank-*.trace.json.gz"
"""What the native trainer writes, and the hook in a foreign program."""
HOOKED = ("command", "deepspeed_chat", "hf_trainer", "megatron", "torchtitan")
"""Engines whose ranks are Python programs that get a hook behind their optimizer's steps."""
HOOK = Path(__file__).with_name("step_hook_program.py")
HOOK_FOLDER = f"{PROFILES_FOLDER}/hook"


def unsupported(spec: RunSpec) -> str | None:
    """Engines that run in a container, or start from scripts of their own, take no hook."""
    if spec.engine not in ("native", *HOOKED):
        return (
            f"engine {spec.engine} is not told to profile itself: switch on its own profiler, and "
            "read the trace by --from"
        )
    if spec.engine != "native" and spec.profile is not None and spec.profile.first_step == 1:
        return f"the first step of engine {spec.engine} has no begin that can be seen: --steps 2-4"
    return None


def attached(job: Job, spec: RunSpec) -> Job:
    """The trainer attaches its own profiler; any other program gets one by a hook in its Python."""
    assert spec.profile is not None
    if spec.engine == "native":
        return job
    asked = spec.profile
    variables = {
        "PYTHONPATH": f"{{folder}}/{HOOK_FOLDER}{{paths}}",
        "PACELINE_PROFILED_RANKS": ",".join(map(str, asked.ranks)),
        "PACELINE_PROFILED_STEPS": f"{asked.first_step}-{asked.last_step}",
    }
    hook = {f"{HOOK_FOLDER}/sitecustomize.py": HOOK.read_text(encoding="utf-8")}
    return wrapped(job, asked.ranks, env=variables, files=hook)


def read(folder: Path) -> Profile:
    """The traces of a run folder; raises UserError where there are none or one is torn."""
    traces = sorted((folder / PROFILES_FOLDER).glob(OF_RUN))
    if not traces:
        raise UserError(
            str(folder / PROFILES_FOLDER),
            "holds no trace: the run ended before its profiled steps did, its program takes none "
            "by an optimizer of PyTorch, or it starts Python with -I, -E or another PYTHONPATH",
            remedy="logs/ says why; --steps A-B profiles earlier ones",
        )
    return _profile(traces, [str(path.relative_to(folder)) for path in traces])


def read_file(path: Path) -> Profile:
    """One trace, or all of a folder, one a rank."""
    if not path.is_dir():
        return _profile([path], [str(path)])
    traces = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
    if not traces:
        raise UserError(str(path), "holds no trace", allowed=", ".join(f"*{e}" for e in ENDINGS))
    return _profile(traces, [str(file) for file in traces])


def _profile(paths: Sequence[Path], names: Sequence[str]) -> Profile:
    timelines = [read_timeline(path) for path in paths]
    refuse_doubles(names, [timeline.rank for timeline in timelines])
    return profile_of(
        "torch",
        names,
        [each for timeline in timelines for each in breakdowns(timeline)],
        kernels=top_kernels(timelines),
        critical_path=critical_path(timelines),
    )
