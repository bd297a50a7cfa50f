"""MLPerf Training by its rules.

`rules` holds the benchmarks and their targets, `eligibility` what is no result; `result_logs`
finds the logs of a set of runs, `logged_trial` reads a trial out of their lines. `run/` trains to
the target, `score/` scores, `check/` asks the official checker, `compare/` holds scores against
published ones, `submission/` describes systems and lays out packages.
"""
