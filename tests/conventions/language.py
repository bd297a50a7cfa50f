"""Check names, docstrings, strings and documents for words that only this project would understand.

    python -m tests.conventions.language [--summary] [PATH ...]

Prints `file:line: kind: what; remedy` for each finding and exits with 1 if there is any. A line
that needs such a word, because a file format or another program uses it, ends with the comment
`# language: allow`.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CHECKED = (
    "README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks",
    "docs",
    "paceline",
    "tests",
)
"""Paths that `make lint` checks; add a path when it has no finding left.

Docstrings are checked in the whole package.
"""
ALLOW = "language: allow"

IRREGULAR = frozenset(
    """
    again apart begun beside besides bought broken brought built chosen cut done drawn fell felt
    found given gone grown held here kept known laid led left lent lost made meant met own paid
    put rest said seen sent shown so sought spent stood such taken there told torn understood won
    written
    """.split()  # noqa: SIM905
)
"""Words that do not say what a variable holds, in addition to regular participles in -ed."""

STANDARD = frozenset(
    """
    allocated allowed averaged bed cached compiled computed converted corrected created detached
    detected disabled elapsed embed enabled escaped estimated excluded expected exposed failed
    finished fitted fixed fused indexed installed interrupted isolated masked measured merged
    missed mixed muted need nested observed overlapped packed padded passed pooled predicted
    printed published recomputed red redacted removed replicated reported reserved reversed scaled
    seed shard sharded shared simulated skipped sorted speed submitted tied unexpected unsupported
    unused used visited weighted
    """.split()  # noqa: SIM905
)
"""Participles that are terms of the field, or nouns."""

NAMES = {
    "Inquiry": "DiagnosisContext",
    "Question": "EstimateRequest",
    "Answer": "EstimateOutput",
    "Outlook": "CostForecast",
    "Passage": "simulate_training_run",
    "Span": "Interval80",
    "Reach": "CommLevel",
    "Bill": "TrainingCost",
    "Basis": "Provenance",
    "Belief": "Posterior",
    "Against": "Comparison",
    "Gain": "ReplacementGain",
    "Blame": "SlowNodeReport",
    "Judged": "NodeVerdict",
    "Judging": "AnalysisContext",
    "Lasting": "PersistentComponent",
    "Contrast": "MetricComparison",
    "Likeness": "ComparabilityReport",
    "Member": "RunInput",
    "Side": "Sample",
    "Standing": "RankedOption",
    "Gate": "ComparisonOptions",
    "Turn": "ScheduledRepeat",
    "Lanes": "SlotQueues",
    "Losses": "LostSlots",
    "Conduct": "...Options",
    "Several": "...Options",
    "_How": "...Options",
    "Where": "Placement",
    "Needs": "Requirements",
    "Facts": "RunSettings",
    "Setting": "...Context",
    "Desk": "TransferCallbacks",
    "Diary": "SlurmJournal",
    "Marks": "JobMarkers",
    "Heard": "Message",
    "Crew": "WorkerPool",
    "Bystander": "UnprofiledRank",
    "_Aside": "a term of the field",
    "Look": "ChartTheme",
    "Piece": "TensorSlice",
    "Pieces": "StepComponents",
    "MisfitError": "LayoutError",
    "UnsoundCheckpointError": "CorruptCheckpointError",
    "AskedToEndError": "Terminated",
    "NobodyToAskError": "QuotaUnsupported",
    "tell_notices": "print_notices",
    "as_of_now": "refresh",
    "left_alone": "orphan_status",
    "hopeless": "prune_reason",
    "go_on": "resume",
    "worth": "prune",
    "twins": "equivalent_campaigns",
    "immaturity": "software_age_factor",
    "crowding": "cpu_oversubscription",
    "young": "kernel_immaturity",
    "visited_tensors": "param_tensors",
    "kept_per_token": "saved_activations_per_token",
    "paced_steps": "steps_from_throughput",
}
"""Whole names that are not to come back, and the term to use."""

PHRASES = {
    r"held against|(?:is|are|were|was) held\b(?! by| in| for| out| until| while)": "compared with",
    r"go(?:es|ing)? on (?:with|after|at|from|where)|(?:gone|went) on with": "resume, continue",
    r"broken off|breaks? off|broke off": "interrupted",
    r"\bbegun\b": "started",
    r"\bbesides?\b": "next to, compared with, in addition to",
    r"whole ones?\b(?= )": "full-size model",
    r"\bsiblings?\b(?! dir)": "tiny variant",
    r"(?:is|are|was|were|be|been|not) told\b|\btold of\b|\btells? of\b": "is given, is reported",
    r"\bso (?:many|much|long|often|few)\b(?! (?:as|that|more|less|faster|slower))": "N",
    r"\banew\b": "again",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|faster|slower|better|larger)": (
        "is not a ..."
    ),
    r"\bstands? (?:under|beside|in (?:the|its|a) (?:log|file|folder|table))": "is in",
    r"\blies? (?:in|under|beside)\b|\blying\b": "is in",
    r"\bwitness(?:es|ed)?\b": "evidence",
    r"\bstand-ins?\b": "fake, mock",
    r"\bnobody (?:showed|has seen|saw)\b": "unseen, held-out",
    r"\bdialects?\b": "log format",
    r"\bseed procedures?\b": "benchmark",
    r"\b(?:large|dense) products\b|\bmatrix products?\b": "GEMMs",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bjitter tax\b": "jitter overhead",
    r"\bfast domain\b": "NVLink domain",
    r"\bhow sure\b": "confidence",
    r"\boffers?\b(?! (?:a|an|the|no|to)\b)": "scenario",
    r"\bgate failed\b": "check failed",
    r"\b(?:communication|waiting) leaves\b": "communication efficiency, straggler efficiency",
    r"\bof the luck\b": "random seed",
    r"\bmakers?\b": "vendor",
    r"\bwhoever\b|\bwhomever\b": "name the reader or the program",
    r"(?<=[\d}]) %(?![\w{(=.-])": "no space before %",
}
"""Wording that an engineer of the field would not use, and what to write."""

RULES = {re.compile(pattern, re.IGNORECASE): remedy for pattern, remedy in PHRASES.items()}
FIRST_WORDS = re.compile(
    r"(?:What|Of|Where|Whose|Which|Who|Whom|How|Why|When|While|As|That|Nor|Nothing|Nobody|So|By|To|"
    r"If|Whether|Also|And|Or|But|Such)\b"
)
"""First words of a docstring that begin a clause instead of an imperative or a noun."""

MAX_SENTENCE_WORDS = 45
MAX_MEAN_SENTENCE_WORDS = 20


class Finding(NamedTuple):
    file: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.kind}: {self.text}"


def check_python(file: Path) -> Iterator[Finding]:
    source = file.read_text()
    allowed = {n for n, line in enumerate(source.splitlines(), 1) if ALLOW in line}
    tree = ast.parse(source)
    in_tests = file.is_relative_to(ROOT / "tests")
    findings = [*_names(file, tree, in_tests), *_strings(file, source)]
    if not in_tests:
        findings += _docstrings(file, tree)
    return (finding for finding in findings if finding.line not in allowed)


def _names(file: Path, tree: ast.AST, in_tests: bool) -> Iterator[Finding]:
    booleans = {
        id(node.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("bool")
    }
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=annotation):
                is_bool = annotation is not None and ast.unparse(annotation).startswith("bool")
            case ast.Name(id=name, ctx=ast.Store()):
                is_bool = id(node) in booleans
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                is_bool = node.returns is not None and ast.unparse(node.returns) == "bool"
            case ast.ClassDef(name=name):
                is_bool = False
            case _:
                continue
        line = getattr(node, "lineno", 1)
        if re.match(r"_?(?:MOST|LEAST|USUAL)_", name):
            yield Finding(file, line, "name", f"{name}; MAX_, MIN_ or DEFAULT_")
        elif name in NAMES:
            yield Finding(file, line, "name", f"{name}; {NAMES[name]}")
        elif not in_tests and not is_bool and is_bare_participle(name):
            yield Finding(file, line, "participle", f"{name}; say what it holds or returns")


def is_bare_participle(name: str) -> bool:
    """Whether a name says that something was done to what it holds, and not what that is."""
    word = name.strip("_")
    if word in STANDARD:
        return False
    return word in IRREGULAR or re.fullmatch(r"[a-z]+ed", word) is not None


def _docstrings(file: Path, tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and FIRST_WORDS.match(text):
                line = node.body[0].lineno
                yield Finding(file, line, "docstring", f"{text.splitlines()[0]!r}; an imperative")
    for before, after in _pairs(tree):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = after.value.value
            named = isinstance(before, ast.Assign | ast.AnnAssign)
            if named and isinstance(text, str) and FIRST_WORDS.match(text):
                yield Finding(file, after.lineno, "docstring", f"{text.splitlines()[0]!r}; a noun")


def _pairs(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield from itertools.pairwise(body)


def _strings(file: Path, source: str) -> Iterator[Finding]:
    texts = {tokenize.STRING, tokenize.COMMENT}
    texts |= {getattr(tokenize, name, -1) for name in ("FSTRING_MIDDLE",)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in texts:
            yield from check_text(file, token.string, token.start[0])


def check_text(file: Path, text: str, first_line: int = 1) -> Iterator[Finding]:
    """The phrases of the list in a text; a line break counts as a space."""
    flat = re.sub(r"\n[ \t#]*", lambda match: " " + " " * (len(match[0]) - 1), text)
    for pattern, remedy in RULES.items():
        for match in pattern.finditer(flat):
            line = first_line + text.count("\n", 0, match.start())
            yield Finding(file, line, "phrase", f"{match[0]!r}; {remedy}")


def check_markdown(file: Path) -> Iterator[Finding]:
    text = file.read_text()
    lines = text.splitlines()
    allowed = {n for n, line in enumerate(lines, 1) if ALLOW in line}
    prose = strip_code(text)
    findings = list(check_text(file, prose))
    lengths: list[int] = []
    for line, sentence in sentences(prose):
        lengths.append(len(sentence.split()))
        if lengths[-1] > MAX_SENTENCE_WORDS:
            findings.append(
                Finding(file, line, "sentence", f"{lengths[-1]} words: {sentence[:60]}")
            )
    mean = sum(lengths) / len(lengths) if lengths else 0
    if mean > MAX_MEAN_SENTENCE_WORDS:
        findings.append(Finding(file, 1, "sentence", f"{mean:.1f} words a sentence on average"))
    return (finding for finding in findings if finding.line not in allowed)


def strip_code(text: str) -> str:
    """Blank out fenced blocks, inline code, comments and link targets; keep the line numbers."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r"^( *)(```|~~~).*?^ *\2 *$", blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)\s]*\)", lambda match: "]" + " " * (len(match[0]) - 1), text)
    return re.sub(r"`[^`\n]+`", lambda match: "x" * len(match[0]), text)


def sentences(prose: str) -> Iterator[tuple[int, str]]:
    """Each sentence of running text with its line; tables, headings and rules are left out."""
    block: list[str] = []
    start = 1
    for number, line in enumerate([*prose.splitlines(), ""], 1):
        item = re.match(r" *(?:[-*+]|\d+\.) +", line)
        if (
            not line.strip()
            or line.lstrip().startswith(("|", "#", "---", "===", "!!!", "???"))
            or item
        ):
            yield from ((start, part) for part in _split(" ".join(block)))
            block = [line[item.end() :]] if item else []
            start = number
        else:
            if not block:
                start = number
            block.append(line.strip())
    yield from ((start, part) for part in _split(" ".join(block)))


def _split(text: str) -> list[str]:
    parts = re.split(r"(?<=[.!?])[)\"'*_]* +(?=[A-Z\"'(*_`\[x])", text.strip())
    return [part for part in parts if re.search(r"[a-z]", part)]


def files(paths: list[str]) -> Iterator[Path]:
    for path in map(ROOT.joinpath, paths):
        if path.is_dir():
            found = [*path.rglob("*.py"), *path.rglob("*.md")]
            yield from sorted(file for file in found if file != Path(__file__))
        else:
            yield path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", default=list(CHECKED))
    parser.add_argument("--summary", action="store_true", help="print counts only")
    options = parser.parse_args()
    findings: list[Finding] = []
    for file in files(options.paths):
        findings += check_python(file) if file.suffix == ".py" else check_markdown(file)
    if options.paths == list(CHECKED):
        for file in set(files(["paceline"])) - set(files(list(CHECKED))):
            findings += _docstrings(file, ast.parse(file.read_text()))
    if options.summary:
        counts = Counter(f"{f.kind} {f.file.relative_to(ROOT).parts[:2]}" for f in findings)
        for kind, count in sorted(counts.items()):
            print(f"{count:6} {kind}")
    else:
        print(*findings, sep="\n")
    print(f"{len(findings)} findings", file=sys.stderr)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
