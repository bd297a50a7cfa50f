"""Entry point of `paceline`, which handles interrupts from its first instruction on."""

import _signal  # pyright: ignore[reportMissingImports]

# Until there is a handler, signals wait; the standard module would have to be loaded first.
_signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP))

import contextlib  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

from paceline.core import interrupts  # noqa: E402

INTERRUPTED = 130


def main() -> None:
    """Run the command line; an interrupt ends it with exit code 130 and one line."""
    interrupts.install_handlers()
    try:
        with interrupts.deferred_interrupts():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.SIGNALS)
            from paceline.cli import main as command_line
        command_line()
    except (KeyboardInterrupt, SystemExit) as end:  # typer turns an interrupt into the exit
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        interrupts.ignore_interrupts()
        with contextlib.suppress(OSError):  # the terminal may be closed
            print("interrupted", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    finally:
        interrupts.ignore_interrupts()


if __name__ == "__main__":
    main()
