"""Files and values: YAML, recipes, catalog, references, run folders, events, logs, the index."""
