"""Concurrent staging of all assets of a plan, each after the assets that it is made from."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from paceline import __version__
from paceline.core.assets import (
    HUB_KINDS,
    Asset,
    Manifest,
    StagedFile,
    content_digest,
)
from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.files.documents import read_text, read_value, write_value
from paceline.files.hf_hub import hub_endpoint, is_offline
from paceline.files.staged import (
    CONTENT_FOLDER,
    DAMAGED_FILE,
    MANIFEST_FILE,
    PARTIAL_FOLDER,
    asset_state,
    content_sizes,
)
from paceline.staging.connection import StagingStoppedError, StopSignal
from paceline.staging.converters import ConversionJob, can_resume, convert
from paceline.staging.credentials import redact_url
from paceline.staging.download_log import DownloadLog, StageWatcher
from paceline.staging.hub_cache import hub_links
from paceline.staging.plan import (
    COMPLETE_FOLDER,
    UNDERWAY_FOLDER,
    PlannedAsset,
    StagingPlan,
    disk_space,
    require_space,
)
from paceline.staging.sources.container import container_runtime, fetch_image
from paceline.staging.sources.git import clone
from paceline.staging.sources.hub import access_page, copy_cached, list_hub
from paceline.staging.sources.url import list_r2, list_urls
from paceline.staging.transfer import (
    SourceListing,
    TransferCallbacks,
    fetch,
    inner_path,
    unwritable,
)
from paceline.staging.verification import file_digest

_LISTS: dict[str, Callable[[Asset, StopSignal], SourceListing]] = {
    "url": list_urls,
    "r2": list_r2,
    **dict.fromkeys(HUB_KINDS, list_hub),
}


def has_listing(asset: Asset) -> bool:
    """Return whether the asset's source lists its files."""
    return asset.kind in _LISTS


def listing_of(asset: Asset, stop: StopSignal) -> SourceListing:
    """Return the file list of an asset from its source.

    Raises UserError, SystemFaultError, and StageEndedError if staging is stopped.
    """
    stop.check(asset.name)
    try:
        listing = _LISTS[asset.kind](asset, stop)
    except ValueError as error:
        raise _unusable(asset, error) from error
    paths = [file.path for file in listing.files]
    if len(set(paths)) < len(paths):
        raise SystemFaultError(f"{asset.kind} {redact_url(asset.source)}", "lists a file twice")
    return listing


@dataclass(frozen=True)
class _FetchedContent:
    """Files fetched from a source, and their origin."""

    files: tuple[StagedFile, ...]
    origin: str
    revision: str | None = None
    tool: str | None = None


