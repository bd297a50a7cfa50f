"""Staging: all assets of an plan at the same time, each after those that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.errors import PacelineError, SystemFaultError
from paceline.staging.asset_stage import AssetStage, is_listed, listing_of
from paceline.staging.disk_space import disk_space, require_space
from paceline.staging.download_log import DownloadLog, StageWatcher
from paceline.staging.ending import StageEnd, StageEndedError
from paceline.staging.plan import PlannedAsset, StagingPlan
from paceline.staging.sources.container import container_runtime
from paceline.staging.sources.hub import is_offline
from paceline.staging.transfer import SourceListing

USUAL_JOBS = 4


@dataclass(frozen=True)
class Stager:
    """How an plan is staged; `tell` is called with what a user should know meanwhile."""

    jobs: int = USUAL_JOBS
    runtime: str | None = None
    watch: StageWatcher = lambda progress: None
    tell: Callable[[str], None] = lambda sentence: None
    ended: StageEnd = field(default_factory=StageEnd)

    def stage(self, plan: StagingPlan) -> None:
        """Stage what is not; what fails leaves the others to go on, and is raised at the end.

        Raises UserError and SystemFaultError: before anything is fetched where a source refuses to
        list its files or the room is too small.
        """
        lacking = [part for part in plan.assets if part.state != "staged"]
        runtime = self._runtime(lacking)
        listings = self._listings(lacking)
        sized = _with_sizes(plan, listings)
        largest = [f.bytes or 0 for listing in listings.values() for f in listing.files]
        require_space(sized, disk_space(plan.root), max(largest, default=0))
        log = DownloadLog(self.watch)
        for part in sized.assets:
            log.add(part.asset.name, part.total_bytes)
            if part.state == "staged":
                log.present(part.asset.name, part.here_bytes)
                log.phase(part.asset.name, "staged")
        self._stage_all(plan, lacking, listings, runtime, log)

    def sized(self, plan: StagingPlan) -> StagingPlan:
        """The plan with the sizes that sources tell now; raises as `stage` does."""
        lacking = [part for part in plan.assets if part.state != "staged"]
        return _with_sizes(plan, self._listings(lacking))

    def _stage_all(
        self,
        plan: StagingPlan,
        lacking: list[PlannedAsset],
        listings: dict[str, SourceListing],
        runtime: str | None,
        log: DownloadLog,
    ) -> None:
        folders = {part.asset.name: part.folder for part in plan.assets}
        done: dict[str, Future[None]] = {}
        with (
            ThreadPoolExecutor(self.jobs, "fetch") as files,
            ThreadPoolExecutor(max(1, len(lacking)), "asset") as assets,
        ):
            for part in lacking:
                stage = AssetStage(
                    part.asset,
                    part.folder,
                    {name: folders[name] for name in part.asset.needs},
                    listings.get(part.asset.name),
                    runtime,
                    files,
                    log,
                    self.ended,
                    self.tell,
                )
                before = [done[name] for name in part.asset.needs if name in done]
                done[part.asset.name] = assets.submit(_after, before, stage)
            self._wait(done.values())
        _raise_faults(done)

    def _wait(self, answers: Iterable[Future[Any]]) -> None:
        """Wait for all; an interrupt ends what they do."""
        try:
            wait(answers)
        except BaseException:  # an interrupt too must end what the threads do
            self.ended.set()
            raise

    def _runtime(self, lacking: list[PlannedAsset]) -> str | None:
        has_image = any(part.asset.kind == "container" for part in lacking)
        return container_runtime(self.runtime) if has_image else None

    def _listings(self, lacking: list[PlannedAsset]) -> dict[str, SourceListing]:
        """What sources list, by asset; offline the hub is not asked."""
        asked = [
            part.asset
            for part in lacking
            if is_listed(part.asset) and not (is_offline() and part.asset.kind.startswith("hub-"))
        ]
        with ThreadPoolExecutor(self.jobs, "list") as pool:
            answers: dict[str, Future[SourceListing]] = {
                asset.name: pool.submit(listing_of, asset, self.ended) for asset in asked
            }
            self._wait(answers.values())
        _raise_faults(answers)
        return {name: answer.result() for name, answer in answers.items()}


def _after(before: list[Future[None]], stage: AssetStage) -> None:
    for future in before:
        if future.exception():
            raise StageEndedError(stage.asset.name, "waits for another asset, which failed")
    stage.run()


def _with_sizes(plan: StagingPlan, listings: Mapping[str, SourceListing]) -> StagingPlan:
    """The plan with the sizes that sources list, which may not be what the recipe states."""
    assets = [
        replace(
            part,
            total_bytes=listing.bytes or part.total_bytes,
            total_files=len(listing.files),
        )
        if (listing := listings.get(part.asset.name))
        else part
        for part in plan.assets
    ]
    return replace(plan, assets=tuple(assets))


def _raise_faults(answers: dict[str, Future[None]] | dict[str, Future[SourceListing]]) -> None:
    """Raise what went wrong: the only fault as it is, several as one that names each."""
    faults = [error for answer in answers.values() if (error := answer.exception())]
    causes = [error for error in faults if not isinstance(error, StageEndedError)] or faults
    for error in causes:
        if len(causes) == 1 or not isinstance(error, PacelineError):
            raise error
    if causes:
        kinds = {type(error) for error in causes}
        # A full disk, say, stops all of them with the same words.
        sentences = list(dict.fromkeys(str(error) for error in causes))
        told = sentences[0] if len(sentences) == 1 else "\n  ".join(["", *sentences])
        kind = kinds.pop() if len(kinds) == 1 else SystemFaultError
        assert issubclass(kind, PacelineError)
        raise kind(f"{len(causes)} assets are not staged", told)
