"""Detection and redaction of secrets, by variable name, by format and by environment variables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from urllib.parse import quote

from paceline.core.text import printable

REDACTED = "(redacted)"

_SECRET_NAME = re.compile(
    r"(?:TOKENS?|(?<!(?<![A-Z])MON)(?<!(?<![A-Z])TUR)(?<!(?<![A-Z])HOT)KEYS?|SECRETS?"
    r"|(?<!BY)(?<!COM)PASS(?:W(?:OR)?D|PHRASE|CODE)?S?|CRED(?:ENTIAL)?S?"
    r"|AUTH(?:ORIZATION|ENTICATION)?|JWT"
    r"|COOKIES?|BEARER|WEBHOOK|_PWD|_PW|_PAT|_SAS)(?:VALUE|VAL|HEADER|CONFIG|DATA|STRING|HASH)?S?"
    r"(?!(?-i:[a-z]|(?<=[A-Z])[A-Z](?!\d)))",
    re.IGNORECASE,
)
"""Words in the names of variables with secrets. A letter of the same case behind one makes another
word: the names TOKENIZERS_PARALLELISM, NUM_PASSES, KEYBOARD and AUTHOR have no secret."""
_AMOUNT_NAME = re.compile(
    r"(?!.*(?:AUTH|ACCESS|API|SECRET|PASS|CRED|JWT|COOKIE))"
    r"(?:(?:.*_)?(?:MAX|MIN|NUM|TOTAL|COUNT|PER|TRAIN|EVAL|BATCH|SEQ|WARMUP|TARGET|NEW)(?:_.*)?"
    r"|TOKENS|KEYS)",
    re.IGNORECASE,
)
"""Names of variables whose numbers are amounts: MAX_TOKENS, TOKENS_PER_BATCH, NUM_KEYS."""
_FILE_NAME = re.compile(r"_(?:FILE|PATH|DIR|HOME|SOCK)$", re.IGNORECASE)
"""Names of variables that hold the place of a secret. The place itself is not one."""
_SWITCH = re.compile(r"|0|1|true|false|none|null|yes|no|on|off|default|auto", re.IGNORECASE)
_AMOUNT = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+|[kmbt])?", re.IGNORECASE)
"""Number with an optional unit, such as 4096, 4.8e11 and 15T."""
_NUMBER = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?", re.IGNORECASE)
SHORTEST_VALUE = 6
"""Minimum length of a secret value to search for. Shorter values occur in any text."""
_COMMON_WORD = re.compile(
    "anonymous|apptainer|baseline|cancelled|cluster|daemon|deepspeed|device|devices|"
    "disable|disabled|docker|dryrun|enable|enabled|external|failed|huggingface|incomplete|"
    "internal|kerberos|keychain|keyring|layout|megatron|memory|mlflow|native|network|"
    "nothing|nvidia|offline|online|optional|paceline|password|python|pytorch|recipe|"
    "report|required|result|running|samples|seconds|singularity|storage|system|throughput|"
    "timeout|tokens|training|unknown|warning",
    re.IGNORECASE,
)
"""Words of reports and of settings. As values of secret variables they are not searched for."""
_PLACE_NAME = re.compile(r"(?:ASKPASS|CREDENTIALS|DIRECTORY|FILE|PATH)$", re.IGNORECASE)
"""Names of variables whose value is a program or file if it is an absolute path."""

# Lengths are bounded, because the text may be hostile and each match attempt must end soon. The
# class of characters excludes all that end a word in JSON, HTML, YAML, a shell or a URL.
_WORD = r"[^\s\"'`<>&;,\\|(){}\[\]]"
_OF_KEYS = re.compile(
    r"(?:api|access|account|private|secret|auth|license|shared|ngc|wandb|hf)[_-]?$", re.I
)
"""Words before `key` that mark a credential. Cache keys and sort keys are not secrets."""
_PREFIXES = "|".join(
    (
        r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
        r"nvapi-[\w-]{16,}",  # NGC
        r"sk-[\w-]{16,}",  # OpenAI, Anthropic
        r"gh[pousr]_[A-Za-z0-9]{16,}",
        r"github_pat_\w{16,}",
        r"glpat-[\w-]{16,}",  # GitLab
        r"A[KS]IA[A-Z0-9]{16}",  # AWS
        r"AIza[\w-]{30,}",  # Google
        r"ya29\.[\w-]{16,}",
        r"xox[abeoprs]-[\w-]{10,}",  # Slack
        r"dckr_pat_[\w-]{16,}",
        r"npm_[A-Za-z0-9]{16,}",
        r"pypi-[\w-]{16,}",
        r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON web tokens
    )
)
_FORMS = (
    re.compile(rf"\b(?:{_PREFIXES})"),
    # user:password@ or token@ in a URL, up to the last @, because a password may contain any
    # character.
    re.compile(
        r"(?P<keep>://)(?!git@)(?:[^\s/:@\"'<>\\]{0,200}:[^\s\"`<>&;,|(){}\[\]]{1,999}|"
        r"[^\s/@\"'<>\\]{1,999})(?=@)"
    ),
    re.compile(
        r"(?P<keep>\bAuthorization[\"']?\s*[=:]\s*[\"']?"
        rf"(?!\w+\s+{re.escape(REDACTED)})(?:\w+\s+)?){_WORD}+",
        re.I,
    ),
    re.compile(
        # Ordinary words also follow these. An inner capital, a digit or a sign marks a secret.
        r"(?P<keep>\bBearer\s+(?=[\w.~+/=-]{0,99}(?:\d|[._~+/-]\w|(?-i:[a-z][A-Z])))|"
        r"\b(?:Basic|Token)\s+(?![\d.,]+(?![\w~+/=-]))"
        r"(?=[\w.~+/=-]{0,99}(?:[\d=]|(?-i:[a-z][A-Z]))))[\w.~+/-]{8,}=*",
        re.I,
    ),
    # password=value, --passphrase value, "passwd": "value"
    re.compile(
        r"(?P<keep>(?:passw(?:or)?d|passphrase|(?<=_)pwd)[\"']?(?:\s?[=:]\s?|\s)[\"']?)"
        rf"(?=\S{{0,99}}[^a-z\s]){_WORD}{{4,999}}",
        re.I,
    ),
    # API_KEY=value, "account_token": "value", X-Api-Key: value
    re.compile(
        r"(?P<keep>(?P<name>key(?:[_-]?id)?|token|secret|credentials?|signature|\bsig)[\"']?"
        rf"(?:\s?[=:]\s?|\s)[\"']?)(?P<value>{_WORD}{{8,512}})",
        re.I,
    ),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
        r"(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)"
    ),
)
_BEGINNING = re.compile(
    "://|authorization|bearer|basic|token|passw|passphrase|pwd|key|secret|credential|sig|-----begin|"
    "hf_|nvapi-|sk-|gh[pousr]_|github_|glpat-|akia|asia|aiza|ya29|xox|dckr_|npm_|pypi-|eyj"
)
"""Possible beginnings of a secret, in lower case. One pass finds the few positions to examine."""


class SecretText(str):
    """Value that must be kept out of files, arguments and reports, whatever its name."""

    __slots__ = ()


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable must be kept out of files, arguments and reports."""
    return isinstance(value, SecretText) or has_secret_name(name, value) or has_secret(value)


