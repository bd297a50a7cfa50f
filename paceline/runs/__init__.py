"""One run from plan to result, and many runs: repeats, comparisons, history."""
