"""The part of a training that one rank holds: its modules, put together and passed through."""
