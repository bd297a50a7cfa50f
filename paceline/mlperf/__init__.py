"""MLPerf Training by its rules.

`rules` holds the benchmarks, their targets and what is no result; `result_logs` finds the logs of a
set of runs and reads the trials in their lines. `run/` trains to the target, `score/` scores,
`check/` asks the official checker, `compare/` compares scores with published ones, `submission/`
describes systems and lays out packages.
"""
