"""What engine `nemo` is told beyond the recipe, and the variables of the published procedure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.core.job import RUN_FOLDER
from paceline.core.run import RunSpec
from paceline.files.home import home_path

VERSION, IMAGE = "25.01", "nvidia+nemo+24.09.sqsh"
"""GSW_VERSION of the recipe, and the image that its setup.sh leaves in STAGE_PATH."""
TRACE_STEPS = 10
"""What the recipe trains, whatever it is asked for, while NCCL is traced."""
SIZES = {"8b": (32, 4096), "70b": (80, 8192), "405b": (126, 16384)}
"""MODEL_SIZE: layers and hidden size of Llama 3.1."""
PROFILE = {
    "profile_start_step": "RUN_CONF_PROFILE_START_STEP",
    "profile_stop_step": "RUN_CONF_PROFILE_STOP_STEP",
    "profile_ranks": "RUN_CONF_PROFILE_RANKS",
    "profile_gpu_metrics": "RUN_CONF_PROFILE_GPU_METRICS",
    "profile_cpu": "RUN_CONF_PROFILE_CPU",
}
"""Settings that go with `profile`, and the recipe's variables for them."""
KNOWN = ("form", "stage_path", "script", "image", "dataset", "profile", "nccl_trace", *PROFILE)


def stage_path(spec: RunSpec) -> Path:
    """STAGE_PATH: the folder of image, tokenizer and data."""
    text = str(spec.engine_settings.get("stage_path", ""))
    return home_path("engine_settings.stage_path", text).absolute()


def launch_script(spec: RunSpec) -> Path | None:
    """The launch.sh of somebody else that is to be submitted; None for our own."""
    script = spec.engine_settings.get("script")
    return home_path("engine_settings.script", str(script)).absolute() if script else None


def staged_data(spec: RunSpec) -> bool:
    """Whether our launch.sh trains on the data set of STAGE_PATH, not on mock data."""
    return bool(spec.engine_settings.get("dataset"))


def image(spec: RunSpec) -> str:
    """The container's image: as named, else of the cluster, else the one in STAGE_PATH."""
    named = spec.engine_settings.get("image") or spec.cluster.slurm.container_image
    return str(named or stage_path(spec) / IMAGE)


def model_size(spec: RunSpec) -> str | None:
    """MODEL_SIZE of the recipe's model; None for one that is no Llama 3.1."""
    sizes = (getattr(spec.model, "num_layers", 0), spec.model.hidden_size)
    return next((name for name, size in SIZES.items() if size == sizes), None)


def result_folder(spec: RunSpec) -> str:
    """results/GSW_VERSION/DTYPE/MODEL_SIZE/JOB_TOTAL_GPUS as the recipe has it, in the run."""
    version = f"{VERSION}-nccl-trace" if spec.engine_settings.get("nccl_trace") else VERSION
    size = model_size(spec) or spec.recipe
    return f"results/{version}/{spec.training.dtype}/{size}/{spec.world_size}"


def variables(spec: RunSpec) -> dict[str, str]:
    """What launch.sh and what it starts read, by the recipe's names."""
    layout, training = spec.layout, spec.training
    return {
        "DTYPE": training.dtype,
        "MODEL_SIZE": model_size(spec) or spec.recipe,
        "STAGE_PATH": str(stage_path(spec)),
        "GSW_VERSION": VERSION,
        "JOB_TOTAL_GPUS": str(spec.world_size),
        "RUN_CONF_IMAGE": image(spec),
        "RUN_CONF_RESULT_DIR": f"{RUN_FOLDER}/{result_folder(spec)}",
        "TP": str(layout.tp),
        "PP": str(layout.pp),
        "VP": str(layout.vp) if layout.vp > 1 else "null",
        "CP": str(layout.cp),
        "GBS": str(training.global_batch),
        "MAX_STEPS": str(training.steps),
        "SEQ_LEN": str(training.seq_len),
        **dict(_switches(spec)),
    }


def _switches(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """The recipe's switches of its profilers, where they are set."""
    settings = spec.engine_settings
    if settings.get("profile"):
        yield "ENABLE_PROFILE", "true"
    if settings.get("nccl_trace"):
        yield "ENABLE_NCCL_TRACE", "true"
    for name, variable in PROFILE.items():
        value = settings.get(name)
        if value is not None:
            yield variable, str(value).lower() if isinstance(value, bool) else str(value)
