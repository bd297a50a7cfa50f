"""What is secret by its name, by its form, or because the environment says so; and its removal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

REDACTED = "(redacted)"

SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|JWT|COOKIE|_PWD$|_PAT$", re.IGNORECASE)
"""Names of variables whose values are written into no file, no argument and no report."""
_NUMBER = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?", re.IGNORECASE)
SHORTEST_VALUE = 6
"""Characters of an environment's secret that is searched for: a shorter one is in every text."""
LONG_WORD = 12
"""Letters alone that are fewer are a word of some text, whatever variable has it."""
_PLAIN_VALUE = re.compile(r"true|false|none|yes|no|on|off|default|auto|[/~.].*", re.IGNORECASE)
"""Values of variables such as TOKENIZERS_PARALLELISM and SSH_AUTH_SOCK, which are no secrets."""

# What a secret is made of: nothing that ends a word in JSON, HTML, YAML, a shell or a URL.
_WORD = r"[^\s\"'`<>&;,\\|(){}\[\]]"
_OF_KEYS = re.compile(
    r"(?:api|access|account|private|secret|auth|license|shared|ngc|wandb|hf)[_-]?$", re.I
)
"""What stands before `key` where that opens something: there are cache keys and sort keys too."""
_PREFIXES = (
    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"nvapi-[\w-]{16,}",  # NGC
    r"sk-[\w-]{16,}",  # OpenAI, Anthropic
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}",
    r"glpat-[\w-]{16,}",  # GitLab
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # AWS
    r"AIza[\w-]{30,}|ya29\.[\w-]{16,}",  # Google
    r"xox[abeoprs]-[\w-]{10,}",  # Slack
    r"dckr_pat_[\w-]{16,}|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON web tokens
)
_FORMS = (
    # user:password@ or token@ in a URL; up to the last @, for a password may hold any character.
    re.compile(
        rf"(?P<keep>\b[A-Za-z][A-Za-z0-9+.-]*://)(?!git@)(?:[^\s/:@\"'<>\\]*:{_WORD}+|"
        r"[^\s/@\"'<>\\]+)(?=@)"
    ),
    re.compile(
        rf"(?P<keep>\bAuthorization[\"']?\s*[=:]\s*[\"']?(?!\w+\s+{re.escape(REDACTED)})(?:\w+\s+)?)"
        rf"{_WORD}+",
        re.I,
    ),
    re.compile(
        r"(?P<keep>\b(?:Bearer|Basic|Token)\s+)(?=[\w.~+/=-]*[\d._~+/=-])[\w.~+/-]{8,}=*", re.I
    ),
    # password=value, --passphrase value, "passwd": "value"
    re.compile(
        rf"(?P<keep>(?:passw(?:or)?d|passphrase|_pwd)[\"']?(?:\s?[=:]\s?|\s)[\"']?)"
        rf"(?=\S*[^a-z\s]){_WORD}{{4,}}",
        re.I,
    ),
    # API_KEY=value, "account_token": "value", X-Api-Key: value
    re.compile(
        r"(?P<keep>(?P<name>key(?:[_-]?id)?|token|secret|credentials?|signature|\bsig)[\"']?"
        rf"(?:\s?[=:]\s?|\s)[\"']?)(?P<value>{_WORD}{{8,}})",
        re.I,
    ),
    re.compile(rf"\b(?:{'|'.join(_PREFIXES)})"),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
)


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is to be kept out of files, arguments and reports."""
    return bool(SECRET_NAME.search(name)) or has_secret(value)


def has_secret(text: str) -> bool:
    """Whether some part of a text has the form of a secret."""
    return _without_forms(text) != text


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without secrets: by form, and the values of the environment's secret variables."""
    if environment:
        for value in _values(frozenset(environment.items())):
            text = value.sub(REDACTED, text)
    return _without_forms(text)


@cache
def _values(environment: frozenset[tuple[str, str]]) -> tuple[re.Pattern[str], ...]:
    """Whole words that are secrets by variables, the longest first, for one may hold another."""
    values = {
        value
        for name, value in environment
        if SECRET_NAME.search(name)
        and len(value) >= SHORTEST_VALUE
        and not _PLAIN_VALUE.fullmatch(value)
        and not (value.isalpha() and len(value) < LONG_WORD)
    }
    longest_first = sorted(values, key=len, reverse=True)
    return tuple(re.compile(rf"(?<!\w){re.escape(value)}(?!\w)") for value in longest_first)


def _without_forms(text: str) -> str:
    for form in _FORMS:
        text = form.sub(_replacement, text)
    return text


def _replacement(match: re.Match[str]) -> str:
    parts = match.groupdict()
    if "value" in parts:
        before = match.string[max(0, match.start() - 12) : match.start()]
        is_cache_key = parts["name"].lower().startswith("key") and not _OF_KEYS.search(before)
        if is_cache_key or not _is_random(parts["value"]):
            return match[0]
    return (parts.get("keep") or "") + REDACTED


def _is_random(word: str) -> bool:
    """Whether a word looks drawn, not written: letters and digits mixed, as no name is.

    `pad_token: <|endoftext|>`, `token=end_of_text` and `secret: kept` are no secrets.
    """
    if _NUMBER.fullmatch(word):
        return False
    classes = [bool(re.search(kind, word)) for kind in (r"[a-z]", r"[A-Z]", r"\d", r"[^\w\s]")]
    digits = sum(character.isdigit() for character in word)
    return sum(classes) >= 3 or (classes[2] and sum(classes) >= 2 and digits * 6 >= len(word))
