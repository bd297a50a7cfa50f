"""The official compliance checker: run on copies of logs, its messages in plain words."""
