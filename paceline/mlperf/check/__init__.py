"""The official compliance checker: run on copies of logs, its messages with lines of the file."""
