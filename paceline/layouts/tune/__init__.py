"""Which layout is fastest: all of them ranked by estimate, or the promising ones tried.

ranking.py ranks without running. tuning.py is a tuning from the question to its result:
candidates.py says what can be tried (processor_rates.py measures a processor first), learner.py
what is expected of it after each trial, search.py tries until nothing better is to be expected or
the budget of budget.py is spent, trials.py runs and recalls the trials, sentences.py says what was
learned. result.py is what comes out, tuned_recipe.py the best layout as a recipe.
"""
