"""MLPerf Training: running, scoring, checking and packaging results by the rules.

`rules` holds the benchmarks, their targets and the criteria for rejecting a result. `result_logs`
finds the logs of a set of runs and reads the trials from their lines. `run/` trains to the target,
`score/` scores, `check/` runs the official checker, `compare/` compares scores with published ones,
and `submission/` describes systems and builds packages.
"""
