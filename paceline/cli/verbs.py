"""Verbs with their lines of help; the module of a verb is imported when it is called."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, Literal, cast, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from paceline.core import interrupts
from paceline.core.errors import UserError
from paceline.core.secrets import redact
from paceline.core.units import LARGEST_INT

MAX_IN_ONE_LIST = 15
"""Number of options that `--help` shows without headings, and without leaving any out."""
HELP = frozenset({"--help", "-h"})
HELP_ALL = "--help-all"
COMMON_OPTIONS = {
    "run": "--set --variant --gpus --cluster --hosts --nodes --steps --repeat --tag --dry-run",
    "sweep": "--tp --pp --zero --mbs --set --gpus --cluster --hosts --name --dry-run",
    "tune": "--gpus --device --estimate-only --top --budget --set --hosts --save-recipe --dry-run",
    "estimate": "--gpu --gpus --days --budget --tp --pp --zero --mbs --compare --tokens --price",
    "rampup": "--device --stages --max-nodes --samples --tokens --check --set --cluster",
    "parse": "--model --gpu --gpus --seq-len --dtype --gbs --window --per-step --where",
    "compare": "--margin --metric --allow --group --sequential --against --html --model --gpu",
    "explain": "--against --profile --html --model --gpu --gpus --seq-len --dtype --gbs",
    "import_log": "--tag --model --gpu --gpus --seq-len --dtype --gbs --window --reimport",
    "check": "--hosts --node --nodes --fast --devices-only --against --drain-file --wait",
    "scale": "--from --sizes --rounds --set --hosts --nodes --cluster --name --resume --dry-run",
    "stage": "--to --asset --engine --hosts --local --dry-run --verify --jobs",
    "probe_network": "--hosts --nodes --cluster --ops --pairs --max-bytes --seconds",
    "probe_experts": "--hosts --nodes --devices --tokens --hidden --experts --top-k --seconds",
    "probe_storage": "--recipe --run --hosts --nodes --ops --size --seconds",
    "profile": "--tool --from --ranks --steps --set --devices --hosts --html --dry-run",
    "mlperf_run": "--tiny --trials --data --engine --set --hosts --cluster --dry-run --status",
}
"""Options in the short help of verbs with more than MAX_IN_ONE_LIST options, by module.

`--json` is always among them. `--help-all` shows the others.
"""
LARGEST_NUMBER = 1e100
"""Maximum value of an option; larger than any quantity, and its square is finite."""
COMMAND = "command"
"""Name of the argument for a program after `--`."""
TABLE_FORMS = frozenset({"text", "csv", "json", "md"})
"""Values of `--format`; on a verb that reads logs, another value can be a log format."""
NAMES = frozenset({"tag", "group"})
"""Options whose values become file names."""


class VerbCommand(TyperCommand):
    """Command that refuses meaningless values: huge numbers, and bytes that are not text."""

    common: frozenset[str] = frozenset()
    """Names of the options in the short help; all if empty."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_placeholders(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args, command = _before_command(args) if self._takes_command() else (args, ())
        if any("--log-format" in param.opts for param in cast(list[Any], self.params)):
            args = _with_log_format(args)
        words = tuple(args)
        if HELP_ALL in args:
            args = ["--help"]
        elif self.common and HELP & {*args}:
            self._shorten_help(ctx.command_path)
        try:
            remaining_words = super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            # Here alone: most calls need not load what this does.
            from paceline.cli.wrong_option import usage_error

            raise usage_error(error, ctx, words) from error
        if self._takes_command():
            if ctx.params[COMMAND]:
                extra = f"unexpected extra argument {ctx.params[COMMAND][0]!r}"
                raise UserError(ctx.command_path, extra, remedy="write a program after `--`")
            ctx.params[COMMAND] = command
        if any(not word or word[-1] == "=" for word in words):
            from paceline.cli.wrong_option import refuse_empty_paths

            refuse_empty_paths(self.params, ctx.params, words)
        from paceline.cli.user_defaults import fill_defaults  # As above.

        fill_defaults(ctx, cast(list[Any], self.params))
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
                        "contains what looks like a secret",
                        remedy="choose another name, because it becomes part of file names",
                    )
        return remaining_words

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            from paceline.cli.wrong_option import usage_error

            raise usage_error(error, ctx) from error

    def _shorten_help(self, path: str) -> None:
        """Hide the options that are not common."""
        options = [param for param in self.params if isinstance(param, TyperOption)]
        uncommon = [option for option in options if self.common.isdisjoint(option.opts)]
        for option in uncommon:
            option.hidden = True
        last_line = f"`{path} {HELP_ALL}` shows {len(uncommon)} more options."
        self.epilog = " ".join([*filter(None, [self.epilog]), last_line])

    def _takes_command(self) -> bool:
        return any(param.name == COMMAND for param in cast(list[Any], self.params))


USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Base class of typer's errors for a wrong command line."""


def _with_placeholders(params: Iterable[Any]) -> list[Any]:
    """Return the parameters, with a placeholder in place of the type of each option's value."""
    parameters = list(params)
    for param in parameters:
        placeholder = _placeholder(param)
        if isinstance(param, TyperOption) and param.metavar is None:
            param.metavar = placeholder
        elif isinstance(param, TyperArgument) and placeholder is not None:
            # typer shows the type of an argument next to its name, whatever the metavar is.
            vars(param)["display_type_rich"] = lambda ctx: None
    return parameters


def _placeholder(param: TyperOption | TyperArgument) -> str | None:
    """Return what stands for a value in help; None for a list of choices."""
    if isinstance(param, TyperOption) and param.is_flag:
        return ""
    kind = param.type_descriptor.annotation
    if get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        return None
    if kind is int:
        return "N"
    if kind is float:
        return "NUMBER"
    name = max(param.opts, key=len).lstrip("-").upper()
    return "PATH" if kind is Path else name


def _with_log_format(words: list[str]) -> list[str]:
    """Return the words with `--log-format` for a `--format` that names a log format."""
    at = next((n for n, word in enumerate(words) if word.partition("=")[0] == "--format"), None)
    if at is None or words[at:] == ["--format"]:
        return words
    _, equals, value = words[at].partition("=")
    value = value if equals else words[at + 1]
    if value in TABLE_FORMS or value[:1] == "-":
        return words
    if PurePath(value).suffix not in (".yaml", ".yml"):
        from paceline.engines import log_formats  # Here alone: it imports every reader.

        if value.lower().replace("-", "_") not in log_formats():
            return words
    return [*words[:at], words[at].replace("--format", "--log-format", 1), *words[at + 1 :]]