@dataclass(frozen=True)
class AssetStage:
    """One asset to stage, with all that its thread needs."""

    asset: Asset
    folder: Path
    inputs: Mapping[str, Path]
    """Folders of the assets that it is made from."""
    listing: SourceListing | None
    runtime: str | None
    pool: ThreadPoolExecutor
    log: DownloadLog
    stop: StopSignal
    waiting: Callable[[str], None]

    def run(self) -> None:
        """Stage the asset, unless another stager has staged it in the meantime."""
        try:
            with asset_lock(self.folder, self._wait):
                if asset_state(self.folder) != "staged":
                    self._stage()
        except OSError as error:
            raise unwritable(self.folder, error) from None
        except ValueError as error:
            raise _unusable(self.asset, error) from error
        self.log.phase(self.asset.name, "staged")

    def _stage(self) -> None:
        began = time.monotonic()

        def check() -> None:
            self.stop.check(self.asset.name)

        check()
        complete = self._prepare(check)
        content_files = self._fetch(complete, check)
        self.log.phase(self.asset.name, "finishing")
        content = self.folder / CONTENT_FOLDER
        manifest = Manifest(
            asset=self.asset,
            revision=content_files.revision,
            bytes=sum(file.bytes for file in content_files.files),
            sha256=content_digest(content_files.files),
            files=content_files.files,
            origin=content_files.origin,
            tool=content_files.tool,
            staged_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - began, 3),
            paceline_version=__version__,
        )
        # The content must be on disk before the manifest that declares it complete.
        complete.replace(content)
        _flush(self.folder)
        write_value(self.folder / MANIFEST_FILE, manifest)
        _flush(self.folder)
        (self.folder / DAMAGED_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.folder / PARTIAL_FOLDER, ignore_errors=True)

    def _prepare(self, check: Callable[[], None]) -> Path:
        """Return the folder for complete files, with the good files of an interrupted call."""
        partial, content = self.folder / PARTIAL_FOLDER, self.folder / CONTENT_FOLDER
        complete = partial / COMPLETE_FOLDER
        manifest_file = self.folder / MANIFEST_FILE
        if manifest_file.is_file():
            manifest_file.replace(self.folder / DAMAGED_FILE)
        if not has_listing(self.asset) and not can_resume(self.asset):
            # The underway folder of an image keeps its complete layers.
            stale = complete if self.asset.kind == "container" else partial
            shutil.rmtree(stale, ignore_errors=True)
            shutil.rmtree(content, ignore_errors=True)
        elif content.is_dir():
            shutil.rmtree(complete, ignore_errors=True)
            partial.mkdir(exist_ok=True)
            content.replace(complete)
        if (self.folder / DAMAGED_FILE).is_file() and complete.is_dir():
            self.log.phase(self.asset.name, "checking")
            _drop_damaged(self.folder / DAMAGED_FILE, complete, check)
        complete.mkdir(parents=True, exist_ok=True)
        (partial / UNDERWAY_FOLDER).mkdir(exist_ok=True)
        return complete

    def _fetch(self, complete: Path, check: Callable[[], None]) -> _FetchedContent:
        asset, source = self.asset, redact_url(self.asset.source)
        if self.listing is not None:
            self.log.phase(asset.name, "fetching")
            files = self._transfer(self.listing, complete, check)
            return _FetchedContent(files, self.listing.origin, self.listing.revision)
        self.log.phase(asset.name, "making" if asset.kind == "made" else "fetching")
        if asset.kind == "git":
            revision = clone(asset, complete, check)
            return _FetchedContent(self._hash_files(complete, check), source, revision, "git")
        if asset.kind == "container":
            underway = self.folder / PARTIAL_FOLDER / UNDERWAY_FOLDER
            digest = fetch_image(asset, complete, underway, self.runtime or "", check)
            return _FetchedContent(
                self._hash_files(complete, check), asset.source, digest, self.runtime
            )
        if asset.kind == "made":
            inputs = {name: folder / CONTENT_FOLDER for name, folder in self.inputs.items()}
            with self.log.conversion_progress(asset.name) as progress:
                job = ConversionJob(complete, inputs, asset.settings, check, progress, asset.hub_id)
                convert(asset.source, job)
            return _FetchedContent(self._hash_files(complete, check), "generated locally")
        revision = copy_cached(asset, complete, check)
        return _FetchedContent(
            self._hash_files(complete, check), f"cache of {hub_endpoint()}", revision
        )

    def _transfer(
        self, listing: SourceListing, complete: Path, check: Callable[[], None]
    ) -> tuple[StagedFile, ...]:
        """Fetch all files of a listing concurrently; delete files that are not listed."""
        listed_paths = {file.path for file in listing.files}
        for path in content_sizes(complete):
            if path not in listed_paths:
                (complete / path).unlink()
        name, log = self.asset.name, self.log
        callbacks = TransferCallbacks(
            check,
            lambda num_bytes: log.add_present(name, num_bytes),
            lambda num_bytes: log.add_received(name, num_bytes),
            self.stop,
            access_page(self.asset),
        )
        underway = self.folder / PARTIAL_FOLDER / UNDERWAY_FOLDER
        futures: list[Future[StagedFile]] = [
            self.pool.submit(fetch, file, complete, underway, callbacks) for file in listing.files
        ]
        wait(futures)
        return tuple(sorted((f.result() for f in futures), key=lambda file: file.path))

    def _hash_files(self, complete: Path, check: Callable[[], None]) -> tuple[StagedFile, ...]:
        """Return the files that a converter or another program wrote, with size and digest."""
        files = [
            StagedFile(
                path=inner_path(path, self.asset),
                bytes=size,
                sha256=file_digest(complete / path, check),
            )
            for path, size in sorted(content_sizes(complete).items())
        ]
        total = sum(file.bytes for file in files)
        self.log.total(self.asset.name, total)
        self.log.add_present(self.asset.name, total)
        return tuple(files)

    def _wait(self, owner: str) -> None:
        self.stop.check(self.asset.name)
        self.log.phase(self.asset.name, f"waiting for {owner}")
        self.waiting(f"{self.asset.name}: {owner} is staging it")


