"""BigScience's 1.3B ramp-up on both kinds of node of its study, and its schedules made by hand."""

from __future__ import annotations

from functools import cache

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.layouts.rampup.plan import RampOptions, RampPlan, plan_ramp_up
from paceline.layouts.rampup.timing import RampContext, ramp_context

SCHEDULE_16GB = """
| NNODES  |   BS |  MBS |
| ------: | ---: | ---: |
| 16      |   32 |    1 |
| 16      |   64 |    2 |
| 16      |  128 |    4 |
| 32      |  256 |    4 |
| 64      |  512 |    4 |
"""
SCHEDULE_32GB = "NNODES,BS,MBS\n8,32,1\n16,64,1\n32,128,1\n"


def question(device: str, *overrides: str) -> EstimateRequest:
    """Nodes of 4 V100 on Omni-Path, as on Jean Zay in 2021."""
    return EstimateRequest(
        "gpt-1b3", device, 4, "ramp-up", overrides, 4, "NVLink2", "Omni-Path-100", "softmax"
    )


@cache
def setting(device: str = "V100-32GB", *overrides: str) -> RampContext:
    """The recipe on such nodes."""
    return ramp_context(question(device, *overrides), shipped_evidence())


@cache
def planned(options: RampOptions, device: str = "V100-32GB", *overrides: str) -> RampPlan:
    """A plan of it."""
    return plan_ramp_up(setting(device, *overrides), options)