def _before_command(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the words before the first `--`, and those after it."""
    if "--" not in words:
        return words, ()
    at = words.index("--")
    if at == len(words) - 1:
        raise UserError("--", "must be followed by a program", remedy="-- PROGRAM [ARGUMENT ...]")
    return words[:at], tuple(words[at + 1 :])


def _problem(value: object) -> str | None:
    """Return why a value is invalid for every option, or None."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_INT:
        return f"{value} is too large"
    if isinstance(value, float) and not abs(value) <= LARGEST_NUMBER:
        return f"must be a finite number, not {value}"
    if isinstance(value, str | PurePath):
        printable = str(value).encode("utf-8", "backslashreplace").decode()
        return f"{printable} is not UTF-8" if printable != str(value) else None
    return None


@dataclass(frozen=True)
class Verb:
    """Verb as listed by `--help`."""

    name: str
    source: str
    """`module:function` in this package, or `group`."""
    line: str

    def command(self) -> Any:
        """Import the module and return the command."""
        function = self.function()
        from paceline.cli.options import (
            with_option_groups,
        )  # With the verb: `--help` of all needs it not.

        app = typer.Typer(add_completion=False)
        app.command(self.name, cls=VerbCommand)(with_option_groups(function))
        command = typer.main.get_command(app)
        options = [param for param in command.params if isinstance(param, TyperOption)]
        if len(options) <= MAX_IN_ONE_LIST:
            for option in options:
                option.rich_help_panel = None
        else:
            names = COMMON_OPTIONS[self.source.partition(":")[0]].split()
            command.common = frozenset([*names, "--json"])  # type: ignore[attr-defined]
        if FAMILIES.get(self.name) is self:
            command.epilog = " ".join(
                f"See also `paceline {self.name} {member.name}`." for member in GROUPS[self.name]
            )
        _with_placeholders(command.params)
        return command

    def function(self) -> Any:
        """Return the function of the verb, whose parameters are its options."""
        module, _, name = self.source.partition(":")
        with interrupts.deferred_interrupts():
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
    Benchmark a recipe: train it on this machine or on hosts, measure it, and write a report.
  ab = ab:ab
    Run two commands in turns until it is decided which one is better.
  sweep = sweep:sweep
    Run a recipe in all combinations of some settings and report which is fastest.
  tune = tune:tune
    Find the fastest layout of a recipe, with a few runs or by estimate only.
  probe = group
    Measure the parts of a machine, calibrate estimates with them, or profile a step.
  reproduce = reproduce:reproduce
    Repeat a published benchmark: stage, launch, and compare with the published figures.
  mlperf = group
    Run, score, check and package MLPerf Training benchmarks. Never an official result.
Plan
  estimate = estimate:estimate
    Estimate step time, throughput, duration, cost and energy of a training, with 80% intervals.
Analyse
  parse = parse:parse
    Read training logs and report how fast the runs were.
  compare = compare:compare
    Test whether B is slower than A, faster, the same, or whether that is undecided.
  explain = explain:explain
    Explain why a run is slow: causes, time lost to each, evidence and remedies.
  table = group
    Audit published tables, and compare them with estimates.
Clusters
  check = check:check
    Check all hosts at the same time and report which to drain, with the evidence.
  scale = scale:scale
    Split scaling efficiency into stragglers and communication, and identify slow nodes.
Runs and recipes
  runs = group
    List, show, watch, compare, share and delete stored runs.
  recipes = recipes:recipes
    List the recipes, or print one as a starting point for your own.
""")
"""Verbs by heading of `paceline --help`; each line is the first sentence of the docstring.

The verbs with entries in GROUPS are groups. Those that are not declared as `group` also work alone.
"""
GROUPS = _verbs("""
runs
  list = runs:list_runs
    List runs, oldest first, with their status and key figures.
  show = runs:show
    Show one run: status, figures, and where its files are.
  watch = watch:watch
    Watch a run in progress: speed, rates, waits, memory, clocks and ETA.
  rm = rm:rm
    Delete runs: their folders, and their entries in the index.
  report = runs:report
    Write the report of a run to a file, and its charts as images.
  history = history:history
    Show all runs of a recipe over time, detect step changes, and list what changed with them.
  diff = diff:diff
    List the differences between two runs, the most important first.
  goodput = goodput:goodput
    Show how the wall time of a training was spent over its restarts, and the days left.
  import = import_log:import_log
    Store a training log as a run for `compare`, `explain` and all commands of `runs`.
  bundle = bundle:bundle
    Write a run as one archive for `runs verify`, `runs diff`, `runs import` and `run --from`.
  verify = bundle:verify
    Verify a bundle: check the digest of every file and recompute its results from the raw files.
  export = export:export
    Write a run for TensorBoard, W&B, MLflow or Prometheus, or its weights for Hugging Face.
  index = runs:index
    Rebuild the index of runs from all run folders.
recipes
  devices = devices:devices
    List the hardware that Paceline knows, with the source of every figure.
  engines = engines:engines
    List the training frameworks that `run` can start, and install their environments.
  formats = formats:formats
    List the log formats that `parse` recognizes, explain one, or try one on a file.
  stage = stage:stage
    Fetch and verify what a recipe needs: models, data, code and containers.
estimate
  rampup = rampup:rampup
    Plan a batch-size ramp-up: layout, nodes, device-hours and days of every stage.
check
  hosts = hosts:hosts
    Create hostfiles, and check the hosts in them.
table
  audit = audit:audit
    Recompute published tables, report inconsistent cells and explain them.
  validate = validate:validate
    Predict the step time of every row of a table and compare it with the measured one.
  convert = convert:convert
    Convert a published MFU, TFLOP/s or step time to another FLOPs convention.
probe
  gemm = probe:gemm
    Measure the GEMM throughput that torch reaches on this machine, by data type.
  attention = probe_machine:attention
    Measure the trainer's causal attention, forward and backward, with the shape of a recipe.
  memory = probe_machine:memory
    Measure the memory copy bandwidth of a device, reads plus writes.
  collective = probe_machine:collective
    Measure all-reduce between the devices of this machine, by payload.
  network = probe_network:network
    Measure all collectives, and the latency and bandwidth between all hosts.
  experts = probe_experts:experts
    Measure dispatch, expert GEMMs and combine of a layer with experts on all devices.
  storage = probe_storage:storage
    Measure the storage bandwidth for data loading and checkpoints.
  latency = probe_machine:latency
    Measure the launch latency of one small operation, which limits tiny models.
  context = probe:context
    Measure the memory that a device uses before any model is loaded.
  calibrate = calibrate:calibrate
    Measure this machine, so that `estimate`, `sweep` and `tune` predict it better.
  profile = profile:profile
    Show where the time or the memory of a training step goes, with one profiler.
mlperf
  run = mlperf_run:run
    Train a benchmark to its target several times and score the trials. Never an official
    result.
  system = mlperf_submission:system
    Describe this system for an MLPerf submission, and list what is still missing.
  package = mlperf_submission:package
    Create a submission that the official package checker accepts: logs, description, code.
  compare = mlperf_compare:compare
    Compare scores with published results on the same number and type of accelerators.
  score = mlperf_score:score
    Score a set of MLPerf runs: run times, olympic mean, convergence test and scaling.
  check = mlperf_score:check
    Run the official MLPerf checkers on logs, a system description or a submission.
""")
"""Verbs by group."""


class VerbGroup(TyperGroup):
    """Group that lists verbs without importing them; a callback returns the called command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_placeholders(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            from paceline.cli.wrong_option import usage_error

            raise usage_error(error, ctx) from error

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of the tables; typer lists groups after commands."""
        order = [verb.name for verbs in VERBS.values() for verb in verbs]
        names = super().list_commands(ctx)
        return names if ctx.parent else sorted(names, key=order.index)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args[0] in SHORT_FORMS and args[0] not in self.commands:
            args = [SHORT_FORMS[args[0]], *args]
        if not ctx.resilient_parsing and args[0] not in self.commands and args[0][:1] != "-":
            from paceline.cli.wrong_option import unknown_command

            raise unknown_command(args[0], ctx.command_path, _verbs_by_path())
        name, command, remaining_words = super().resolve_command(ctx, args)
        if isinstance(command, VerbGroup):
            alone = FAMILIES.get(name or "")
            if alone and not {*remaining_words[:1]} & command.commands.keys():
                command = alone.command()
        elif isinstance(command, TyperCommand) and command.callback:
            command = command.callback()
        return name, command, remaining_words


SHORT_FORMS = {"formats": "recipes"}
"""Groups of verbs that are also accepted at the top."""
FAMILIES = {
    verb.name: verb
    for verbs in VERBS.values()
    for verb in verbs
    if verb.name in GROUPS and verb.source != "group"
}
"""Verbs that work alone and have further verbs under their name."""


def _verbs_by_path() -> dict[str, Verb]:
    tables = [("paceline", [verb for verbs in VERBS.values() for verb in verbs])]
    tables += [(f"paceline {group}", [*verbs]) for group, verbs in GROUPS.items()]
    return {f"{path} {verb.name}": verb for path, verbs in tables for verb in verbs}


def add_verbs(app: typer.Typer, verbs: Iterable[Verb], panel: str | None = None) -> None:
    """Add verbs to `app` (a VerbGroup) under a heading of its `--help`."""
    for verb in verbs:
        # Only at the top: `mlperf check` is not a group.
        members = GROUPS.get(verb.name, ()) if panel else ()
        if not members:
            app.command(verb.name, help=verb.line, rich_help_panel=panel)(verb.command)
            continue
        names = ", ".join(member.name for member in members)
        line = f"{verb.line} Also: {names}." if verb.name in FAMILIES else verb.line
        group = typer.Typer(cls=VerbGroup, help=line, no_args_is_help=True)
        add_verbs(group, members)
        app.add_typer(group, name=verb.name, rich_help_panel=panel)