def has_secret_name(name: str, value: str) -> bool:
    """Return whether a variable's name says that its value is a secret.

    Switches, places of files, and amounts such as MAX_TOKENS=4096 are not secrets.
    """
    if not _SECRET_NAME.search(name) or _SWITCH.fullmatch(value):
        return False
    is_place = _FILE_NAME.search(name) and value.startswith(("/", "~", "."))
    is_amount = _AMOUNT_NAME.fullmatch(name) and _AMOUNT.fullmatch(value)
    return not (is_place or is_amount)


def is_number(text: str) -> bool:
    """Return whether a text is a plain number, as in any table of figures."""
    return bool(_NUMBER.fullmatch(text))


def has_secret(text: str) -> bool:
    """Return whether any part of a text has the format of a secret."""
    return _without_forms(text) != text


def clean(text: str) -> str:
    """Return `text` for terminal output, without control characters and secrets.

    Secrets are those of the environment, and known formats.
    """
    return redact(printable(text), os.environ)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` without secrets: known formats, and values of secret environment variables."""
    if environment:
        for value, word in _values(frozenset(environment.items())):
            if value in text:
                text = word.sub(REDACTED, text)
    return _without_forms(text)


@cache
def _values(environment: frozenset[tuple[str, str]]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return secret values as any writer spells them, and their patterns, longest first.

    The longest comes first because one value may contain another.
    """
    spellings = {
        spelling
        for name, value in environment
        if has_secret_name(name, value)
        and len(value) >= SHORTEST_VALUE
        and not (_PLACE_NAME.search(name) and value.startswith("/"))
        for spelling in _spellings(value)
    }
    # In JSON and Python an escape before a value ends in a letter or digit.
    before = r"(?:(?<!\w)|(?<=\\[abfnrtv])|(?<=\\u[0-9a-fA-F]{4})|(?<=\\x[0-9a-f]{2}))"
    return tuple(
        (
            text,
            re.compile(
                (before if re.match(r"\w", text) else "")
                + re.escape(text)
                + (r"(?!\w)" if re.search(r"\w\Z", text) else "")
            ),
        )
        for text in sorted(spellings, key=len, reverse=True)
    )


def _spellings(value: str) -> set[str]:
    """Return a value and its spellings in JSON, Python, HTML, YAML, a shell and a terminal."""
    texts = {value, printable(value), value.strip(), *value.splitlines()}
    texts |= {
        json.dumps(text, ensure_ascii=ascii)[1:-1] for text in texts for ascii in (True, False)
    }
    texts |= {repr(text)[1:-1] for text in (value, printable(value))}
    texts |= {value.replace("'", "''"), value.replace("'", "'\"'\"'"), quote(value, safe="")}
    for escape in (("&#34;", "&#39;"), ("&quot;", "&#x27;")):
        for text in tuple(texts):
            markup = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            texts.add(markup.replace('"', escape[0]).replace("'", escape[1]))
    return {
        text for text in texts if len(text) >= SHORTEST_VALUE and not _COMMON_WORD.fullmatch(text)
    }


def _without_forms(text: str) -> str:
    lower = text.lower()
    # A few letters have a lower case of two characters, which would shift all later positions.
    if len(lower) != len(text):
        lower = "".join(letter if len(letter.lower()) != 1 else letter.lower() for letter in text)
    spans: list[tuple[int, int]] = []
    # A format does not match again inside its own match, but another one may:
    # `npm_NAME_token=VALUE`.
    ends = [0] * len(_FORMS)
    for beginning in _BEGINNING.finditer(lower):
        start = beginning.start()
        for at, form in enumerate(_FORMS):
            match = form.match(text, start) if start >= ends[at] else None
            if match and (span := _secret_span(match)):
                spans.append(span)
                ends[at] = match.end()
    parts: list[str] = []
    position = 0
    for start, end in sorted(spans):
        if start >= position:
            parts += [text[position:start], REDACTED]
        position = max(position, end)
    return "".join([*parts, text[position:]]) if parts else text


def _secret_span(match: re.Match[str]) -> tuple[int, int] | None:
    """Return start and end of the secret in a match; None if it is not a secret."""
    parts = match.groupdict()
    if "value" in parts:
        before = match.string[max(0, match.start() - 12) : match.start()]
        is_cache_key = parts["name"].lower().startswith("key") and not _OF_KEYS.search(before)
        if is_cache_key or not _is_random(parts["value"]):
            return None
    return match.start() + len(parts.get("keep") or ""), match.end()


def _is_random(word: str) -> bool:
    """Return whether a word looks random: it mixes letters and digits unlike a name.

    `pad_token: <|endoftext|>`, `token=end_of_text` and `secret: kept` are not secrets.
    """
    if _NUMBER.fullmatch(word):
        return False
    classes = [bool(re.search(kind, word)) for kind in (r"[a-z]", r"[A-Z]", r"\d", r"[^\w\s]")]
    digits = sum(character.isdigit() for character in word)
    return sum(classes) >= 3 or (classes[2] and sum(classes) >= 2 and digits * 6 >= len(word))


def secret_words(words: Sequence[str], environment: Mapping[str, str]) -> frozenset[int]:
    """Return the indices of words with a secret, alone or together with the preceding word."""
    before = ("", *words)
    return frozenset(
        at
        for at, (first, word) in enumerate(zip(before, words, strict=False))
        if redact(word, environment) != word
        or not redact(f"{first} {word}", environment).endswith(word)
    )


def redacted_words(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of a command, with words that contain a secret replaced."""
    secret = secret_words(words, environment)
    return tuple(REDACTED if at in secret else word for at, word in enumerate(words))
