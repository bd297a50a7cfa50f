"""Import of foreign logs: detection, parsing, completion and consistency checks."""
