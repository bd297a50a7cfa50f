"""Verbs by their lines of help; the module of one is imported when it is called."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePath
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.panels import group_options
from paceline.core import interrupts
from paceline.core.errors import UserError
from paceline.core.secrets import redact
from paceline.core.units import LARGEST_INT

LARGEST_NUMBER = 1e100
"""Of an option; no quantity comes near it, and its square is still a number."""
COMMAND = "command"
"""The argument of a verb that takes a program behind `--`."""
NAMES = frozenset({"tag", "group"})
"""Options that name what is written."""


class VerbCommand(TyperCommand):
    """Refuses what no option means: numbers beyond all quantities, and bytes that are no text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args, command = _before_command(args) if self._takes_command() else (args, ())
        words = tuple(args)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # Here alone: most calls need not load what this does.
            from paceline.cli.wrong_option import own_words

            error.message = own_words(error)
            raise
        if self._takes_command():
            if ctx.params[COMMAND]:
                ctx.fail(f"Got unexpected extra argument ({ctx.params[COMMAND][0]})")
            ctx.params[COMMAND] = command
        if any(not word or word[-1] == "=" for word in words):
            from paceline.cli.wrong_option import refuse_empty_paths

            refuse_empty_paths(self.params, ctx.params, words)
        for param in cast(list[Any], self.params):
            value = ctx.params.get(param.name or "")
            for item in value if isinstance(value, list | tuple) else [value]:
                # A log to be read may be called anything; other names are written into files.
                is_file = param.param_type_name == "argument" and isinstance(item, PurePath)
                if not is_file and (problem := _problem(item)):
                    raise UserError(max(param.opts, key=len), problem)
                if param.name in NAMES and redact(str(item), os.environ) != str(item):
                    raise UserError(
                        max(param.opts, key=len),
                        "holds what looks like a secret",
                        remedy="choose another name; files and folders are called by it",
                    )
        return rest

    def _takes_command(self) -> bool:
        return any(param.name == COMMAND for param in cast(list[Any], self.params))


