"""Which layout is fastest: all of them ranked by estimate, or the promising ones tried.

ranking.py ranks without running. tuning.py is a tuning from the question to its result and the best
layout as a recipe: candidates.py says what can be tried, search.py learns from each trial and tries
until nothing better is to be expected or the budget is spent, trials.py runs and recalls the
trials. result.py is what comes out, with what was learned in sentences, report.py the
document of it.
"""