def _unusable(asset: Asset, error: ValueError) -> SystemFaultError:
    """Return the error for an unusable address or name, without its text, which may be secret."""
    return SystemFaultError(
        f"{asset.kind} {redact_url(asset.source)}",
        f"contains an invalid URL or file name ({type(error).__name__})",
    )


def _drop_damaged(manifest_file: Path, complete: Path, check: Callable[[], None]) -> None:
    """Delete every file that differs from the manifest, so that it is fetched again."""
    try:
        files = read_value(manifest_file, Manifest).files
    except (UserError, SystemFaultError):
        return  # Without a manifest only the source's own checksums are known.
    for file in files:
        path = complete / file.path
        if path.is_file() and file_digest(path, check) != file.sha256:
            path.unlink()


def _flush(folder: Path) -> None:
    """Write the folder's entries to disk before anything that is written later."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # Some shared file systems do not support fsync of a folder.
    finally:
        os.close(handle)


DEFAULT_JOBS = 4


@dataclass(frozen=True)
class Stager:
    """Stager of a plan; `notify` is called with notices for the user."""

    jobs: int = DEFAULT_JOBS
    runtime: str | None = None
    watch: StageWatcher = lambda progress: None
    notify: Callable[[str], None] = lambda sentence: None
    stop: StopSignal = field(default_factory=StopSignal)

    def stage(self, plan: StagingPlan) -> None:
        """Stage all assets that are not staged yet.

        A failed asset does not stop the others; its error is raised at the end. Raises UserError
        and SystemFaultError. If a source refuses to list its files, or the disk space is too
        small, they are raised before anything is fetched.
        """
        unstaged_parts = [part for part in plan.assets if part.state != "staged"]
        runtime = self._runtime(unstaged_parts)
        listings = self._listings(unstaged_parts)
        sized_plan = _with_sizes(plan, listings)
        largest = [f.bytes or 0 for listing in listings.values() for f in listing.files]
        require_space(sized_plan, disk_space(plan.root), max(largest, default=0))
        log = DownloadLog(self.watch)
        for part in sized_plan.assets:
            log.add(part.asset.name, part.total_bytes)
            if part.state == "staged":
                log.add_present(part.asset.name, part.present_bytes)
                log.phase(part.asset.name, "staged")
        try:
            self._stage_all(plan, unstaged_parts, listings, runtime, log)
        finally:
            try:
                hub_links(part.folder for part in plan.assets).write(plan.root)
            except OSError as error:
                raise unwritable(plan.root, error) from None

    def with_sizes(self, plan: StagingPlan) -> StagingPlan:
        """Return the plan with the current sizes from the sources; raises as `stage` does."""
        unstaged_parts = [part for part in plan.assets if part.state != "staged"]
        return _with_sizes(plan, self._listings(unstaged_parts))

    def _stage_all(
        self,
        plan: StagingPlan,
        unstaged_parts: list[PlannedAsset],
        listings: dict[str, SourceListing],
        runtime: str | None,
        log: DownloadLog,
    ) -> None:
        folders = {part.asset.name: part.folder for part in plan.assets}
        futures: dict[str, Future[None]] = {}
        with (
            ThreadPoolExecutor(self.jobs, "fetch") as files,
            ThreadPoolExecutor(max(1, len(unstaged_parts)), "asset") as assets,
        ):
            for part in unstaged_parts:
                stage = AssetStage(
                    asset=part.asset,
                    folder=part.folder,
                    inputs={name: folders[name] for name in part.asset.needs},
                    listing=listings.get(part.asset.name),
                    runtime=runtime,
                    pool=files,
                    log=log,
                    stop=self.stop,
                    waiting=self.notify,
                )
                before = [futures[name] for name in part.asset.needs if name in futures]
                futures[part.asset.name] = assets.submit(_run_after, before, stage)
            self._wait(futures.values())
        _raise_faults(futures)

    def _wait(self, answers: Iterable[Future[Any]]) -> None:
        """Wait for all; an interrupt stops them."""
        try:
            wait(answers)
        except BaseException:  # an interrupt must stop the threads too
            self.stop.set()
            raise

    def _runtime(self, unstaged_parts: list[PlannedAsset]) -> str | None:
        has_image = any(part.asset.kind == "container" for part in unstaged_parts)
        return container_runtime(self.runtime) if has_image else None

    def _listings(self, unstaged_parts: list[PlannedAsset]) -> dict[str, SourceListing]:
        """Return the file list of each asset by name; the hub is not queried when offline."""
        assets = [
            part.asset
            for part in unstaged_parts
            if has_listing(part.asset) and not (is_offline() and part.asset.kind.startswith("hub-"))
        ]
        with ThreadPoolExecutor(self.jobs, "list") as pool:
            answers: dict[str, Future[SourceListing]] = {
                asset.name: pool.submit(listing_of, asset, self.stop) for asset in assets
            }
            self._wait(answers.values())
        _raise_faults(answers)
        return {name: answer.result() for name, answer in answers.items()}


def _run_after(before: list[Future[None]], stage: AssetStage) -> None:
    for future in before:
        if future.exception():
            raise StagingStoppedError(stage.asset.name, "depends on an asset that failed")
    stage.run()


def _with_sizes(plan: StagingPlan, listings: Mapping[str, SourceListing]) -> StagingPlan:
    """Return the plan with the sizes from the sources, which may differ from the recipe's."""
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
    """Raise a single error as it is, and several as one error that lists them."""
    faults = [error for answer in answers.values() if (error := answer.exception())]
    causes = [error for error in faults if not isinstance(error, StagingStoppedError)] or faults
    for error in causes:
        if len(causes) == 1 or not isinstance(error, PacelineError):
            raise error
    if causes:
        kinds = {type(error) for error in causes}
        # A full disk, for example, fails all assets with the same message.
        sentences = list(dict.fromkeys(str(error) for error in causes))
        message = sentences[0] if len(sentences) == 1 else "\n  ".join(["", *sentences])
        kind = kinds.pop() if len(kinds) == 1 else SystemFaultError
        assert issubclass(kind, PacelineError)
        raise kind(f"{len(causes)} assets failed", message)


LOCK_FILE = "lock"
MAX_OWNER_BYTES = 4096
"""Maximum size of the text that names the process with a lock."""
POLL_S = 0.2


@contextmanager
def asset_lock(folder: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of an asset's folder; call `waiting` with the owner while it is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK_FILE
    # Mode 0o666 as for other files: the umask decides whether a group may lock a shared folder.
    lock = FileLock(file, mode=0o666)
    while True:
        try:
            lock.acquire(blocking=False)
            break
        except Timeout:
            waiting(_owner(file))
            time.sleep(POLL_S)
    try:
        # filelock writes the content of a marker file itself.
        if not isinstance(lock, SoftFileLock):
            file.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        lock.release()


def _owner(file: Path) -> str:
    try:
        return " ".join(read_text(file, MAX_OWNER_BYTES).split()) or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"
