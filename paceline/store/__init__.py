"""The index of runs: a database that can be deleted and rebuilt from the run folders."""
