"""Files and values: YAML, recipes, catalog, references, run folders, events, log files, the index."""
