"""The surfaces that are fuzzed: what arrives from outside, and what reads it."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import socket
import sqlite3
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import httpx2

from paceline.cli import output
from paceline.cli.options import ReportFormat
from paceline.core.assets import content_digest
from paceline.core.bundle import Bundle
from paceline.core.errors import PacelineError
from paceline.core.hardware import SshSettings
from paceline.engines import log_formats
from paceline.engines.log_reading.table_format import read_table
from paceline.engines.log_reading.table_reader import mismatch, table_format
from paceline.files import catalog
from paceline.files.csv_table import TableDefaults, read_csv
from paceline.files.recipe import load_recipe
from paceline.logs.facts import UserSettings
from paceline.machines import kubernetes
from paceline.machines.kubernetes import client as kubernetes_client
from paceline.machines.kubernetes.client import Kubectl, KubectlStream
from paceline.machines.kubernetes.manifest import manifests
from paceline.machines.kubernetes.run import KubernetesRecord, KubernetesRun
from paceline.machines.slurm import client, states, steps
from paceline.machines.ssh import gloo_interface, rendezvous
from paceline.machines.ssh.checks import HostRequirements, check_hosts
from paceline.machines.ssh.run import SshHost, SshRun
from paceline.machines.ssh.session import Fanout, Session
from paceline.mlperf.compare.published_scores import read_score
from paceline.mlperf.report import score_document
from paceline.mlperf.submission.description_check import read_description
from paceline.profiles import torch_traces
from paceline.profiles.nsys import tool as nsys
from paceline.profiles.profile import Profile
from paceline.report import html
from paceline.report.document import Document
from paceline.runs.bundles.archive_import import import_archive, import_bundle
from paceline.runs.bundles.verification import check_bundle
from paceline.runs.profile_report import profile_document
from paceline.scaling.network.benchmark_output import read_benchmark
from paceline.scaling.network.report import network_document
from paceline.staging import connection
from paceline.staging.connection import StopSignal
from tests.attacks.fields import CHANGED, PRINTED_VERBS, RUNS, VERBS, Folders, changes
from tests.attacks.fuzzing import (
    MUTATORS,
    NO_MUTATORS,
    Parts,
    Surface,
    packed,
    with_lines,
    with_number,
    with_pieces,
    with_value,
)
from tests.engines.generic_inputs import check_generic, random_log
from tests.engines.promises import check_read
from tests.engines.samples import log_text, times_of
from tests.logs.example import megatron_log
from tests.machines.kubernetes.clusters import job_on
from tests.machines.kubernetes.test_pods import pod, record_of
from tests.machines.slurm.test_states import SACCT, SINFO, SQUEUE, SRUN
from tests.machines.ssh.fake_ssh import make_job
from tests.mlperf.samples import trial
from tests.mlperf.submissions import description
from tests.profiles.nsys.report_file import ReportFile
from tests.profiles.traces import event, kernel, step, write
from tests.scaling.network.test_benchmark_output import HEADER, ROWS, ranks
from tests.staging.staged import recipe_of, stage_all

TEXT = (with_pieces, with_number, with_lines)
ROOT = Path(__file__).parents[2]
FORMS = (ReportFormat.text, ReportFormat.md, ReportFormat.csv, ReportFormat.json)


def written(parts: Mapping[str, bytes], folder: Path) -> Path:
    """Write the parts as files."""
    for name, content in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def rendered(document: Document) -> None:
    """Render a document in every cheap form."""
    for form in FORMS:
        output.render(document, form).encode()


# Servers: the hub's lists and files, and files at URLs.
HUB = "https://hub.example"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"a": 1}', "model.safetensors": b"0123456789" * 30}


def _hub_example(rng: random.Random) -> Parts:
    files = [
        {
            "rfilename": name,
            "size": len(content),
            "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
        }
        for name, content in FILES.items()
    ]
    files[1]["lfs"] = {"sha256": hashlib.sha256(FILES["model.safetensors"]).hexdigest()}
    listing = {"id": "some/opt", "sha": COMMIT, "siblings": files}  # language: allow
    return {"listing": json.dumps(listing).encode(), **FILES, "answers": _answers(rng, *FILES)}


def _url_example(rng: random.Random) -> Parts:
    lines = (f"{hashlib.md5(content).hexdigest()}  {name}\n" for name, content in FILES.items())
    named = {"set.uri": f"{HUB}/data\n".encode(), "set.md5": "".join(lines).encode()}
    return {**named, **FILES, "answers": _answers(rng, *FILES)}


def _answers(rng: random.Random, *names: str) -> bytes:
    """What a server says in addition to the content: status and headers."""
    status = rng.choice((*[200] * 12, 206, 204, 302, 404, 416, 429, 503))
    headers = {
        "Content-Length": str(len(FILES[name := rng.choice(names)])),
        "ETag": '"a"',
        "Retry-After": "1",
        "Content-Range": "bytes 0-9/10",
        "Location": f"{HUB}/data/config.json",
    }
    kept = dict(rng.sample(sorted(headers.items()), rng.randint(0, len(headers))))
    return json.dumps({name: {"status": status, "headers": kept}}).encode()


def _stage(parts: Parts, folder: Path, asset: dict[str, Any]) -> None:
    """Stage an asset from a server that answers with the parts."""
    try:
        answers = json.loads(parts["answers"])
    except (ValueError, RecursionError):
        answers = {}

    def answer(request: httpx2.Request) -> httpx2.Response:
        name = "listing" if "/api/" in request.url.path else request.url.path.rpartition("/")[2]
        said = answers.get(name) if isinstance(answers, dict) else None
        said = said if isinstance(said, dict) else {}
        status, headers = said.get("status"), said.get("headers")
        is_status = isinstance(status, int) and 200 <= status < 600
        extensions = {"network_stream": Mock()}
        content = parts.get(name)
        try:
            return httpx2.Response(
                status if is_status else 200 if content is not None else 404,
                headers={str(k): str(v) for k, v in headers.items()} if headers else {},
                stream=httpx2.ByteStream(content or b""),
                extensions=extensions,
            )
        except (ValueError, AttributeError, httpx2.HTTPError):
            return httpx2.Response(500, extensions=extensions)

    web = httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True)
    environment = {"HF_ENDPOINT": HUB, "HOME": str(folder), "HF_TOKEN": ""}
    with (
        web,
        patch.object(connection, "_client", lambda: web),
        patch.object(StopSignal, "wait", lambda self, seconds: False),
        patch.dict("os.environ", environment),
    ):
        stage_all(recipe_of(asset), folder / "stage")
    bodies = set(parts.values())
    for path in (folder / "stage").glob("*/*/content/**/*"):
        assert path.is_dir() or path.read_bytes() in bodies, path


# Slurm's commands.
CONFIG = "AccountingStorageType   = accounting_storage/slurmdbd\nAccountingStoreFlags = job_env\n"
SLURM = {
    "sbatch": "4242;cluster\n",
    "squeue": SQUEUE,
    "hosts": "node-[001-004,7]\n",
    "idle": "idle node-[001-004]\nidle* node-005\n",
    "output": f"{'4242':20}/folder/slurm.out\n",
    "sacct": SACCT,
    "sinfo": SINFO,
    "srun": SRUN,
    "scontrol": CONFIG,
}


def _slurm(parts: Parts, folder: Path) -> None:
    """Let every function of the client read what Slurm's commands print."""
    texts = {name: content.decode("utf-8", "replace") for name, content in parts.items()}

    def run_program(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        line = " ".join(words)
        kinds = {"-O": "output", "--states=running": "hosts", "--format=%t": "idle"}
        name = next((kind for word, kind in kinds.items() if word in line), words[0])
        text = texts[name]
        return subprocess.CompletedProcess(words, len(text) % 2, text, text)

    calls: list[Callable[[], object]] = [
        lambda: _is_number(client.sbatch(make_job(["a"]), folder, "job.sh")),
        lambda: _verdicts(client.states(["8", "7"]) or {}),
        lambda: _verdicts(client.accounts(["1", "2"])),
        lambda: _verdicts(states.parse_squeue(texts["squeue"])),
        lambda: client.job_with_output(Path("/folder")),
        lambda: client.allocation_hosts("7"),
        lambda: client.partition_hosts("p"),
        lambda: states.lost_nodes(client.node_states(["a"])),
        lambda: states.unusable_nodes(texts["sinfo"]),
        lambda: (client.answers(), client.has_accounting(), client.stores_environment()),
        lambda: states.failed_nodes(texts["srun"]),
        lambda: steps.cancellation(texts["srun"]),
    ]
    with (
        patch.object(client, "run_program", run_program),
        patch.object(client.shutil, "which", lambda name: name),
        patch.object(client, "_SETTINGS", {}),
    ):
        for call in calls:
            with suppress(PacelineError):
                call()


def _is_number(text: str) -> None:
    assert re.fullmatch("[0-9]+(_[0-9]+)?", text), text


def _verdicts(jobs: Mapping[str, states.JobState]) -> None:
    for job in jobs.values():
        states.verdict_of(job, states.host_names(job.nodes))
        assert isinstance(job.phase, str) and isinstance(job.never_starts, bool)


# Peers of ssh.
FACTS = {
    **{"python": "3.12.3", "torch": "2.8.0", "open_files": 4096, "folder": "shared"},
    **{"free_bytes": 10**12, "temporary": "/tmp", "temporary_free_bytes": 10**12},
    **{"address": "10.0.0.1", "peer_address": "10.0.0.2", "own_address": "10.0.0.1"},
    **{"reached_on": "ib0", "interfaces": ["lo", "ib0"], "machine": "boot a"},
    "addresses": ["10.0.0.1"],
}


def _ssh_example(rng: random.Random) -> Parts:
    clocks = "".join(f"@clock {time}\n" for time in (1.5, 2.5, 3.5))
    check = f"motd\n@ready 10.0.0.1\n{clocks}@facts {json.dumps(FACTS)}\n"
    return {
        "check": check.encode(),
        "output": b"step 1 loss 2.0\n",
        "run": b"@pgid 77\n@alive 1\n@alive 2\n@rc 0\n",
        "port": b'@facts {"port": 20123}\n',
        "failed": rng.choice((b"Permission denied (publickey).\n", b"@unable no module\n")),
    }


def _ssh(parts: Parts, folder: Path) -> None:
    """Check two hosts and follow a job there, with peers that say anything."""

    def start(session: Session, *, messages: bytes) -> None:
        session.started_s = 1.0
        session.process = Mock(poll=lambda: 0, returncode=0)
        for name, data in (("channel", parts["output"]), ("errors", messages)):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.sendall(data[:100_000])
            theirs.close()
            setattr(session, name, ours)

    settings, requirements = SshSettings(), HostRequirements("python", folder, "ib0")
    for name in ("check", "failed"):
        with patch.object(Session, "start", partial_method(start, messages=parts[name])):
            checks = check_hosts(["a", "b"], requirements, settings)
            for check in checks:
                check.model_dump_json()
                gloo_interface(check, make_job(["a", "b"]))
    with patch.object(Session, "start", partial_method(start, messages=parts["run"])):
        sessions = [Session(host, [], folder / "log") for host in ("a", "b")]
        hosts = [SshHost(node, session) for node, session in enumerate(sessions)]
        run = SshRun(Fanout(sessions), hosts, settings, folder / "sockets")
        fanout = Fanout([Session("a", [])])
        with (
            suppress(PacelineError),
            patch.object(Session, "start", partial_method(start, messages=parts["port"])),
        ):
            rendezvous(fanout, checks, make_job(["a", "b"]))
        fanout.close()
        try:
            while run.poll() is None:
                pass
            run.verdict()
        finally:
            run.close()


def partial_method(function: Callable[..., None], **fields: Any) -> Callable[[Session], None]:
    """A method that is a function with some arguments."""
    return lambda self: function(self, **fields)


# kubectl and pods.
def _kubernetes_example(rng: random.Random) -> Parts:
    ended = {"terminated": {"exitCode": rng.choice((0, 1, 137)), "reason": "OOMKilled"}}
    state = rng.choice(({"running": {}}, ended, {"waiting": {"reason": "ErrImagePull"}}))
    pods = [
        pod(name=f"p-{n}", phase="Running", containerStatuses=[{"state": state}]) for n in (0, 1)
    ]
    events = "".join(json.dumps({"type": "ADDED", "object": each}) + "\n" for each in pods)
    records = [record_of("steps/rank-00000.jsonl", 0, b"{}\n"), "[pod/p-0/node] @end 0 0"]
    warning = {"involvedObject": {"name": "paceline-r"}, "message": "exceeded quota"}
    return {
        "watch": events.encode(),
        "logs": "\n".join([*records, ""]).encode(),
        "get": json.dumps({"items": [warning], "metadata": {"labels": {}}}).encode(),
        "error": b"Error from server (Forbidden): pods is forbidden\n",
        "kubernetes.json": b'{"name": "paceline-r-0123abcd", "kind": "job"}',
    }


def _kubernetes(parts: Parts, folder: Path) -> None:
    """Follow a run whose pods and whose kubectl print anything, and cancel what it recorded."""
    printed = {name: content.decode("utf-8", "replace") for name, content in parts.items()}
    (run_folder := folder / "run").mkdir()
    (run_folder / "logs").mkdir()

    def run_program(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        text = printed["get"] if "get" in words else ""
        return subprocess.CompletedProcess(words, len(text) % 2, text, printed["error"])

    def stream(name: str) -> KubectlStream:
        kubectl = KubectlStream(Mock(stdout=None, poll=lambda: 0), parts[name])
        kubectl.close = lambda: None  # type: ignore[method-assign]
        return kubectl

    recorded = {"kubernetes.json": parts["kubernetes.json"]}
    record = KubernetesRecord(name="paceline-r-0123abcd", kind="jobset")
    job = job_on({})
    run = KubernetesRun(job, run_folder, record, Kubectl(), manifests(job, record.name))
    run._watch, run._logs = stream("watch"), stream("logs")
    calls: list[Callable[[], object]] = [
        run._read_states,
        run._read_logs,
        run._warning_event,
        run._start_fault,
        lambda: (run.phase, run.verdict(), run._exit_code()),
        lambda: kubernetes.cancel_orphan(written(recorded, folder)),
        lambda: kubernetes.available_hosts(job.cluster),
    ]
    # A stream that has ended is started again; no fuzzed input reaches the kubectl of this machine.
    with (
        patch.object(kubernetes_client, "run_program", run_program),
        patch.object(KubectlStream, "start", lambda *_: stream("logs")),
    ):
        for call in calls:
            with suppress(PacelineError):
                call()
    inside = {"kubernetes.json", "run"}
    assert {path.name for path in folder.iterdir()} <= inside


# Tables of network benchmarks.
def _network_example(rng: random.Random) -> Parts:
    start = "# Collective test starting: all_reduce_perf\n"
    return {"output.txt": (start + ranks(rng.choice((1, 2)), 4) + HEADER + ROWS).encode()}


def _network(parts: Parts, folder: Path) -> None:
    path = written(parts, folder) / "output.txt"
    report = read_benchmark(path, "NVLink4", "InfiniBand-NDR")
    json.loads(report.model_dump_json(), parse_constant=_no_number)
    rendered(network_document(report, path))


# Profiles.
@cache
def _trace() -> bytes:
    events = [each for n in (3, 4) for each in step(n, 1000 * n, 1000 * n + 900)]
    events += [kernel("gemm", 1000 * n + 100, 1000 * n + 500) for n in (3, 4)]
    events += [
        event("cuda_runtime", "cudaLaunchKernel", 3050, 3060, 1, correlation=7),
        event("cpu_op", "aten::mm", 3040, 3070, 1),
        event("user_annotation", "Optimizer.step#AdamW.step", 3700, 3800, 1),
    ]
    with io.BytesIO() as file:
        path = Mock(write_bytes=file.write, suffix=".json")
        path.name = "trace.json"
        write(path, events)
        return file.getvalue()


def _read_profile(read: Callable[[Path], Profile], parts: Parts, folder: Path) -> None:
    (name,) = parts
    profile = read(written(parts, folder) / name)
    json.loads(profile.model_dump_json(), parse_constant=_no_number)
    rendered(profile_document(profile, "run"))


def _no_number(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


STATEMENTS = (
    "UPDATE {table} SET {column} = ?",
    "UPDATE {table} SET {column} = ? WHERE rowid % 2",
    "INSERT INTO {table} SELECT * FROM {table}",
    "DROP TABLE {table}",
    "DELETE FROM {table}",
    "ALTER TABLE {table} RENAME COLUMN {column} TO other",
    "ALTER TABLE {table} ADD COLUMN extra AS (hex(zeroblob(500000000)))",
)
VALUES = (
    None,
    -1,
    0,
    2**62,
    -(2**63),
    1.5,
    1e308,
    "",
    "step 1",
    "x" * 5000,
    b"\xff\x00",
    "\x1b[1m",
)


@cache
def _report() -> bytes:
    with (
        sqlite3.connect(":memory:") as database,
        patch.object(sqlite3, "connect", lambda path: database),
    ):
        report = ReportFile(Path("report"))
        for n in (1, 2):
            report.mark(f"step {n}", 10 * n, 10 * n + 9)
            report.kernel("gemm", 10 * n + 2, 10 * n + 6, 10 * n + 1)
            report.kernel("ncclDevKernel_AllReduce", 10 * n + 6, 10 * n + 7, 10 * n + 1)
            report.copy(1, 10 * n + 7, 10 * n + 8, 10 * n + 1)
        report.db = Mock(wraps=database, close=lambda: None)
        report.done()
        return database.serialize()


def _report_example(rng: random.Random) -> Parts:
    """A report whose tables hold values that Nsight Systems would not write."""
    with sqlite3.connect(":memory:") as database:
        database.deserialize(_report())
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master")]
            table = rng.choice(tables or ["none"])
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            statement = rng.choice(STATEMENTS)
            text = statement.format(table=table, column=rng.choice(columns or ["none"]))
            with suppress(sqlite3.Error):
                database.execute(text, [rng.choice(VALUES)] * statement.count("?"))
        database.commit()
        content = database.serialize()
    return {"report.sqlite": with_pieces(content, rng) if rng.random() < 0.2 else content}


# Bundles and archives.
@cache
def _run_files() -> Parts:
    folder = RUNS / CHANGED
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {f"{CHANGED}/{path.relative_to(folder)}": path.read_bytes() for path in paths}


def _bundle_example(rng: random.Random) -> Parts:
    """Files of a bundle, and the seed of how they are packed."""
    return {**_run_files(), SEED: b"%d" % rng.getrandbits(32)}


SEED = "seed"
NAMES = ("../x", "/tmp/x", "a/../../x", "\\x", "a\nb", "", ".", "x" * 300, "\x1b[1m", "é\udcff")


def _archive_of(parts: Parts, rng: random.Random) -> bytes:
    with io.BytesIO() as raw, tarfile.open(fileobj=raw, mode="w") as tar:
        for number, (name, content) in enumerate(parts.items()):
            header = tarfile.TarInfo(rng.choice(NAMES) if rng.random() < 0.003 else name)
            header.size = len(content)
            if number and rng.random() < 0.003:
                header.type = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE))
                header.linkname, header.size = rng.choice((*NAMES, "/etc/passwd")), 0
            if rng.random() < 0.003:
                header.pax_headers = {rng.choice(("size", "path", "GNU.sparse.map")): "-1"}
            tar.addfile(header, io.BytesIO(content))
        tar.close()
        data = raw.getvalue()
    return with_pieces(data, rng) if rng.random() < 0.1 else data


def _bundle(parts: Parts, folder: Path) -> None:
    """Verify a bundle, or import it."""
    parts = dict(parts)
    rng = random.Random(parts.pop(SEED))
    files = {name.partition("/")[2]: content for name, content in parts.items()}
    stated = tuple(
        {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    )
    bundle = Bundle.model_validate(
        {
            **{"run": CHANGED, "created": "2026-01-15T00:00:00+00:00", "status": "ok"},
            **{"paceline_version": "0", "sha256": "0" * 64, "files": stated},
            **{"redacted": (), "left_out": ()},
        }
    )
    bundle = bundle.model_copy(update={"sha256": content_digest(bundle.files)})
    text = bundle.model_dump_json().encode()
    text = with_value(text, rng) if rng.random() < 0.2 else text
    data = _archive_of({f"{CHANGED}/bundle.json": text, **parts}, rng)
    path = folder / "a.tar.gz"
    path.write_bytes(packed(data, rng) if rng.random() < 0.3 else data)
    if rng.random() < 0.5:
        check_bundle(path)
    else:
        import_bundle(path, folder / "runs", reimport=False)


def _log_archive_example(rng: random.Random) -> Parts:
    log = megatron_log([1.0, 1.1, 1.2, 1.1, 1.0])
    seed = b"%d" % rng.getrandbits(32)
    return {"a/train.log": log.encode(), "b/other.txt": b"nothing", SEED: seed}


def _log_archive(parts: Parts, folder: Path) -> None:
    parts = dict(parts)
    rng = random.Random(parts.pop(SEED))
    path = folder / "logs.tar"
    path.write_bytes(_archive_of(parts, rng))
    with patch.object(html, "render_document", _no_page):
        import_archive(path, UserSettings(), folder / "runs", [], tag=None, reimport=False)


def _no_page(*_: object) -> str:
    """Pages take most of the time; `run folders` render them."""
    return ""


# MLPerf.
def _mlperf_example(rng: random.Random) -> Parts:
    logs = {
        f"result_{n}.txt": trial(n, minutes=rng.choice((10.0, 11.0, None))).encode()
        for n in range(rng.choice((1, 3, 10)))
    }
    return {**logs, "description": _description()}


@cache
def _description() -> bytes:
    with io.StringIO() as file:
        path = Mock(write_text=file.write)
        description(path)
        return file.getvalue().encode()


def _mlperf(parts: Parts, folder: Path) -> None:
    written({"box.json": parts["description"]}, folder)
    read_description(folder / "box.json", "box.json")
    logs = {name: content for name, content in parts.items() if name != "description"}
    score = read_score(written(logs, folder / "llama2_70b_lora"), None, None)
    assert score.score_minutes is None or 0 < score.score_minutes < 1e9
    rendered(score_document(score))


# Files of the user and of others.
@cache
def _shipped(*folders: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for folder in folders for path in sorted(ROOT.glob(folder)))


def _one_of(folder: str, name: str) -> Callable[[random.Random], Parts]:
    return lambda rng: {name: rng.choice(_shipped(folder))}


def _read_file(read: Callable[[Path], object], parts: Parts, folder: Path) -> None:
    (name,) = parts
    read(written(parts, folder) / name)


LINES = (b"1" * 20_000, b"step 1 loss 2.0 " * 1_000, b" " * 20_000, b"a: 1, " * 4_000)
"""Lines on which a pattern may take long."""


def _read_format(path: Path) -> None:
    """Read a user's log format, and lines with it."""
    table = read_table(path)
    log_format = table_format(table)
    for line in LINES:
        log_format.step_line.search(line + b"\n")
        mismatch(table, line)


def _log_example(rng: random.Random) -> Parts:
    name = rng.choice(sorted(log_formats()))
    return {name: log_text(name, times_of(3))}


def _read_log(parts: Parts, folder: Path) -> None:
    ((name, content),) = parts.items()
    try:
        check_read(log_formats()[name], content)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def _generic_example(rng: random.Random) -> Parts:
    return {"log": random_log(rng)}


# Run folders.
PAGES = 0.01
"""Share of run folders that may be rendered as a page, which takes 50 times as long as the rest."""


def _field_example(rng: random.Random) -> Parts:
    """A file of a run folder with a hostile field, and the verb that reads it."""
    change = rng.choice(_changes())
    verbs = tuple(VERBS) if rng.random() < PAGES else PRINTED_VERBS
    return {change.file: change.content(), "verb": rng.choice(verbs).encode()}


@cache
def _changes() -> list[Any]:
    return changes()


def _read_folders(parts: Parts, folder: Path) -> None:
    parts = dict(parts)
    verb = parts.pop("verb").decode()
    ((file, content),) = parts.items()
    falls = Folders(folder).read_file(file, content, verb)
    assert not falls, falls[0]


SURFACES = (
    Surface(
        "hub answers",
        _hub_example,
        partial(_stage, asset={"name": "opt", "kind": "hub-model", "source": "some/opt"}),
    ),
    Surface(
        "URL answers",
        _url_example,
        partial(_stage, asset={"name": "set", "kind": "r2", "source": f"{HUB}/data/set.uri"}),
    ),
    Surface(
        "scheduler programs",
        lambda rng: {name: text.encode() for name, text in SLURM.items()},
        _slurm,
        TEXT,
    ),
    Surface("ssh peers", _ssh_example, _ssh),
    Surface("Kubernetes", _kubernetes_example, _kubernetes),
    Surface("network benchmarks", _network_example, _network, TEXT),
    Surface(
        "traces",
        lambda rng: {"trace.json": _trace()},
        partial(_read_profile, torch_traces.read_file),
        (*MUTATORS, packed),
    ),
    Surface("nsys reports", _report_example, partial(_read_profile, nsys.read_file), NO_MUTATORS),
    Surface("bundles", _bundle_example, _bundle),
    Surface("archives of logs", _log_archive_example, _log_archive, TEXT),
    Surface("MLPerf results", _mlperf_example, _mlperf),
    Surface(
        "clusters",
        _one_of("docs/examples/[hl]a*.yaml", "cluster.yaml"),
        partial(_read_file, catalog.cluster),
        TEXT,
    ),
    Surface(
        "recipes",
        _one_of("paceline/files/recipes/*.yaml", "recipe.yaml"),
        partial(_read_file, lambda path: load_recipe(str(path))),
        TEXT,
    ),
    Surface(
        "tables",
        _one_of("tests/forms/inputs/[av]*.csv", "table.csv"),
        partial(_read_file, lambda path: read_csv(path, TableDefaults())),
        TEXT,
    ),
    Surface(
        "format files",
        _one_of("paceline/files/log_formats/*.yaml", "format.yaml"),
        partial(_read_file, _read_format),
        TEXT,
    ),
    # Longer inputs than `check_read` promises for, as of repeated lines, are not made.
    Surface("log formats", _log_example, _read_log, (with_pieces,)),
    Surface(
        "generic logs", _generic_example, lambda parts, _: check_generic(parts["log"]), NO_MUTATORS
    ),
    Surface("run folders", _field_example, _read_folders, NO_MUTATORS),
)