def _before_command(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before the first `--`, and those behind it."""
    if "--" not in words:
        return words, ()
    at = words.index("--")
    if at == len(words) - 1:
        raise UserError("--", "is followed by no program", remedy="-- PROGRAM [ARGUMENT ...]")
    return words[:at], tuple(words[at + 1 :])


def _problem(value: object) -> str | None:
    """What is wrong with an option's value, whatever the option is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_INT:
        return f"{value} is too large"
    if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
        return f"must be a finite number, not {value}"
    if isinstance(value, str | PurePath):
        shown = str(value).encode("utf-8", "backslashreplace").decode()
        return f"{shown} is not UTF-8" if shown != str(value) else None
    return None


@dataclass(frozen=True)
class Verb:
    """A verb as `--help` lists it."""

    name: str
    source: str
    """`module:function` in this package, or `group`."""
    line: str

    def command(self) -> Any:
        """The command itself, for which its module is imported."""
        function = self.function()
        from paceline.cli.options import expanded  # With the verb: `--help` of all needs it not.

        app = typer.Typer(add_completion=False)
        app.command(self.name, cls=VerbCommand)(expanded(function))
        command = typer.main.get_command(app)
        group_options(command.params)
        return command

    def function(self) -> Any:
        """What runs the verb, with its options as parameters."""
        module, _, name = self.source.partition(":")
        with interrupts.held():
            return getattr(import_module(f"{__package__}.{module}"), name)


def _verbs(table: str) -> dict[str, tuple[Verb, ...]]:
    """Return the verbs of a table by its headings, which are not indented."""
    verbs: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in table.strip().splitlines():
        text = line.strip()
        if not line.startswith(" "):
            rows = verbs[text] = []
        elif line.startswith("    "):
            rows[-1].append(text)
        else:
            rows.append(text.split(" = "))
    return {
        heading: tuple(Verb(name, source, " ".join(lines)) for name, source, *lines in rows)
        for heading, rows in verbs.items()
    }


VERBS = _verbs("""
Measure
  run = run:run
    Train a recipe on this machine or on hosts, measure it, and write the report.
  sweep = sweep:sweep
    Run a recipe in every combination of some settings and say which is fastest.
  tune = tune:tune
    Find the fastest layout of a recipe, by few runs or by estimate alone.
  calibrate = calibrate:calibrate
    Measure this machine for `estimate`, `sweep` and `tune`: probes, and short trainings of 2
    and 4 layers.
  profile = profile:profile
    Say where a step's time or memory goes, by a run of its own under one profiler.
  probe = group
    Measure what this machine reaches, apart from training.
  mlperf = group
    MLPerf Training by its rules: run, score, check and package. Never an official result.
Prepare
  stage = stage:stage
    Fetch or make what a recipe needs: models, data, code, containers, each verified.
Clusters
  hosts = hosts:hosts
    Make hostfiles, and look at the hosts in them.
  check = check:check
    Check all hosts at the same time, and say which to drain, with the evidence.
  scale = scale:scale
    Split scaling efficiency into waiting for the slowest node and communication, and name slow
    nodes.
Know before you run
  estimate = estimate:estimate
    Estimate step time, throughput, days, money and energy of a recipe, with an 80% interval.
  rampup = rampup:rampup
    Plan a batch ramp-up: layout, nodes, device hours and days of every stage. Nothing runs.
  validate = validate:validate
    Predict the step time of every row and compare it with what was measured.
Read logs and tables
  parse = parse:parse
    Read training logs and say how fast the runs were, without launching anything.
  import = import_log:import_log
    Store a training log as a run that `list`, `show`, `report` and `compare` know.
  audit = audit:audit
    Recompute published tables and name what does not follow, and why.
  convert = convert:convert
    Convert a published MFU, TFLOP/s or step time to another convention.
Judge
  explain = explain:explain
    Say why a run is slow: causes by their share of the lost time, with evidence and remedies.
  goodput = goodput:goodput
    Say what a training's wall time went to over its restarts, and the days to its end.
  compare = compare:compare
    Say whether B is slower than A, faster, the same, or whether that is undecided.
  diff = diff:diff
    Name what differs between two runs, what usually matters most first.
  history = history:history
    Show all runs of a recipe in time order, find step changes, and name what changed with them.
Stored runs
  watch = watch:watch
    Show a run while it goes on: pace beside its own past, rates, waits, memory, clocks, ETA.
  list = runs:list_runs
    List runs, oldest first, with their status and headline figures.
  show = runs:show
    Show one run: status, figures, where its files lie.
  report = runs:report
    Write the report of one run as a file, and its charts as pictures.
  bundle = bundle:bundle
    Write a run as one archive that `verify`, `diff`, `import` and `run --from` read anywhere.
  export = export:export
    Write what was trained as Hugging Face has models: safetensors, their index, config.json.
  verify = bundle:verify
    Check a bundle: the digest of every file, and its figures recomputed from the raw files.
  db = group
    The index of runs, which can be deleted and rebuilt.
What there is
  recipes = recipes:recipes
    List the recipes, or print one as a starting point for your own.
  devices = devices:devices
    List the hardware that Paceline knows, every figure with its source.
  engines = engines:engines
    List the frameworks that `run` can start, what they need, and install it apart.
  version = version:version
    Print the versions of Paceline, Python and torch.
""")
"""By the panels of `paceline --help`; each line is the first sentence of the verb's own docs."""
GROUPS = _verbs("""
probe
  memory = probe_machine:memory
    Measure the rate at which a device copies its memory, read and written together.
  collective = probe_machine:collective
    Measure all-reduce among the devices of this machine, by payload.
  network = probe_network:network
    Measure every collective among all devices, and latency and rate between all hosts.
  storage = probe_storage:storage
    Measure what disks give to loaders and saves.
  attention = probe_machine:attention
    Measure the trainer's causal attention, forward and backward, in a recipe's shape.
  latency = probe_machine:latency
    Measure how long starting one small operation takes: what tiny models wait for.
  gemm = probe:gemm
    Measure the dense matrix-product rate that torch reaches here, per dtype.
  context = probe:context
    Measure the memory that a device loses before any model.
mlperf
  run = mlperf_run:run
    Train a benchmark to its target several times, and score the trials. Never an official
    result.
  system = mlperf_submission:system
    Describe this system for an MLPerf submission, and say in plain words what is still open.
  package = mlperf_submission:package
    Lay out a submission that the official package checker accepts: logs, description, code.
  compare = mlperf_compare:compare
    Hold scores against published results on as many accelerators of the same kind.
  score = mlperf_score:score
    Score a set of MLPerf runs: run times, olympic mean, convergence test, scaling, minutes.
  check = mlperf_score:check
    Run the official MLPerf checkers on logs, a system description or a whole submission.
db
  rebuild = runs:rebuild
    Read every run folder again and make the index anew.
""")
"""Verbs of verbs."""


class VerbGroup(TyperGroup):
    """Lists verbs without their modules; the callback of each brings the command that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, TyperCommand) and command.callback:
            command = command.callback()
        return name, command, rest


def add_verbs(app: typer.Typer, verbs: Iterable[Verb], panel: str | None = None) -> None:
    """List these verbs in a panel of the `--help` of `app`, whose class is VerbGroup."""
    for verb in verbs:
        if verb.source == "group":
            group = typer.Typer(cls=VerbGroup, help=verb.line, no_args_is_help=True)
            add_verbs(group, GROUPS[verb.name])
            app.add_typer(group, name=verb.name, rich_help_panel=panel)
        else:
            app.command(verb.name, help=verb.line, rich_help_panel=panel)(verb.command)
