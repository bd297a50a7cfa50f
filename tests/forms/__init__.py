"""What every verb prints for fixed inputs, recorded: `python -m tests.forms record|compare`."""
