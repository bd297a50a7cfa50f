"""MLPerf Training by its rules: trials out of result lines, reference convergence, scores."""
