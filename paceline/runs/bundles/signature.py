"""Signatures of bundles by ssh-keygen: bundle.json is signed, which lists every file's SHA-256.

Without Paceline, `tar -xOf BUNDLE RUN/bundle.json | ssh-keygen -Y verify -n paceline-bundle
-f ALLOWED_SIGNERS -I NAME -s BUNDLE.sig` does the same.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.text import printable, shorten
from paceline.files.documents import open_regular
from paceline.files.programs import run_program

NAMESPACE = "paceline-bundle"
"""Purpose of the signature; one made for anything else is not accepted."""
LIMIT_S = 60.0
MAX_SIGNATURE_BYTES = 1 << 16
MAX_MESSAGE = 200
"""Maximum number of characters of a message that is quoted."""


def signature_file(bundle: Path) -> Path:
    """Return the file next to a bundle that holds its signature."""
    return bundle.with_name(f"{bundle.name}.sig")


def sign(text: str, key: Path) -> str:
    """Return the signature of a text by a private key, or by the agent's key of a public one.

    Raises UserError if the key cannot sign, and SystemFaultError without ssh-keygen.
    """
    if not key.is_file():
        raise UserError(f"--sign {key}", "is not a file", allowed="an SSH key, private or public")
    result = _ssh_keygen("sign", "-f", str(key.absolute()), text=text)
    if result.returncode or "BEGIN SSH SIGNATURE" not in result.stdout:
        remedy = "load a key with a passphrase into ssh-agent, and name its public file"
        raise UserError(f"--sign {key}", f"cannot sign: {_last_line(result.stderr)}", remedy=remedy)
    return result.stdout


def signer_of(text: str, bundle: Path, allowed_signers: Path) -> tuple[str | None, str | None]:
    """Return who signed a bundle's file list, or the reason why nobody who is allowed to did.

    Raises UserError if the file of allowed signers is missing, and SystemFaultError without
    ssh-keygen.
    """
    if not allowed_signers.is_file():
        raise UserError(
            f"--signer {allowed_signers}",
            "is not a file",
            remedy='write one line per signer: `NAME namespaces="paceline-bundle" PUBLIC-KEY`',
        )
    signature = signature_file(bundle)
    try:
        with open_regular(signature) as file:
            is_too_large = len(file.read(MAX_SIGNATURE_BYTES + 1)) > MAX_SIGNATURE_BYTES
    except OSError as error:
        return None, f"{signature.name}: {error.strerror}"
    if is_too_large:
        return None, f"{signature.name} is larger than {MAX_SIGNATURE_BYTES:,} bytes"
    files = ("-f", str(allowed_signers.absolute()), "-s", str(signature.absolute()))
    principals = _ssh_keygen("find-principals", *files, text="")
    names = principals.stdout.replace(",", "\n").splitlines()
    if principals.returncode or not names:
        return None, f"no signer in {allowed_signers} made it: {_last_line(principals.stderr)}"
    result = _ssh_keygen("verify", *files, "-I", names[0], text=text)
    if result.returncode:
        return None, f"it does not match the bundle: {_last_line(result.stderr or result.stdout)}"
    return printable(shorten(names[0], MAX_MESSAGE)), None


def _ssh_keygen(action: str, *words: str, text: str) -> subprocess.CompletedProcess[str]:
    # Neither a terminal nor a window may ask for a passphrase.
    env = {**os.environ, "LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}
    command = ["ssh-keygen", "-Y", action, *words]
    if action != "find-principals":
        command += ["-n", NAMESPACE]
    try:
        return run_program(command, text=text, env=env, limit_s=LIMIT_S)
    except FileNotFoundError as error:
        remedy = "install OpenSSH 8.2 or newer"
        raise SystemFaultError("ssh-keygen", "is not installed", remedy=remedy) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemFaultError("ssh-keygen", f"cannot be run: {error}") from error


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return printable(shorten(lines[-1].strip(), MAX_MESSAGE)) if lines else "without a message"
