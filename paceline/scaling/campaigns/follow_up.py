"""What a suspicion asks for: further rounds, as many as are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.layout_checks import layout_problems
from paceline.scaling.analysis.analysis import AnalysisContext, analyse, next_groups
from paceline.scaling.campaigns.record import Campaign, Group, PlannedRound
from paceline.scaling.campaigns.sub_cluster import RoundHosts, TrialResult, measured


def with_follow_up(
    campaign: Campaign,
    trials: Mapping[RoundHosts, TrialResult],
    most: int,
    context: AnalysisContext,
) -> Campaign | None:
    """The campaign with the next rounds that the analysis asks for; None when it asks for none.

    `most` bounds such rounds, those of earlier calls among them. Sub-clusters on which the layout
    cannot run are left out.
    """
    measured_groups = measured(trials.values(), campaign.whole_node)
    followed = [round_ for round_ in campaign.plan if round_.purpose != "plan"]
    room = most - len(followed)
    if room <= 0 or not any(group.samples_per_s for group in measured_groups):
        return None
    planned = {group for round_ in followed for group in round_.groups}
    step = next_groups(
        analyse(measured_groups, replace(context, scaling=campaign.scaling)), planned
    )
    if step is None:
        return None
    purpose, rounds = step
    added: list[PlannedRound] = []
    for groups in rounds:
        for nodes in sorted({len(hosts) for hosts in groups}):
            alike = tuple(g for g in groups if len(g) == nodes and can_run(campaign, g))
            if alike and len(added) < room:
                added.append(
                    PlannedRound(
                        number=len(campaign.plan) + len(added) + 1,
                        purpose=purpose,
                        nodes=nodes,
                        devices_per_node=campaign.whole_node,
                        groups=alike,
                    )
                )
    if not added:
        return None
    return campaign.model_copy(update={"plan": (*campaign.plan, *added)})


def can_run(campaign: Campaign, hosts: Group) -> bool:
    """Whether the layout fits so many nodes."""
    return not layout_problems(campaign.spec(hosts, campaign.whole_node).parallel)
