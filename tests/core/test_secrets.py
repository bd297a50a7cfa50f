"""Which texts are secrets, and that no other text is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.secrets import REDACTED, has_secret, is_secret, redact

ROOT = Path(__file__).parents[2]
# Joined from parts, so that no scanner of repositories takes them for real ones.
HUB = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7"
CLOUD = "AKIA" + "Q3EXAMPLE7SAMPLE"
WEB_TOKEN = "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"
PRIVATE_KEY = (
    "-----BEGIN OPENSSH PRIVATE " + "KEY-----\nb3BlbnNzaC1rZXk\nAAAAB3Nz\n"
    "-----END OPENSSH PRIVATE " + "KEY-----"
)
FORMS = {
    "hub": (f"login with {HUB}", HUB),
    "catalog": ("nvapi-" + "x7" * 20, "nvapi-" + "x7" * 20),
    "models": ("sk-" + "proj-a1B2c3D4e5F6g7H8", "sk-proj-a1B2c3D4e5F6g7H8"),
    "code host": ("ghp_" + "a1B2c3D4e5F6g7H8i9J0", "ghp_a1B2c3D4e5F6g7H8i9J0"),
    "second code host": ("glpat-" + "a1B2c3D4e5F6g7H8i9J0", "glpat-a1B2c3D4e5F6g7H8i9J0"),
    "cloud": (f"id {CLOUD} of the bucket", CLOUD),
    "second cloud": ("AIza" + "Sy4bC-d5e6F7g8H9i0J1k2L3m4N5o6P7", "Sy4bC-d5e6F7g8H9i0J1k2L3m4N5"),
    "chat": ("xoxb-" + "123456789012-aBcDeF", "123456789012-aBcDeF"),
    "registry": ("dckr_pat_" + "a1B2c3D4e5F6g7H8i9", "a1B2c3D4e5F6g7H8i9"),
    "web token": (f"cookie: session={WEB_TOKEN}", WEB_TOKEN),
    "URL with user and password": ("git clone https://me:pw7!x@host/a.git", "pw7!x"),
    "URL with a password of signs": ("https://me:p/w@7#x@host/a", "p/w@7#x"),
    "URL with a token alone": ("https://t0ken7value@host/a.git", "t0ken7value"),
    "image": ("docker://robot:pw7x@registry.example/img:1", "pw7x"),
    "database": ("postgresql://me:hunter2@db/runs", "hunter2"),
    "bearer": ("Authorization: Bearer a1b2c3d4e5f6", "a1b2c3d4e5f6"),
    "bearer alone": ("sent Bearer a1b2c3d4e5f6 to it", "a1b2c3d4e5f6"),
    "basic": ('{"Authorization": "Basic dXNlcjpwYXNz"}', "dXNlcjpwYXNz"),
    "basic alone": ("with Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    "token alone": ("sent Token a1b2c3d4e5f6", "a1b2c3d4e5f6"),
    "authorization": ("authorization=plain-value-7", "plain-value-7"),
    "account key": ("AccountName=a;AccountKey=q7Zk9+/w3E5r==;Suffix=b", "q7Zk9+/w3E5r=="),
    "shared signature": ("https://a.example/b?sv=1&sig=q7Zk9%2Fw3E5r%3D", "q7Zk9%2Fw3E5r%3D"),
    "password": ("password=correct-horse", "correct-horse"),
    "passphrase": ("unlock --passphrase corr3ct now", "corr3ct"),
    "password in JSON": ('{"passwd": "Hunter22"}', "Hunter22"),
    "API key": ("WANDB_API_KEY=0123456789abcdef0123", "0123456789abcdef0123"),
    "header of a key": ("X-Api-Key: q7Zk9w3E5r", "q7Zk9w3E5r"),
    "secret": ("client_secret=q7Zk9w3E5r", "q7Zk9w3E5r"),
    "cloud secret": ("aws_secret_access_key = wJalrXUt7nFEMI/K7MDENG", "wJalrXUt7nFEMI/K7MDENG"),
    "token in JSON": ('"refresh_token": "1q2w3e4r5t6z"', "1q2w3e4r5t6z"),
    "private key": (f"before\n{PRIVATE_KEY}\nafter", "b3BlbnNzaC1rZXk"),
}
PLAIN = (
    "step 1200/5000 | tokens per second: 16384.2 | key: 0b1f3a9c",
    "flops_per_token: 4.8e11",
    '"flops_per_token": 480000000000.0, "consumed_tokens": 123456789',
    "pad_token: <|endoftext|>",
    "token=end_of_text secret: kept",
    "tokens: 12345678",
    "cache key: 0b1f3a9c4d5e6f70",
    "/data/c4/en/c4-train.00000-of-01024.json.gz",
    "git@github.com:org/repo.git",
    "ssh://git@github.com/org/repo.git",
    "https://example.com/a/b?page=2#part",
    "https://example.com/@user/post",
    "docker://nvcr.io/nvidia/pytorch:24.05-py3",
    "a basic understanding of the bearer of news",
    "Basic information about token embeddings",
    "use_distributed_optimizer ... tokenizer_type: GPTSentencePieceTokenizer",
    "no password was needed",
    "the width of the token embedding. A basic follow-up on token positions.",
    "at token 123456789 of 1,000",
    "-----BEGIN CERTIFICATE-----",
)


@pytest.mark.parametrize("form", FORMS)
def test_what_has_the_form_of_a_secret_is_left_out(form: str):
    text, secret = FORMS[form]
    assert has_secret(text) and secret in text
    assert secret not in redact(text) and REDACTED in redact(text)


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays_as_it_is(text: str):
    assert redact(text) == text and not has_secret(text)


@pytest.mark.parametrize("form", FORMS)
def test_redacting_again_changes_nothing(form: str):
    clean = redact(FORMS[form][0])
    assert redact(clean) == clean


def test_a_name_with_the_form_of_a_secret_does_not_hide_the_secret_behind_it():
    assert redact("npm_registryaccesstoken=a1B2c3D4e5") == f"{REDACTED}={REDACTED}"


def test_what_stands_around_a_secret_stays():
    text = f"before\n{PRIVATE_KEY}\nafter"
    assert redact(text) == f"before\n{REDACTED}\nafter"
    assert redact("https://me:pw7!x@host/a.git, next") == f"https://{REDACTED}@host/a.git, next"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "314159265358"),
        ("NGC_API_KEY", "plainlowercaseword"),
        ("SITE_PASSWORD", "correct horse"),
        ("DB_PWD", "hunter2"),
        ("CI_JOB_JWT", "aa.bb.cc"),
    ],
)
def test_values_of_secret_variables_are_left_out_of_every_text(name: str, value: str):
    environment = {name: value, "HOME": "/root"}
    assert is_secret(name, value)
    assert redact(f"it said {value}, then /root", environment) == f"it said {REDACTED}, then /root"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("SSH_AUTH_SOCK", "/tmp/agent.12"),
        ("PASSES", "12"),
        ("MAX_TOKENS", "1048576"),
        ("FLOPS_PER_TOKEN", "4.8e11"),
        ("KEYBOARD", "german"),
        ("HOME", "/home/someone"),
        ("DB_PASSWORD", "training"),
        ("AUTH_MODE", "native"),
        ("DBUS_AUTH", "Enabled"),
        ("WANDB_API_KEY", "disabled"),
        ("SLURM_JWT", "daemon"),
        ("GIT_ASKPASS", "/usr/bin/true"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/google.json"),
        ("SSL_KEYPATH", "/etc/ssl/keys"),
        ("TOKEN_DIRECTORY", "/run/tokens"),
    ],
)
def test_values_that_are_in_every_text_are_not_searched_for(name: str, value: str):
    assert redact(f"the value is {value} indeed", {name: value}) == f"the value is {value} indeed"


SECRET_WORDS = (
    "TOKEN",
    "KEY",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASS",
    "CREDENTIALS",
    "AUTH",
    "JWT",
)
OTHER_WORDS = (
    *("TOKENIZER", "TOKENIZERS", "DETOKENIZE", "PARALLELISM", "KEYBOARD", "MONKEY", "HOTKEY"),
    *(
        "BYPASS",
        "COMPASS",
        "PASSES",
        "PASSIVE",
        "AUTHOR",
        "AUTHORITY",
        "CREDIT",
        "SECRETARY",
        "COOKIECUTTER",
    ),
    *("NCCL", "MODEL", "NUM", "HF", "PATH", "LAUNCH"),
)
VALUES = st.text("abcdefghijklmnop", min_size=12)


@given(st.lists(st.sampled_from(OTHER_WORDS), min_size=1, max_size=4), VALUES, st.booleans())
def test_a_word_that_only_contains_the_name_of_a_secret_is_none(
    words: list[str], value: str, small: bool
) -> None:
    name = "_".join(words)
    assert not is_secret(name.lower() if small else name, value)


@given(
    st.lists(st.sampled_from(OTHER_WORDS), max_size=2),
    st.sampled_from(SECRET_WORDS),
    st.sampled_from(("", "_2", "_ID", "_BASE64")),
    VALUES,
    st.booleans(),
)
def test_a_name_with_the_word_of_a_secret_is_one(
    words: list[str], word: str, end: str, value: str, small: bool
) -> None:
    name = "_".join([*words, word]) + end
    assert is_secret(name.lower() if small else name, value)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("TOKENIZERS_PARALLELISM", "False", False),
        ("TOKENIZER_MODEL", "/models/llama3/tokenizer.json", False),
        ("MAX_TOKENS", "4096", False),
        ("MAX_TOKENS", "8k", False),
        ("IMAGE_MAX_TOKEN_NUM", "16384", False),
        ("XAUTHORITY", "/root/.Xauthority", False),
        ("SSH_AUTH_SOCK", "/tmp/agent.12", False),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", False),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1", False),
        ("USE_AUTH", "true", False),
        ("HF_TOKEN", "", False),
        ("HFTOKEN", "plainword", True),
        ("WANDB_APIKEY", "plainword", True),
        ("APIKEYS", "plainword", True),
        ("TOKENS_PER_BATCH", "15M", False),
        ("NUM_KEYS", "128", False),
        ("DB_PASS", "123456", True),
        ("REDIS_AUTH", "918273645", True),
        ("DB_PASSWORDS", "123456", True),
        ("API_SECRETS", "123456", True),
        ("AUTH_TOKENS", "123456789", True),
        ("MAX_AUTH_TOKENS", "123456789", True),
        ("SSH_PASSCODE", "12345678", True),
        ("WIFI_KEYS", "12345678", True),
        ("MYSQL_PW", "20240101", True),
        ("ACCESS_TOKENV2", "plainword", True),
        ("COMMONKEY", "plainword", True),
        ("clientSecretValue", "plainword", True),
        ("TOKENVALUE", "plainword", True),
        ("AUTHHEADER", "plainword", True),
        ("BASIC_AUTHENTICATION", "plainword", True),
        ("DOCKER_AUTHCONFIG", "plainword", True),
        ("tokenizerPath", "plainword", False),
        ("SLACK_WEBHOOK", "T0/B0/plainword", True),
        ("STORAGE_SAS", "plainword", True),
        ("REDIS_PW", "plainword", True),
        ("SECRET_FILE", "plainword", True),
    ],
)
def test_variables_of_real_programs(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_the_longest_of_two_values_goes_first_and_parts_of_words_stay():
    environment = {"A_TOKEN": "abc-123", "B_TOKEN": "abc-123-def-456"}
    assert redact("abc-123-def-456 and abc-123", environment) == f"{REDACTED} and {REDACTED}"
    assert redact("xabc-123y", environment) == "xabc-123y"


@pytest.mark.parametrize("part", ["://a:", "token=", "password ", "key=a1 ", "Bearer ", "sk-"])
def test_a_text_of_beginnings_alone_ends(part: str):
    assert redact(part * 10_000)


def test_the_programs_that_are_written_into_run_folders_stay_as_they_are():
    sources = [
        path.read_text()
        for path in (ROOT / "paceline").rglob("*.py")
        if path.name != "secrets.py"  # examples of them
    ]
    assert len(sources) > 100
    assert [text for text in sources if redact(text) != text] == []
