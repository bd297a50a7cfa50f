"""Run the official compliance checker on copies and map its messages to lines of the file."""
