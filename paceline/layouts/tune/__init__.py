"""Which layout is fastest: all of them ranked by estimate, or the promising ones tried.

ranking.py ranks without running; candidates.py says what can be tried, learning.py what is expected of it
after each trial, trying.py tries until nothing better is to be expected, telling.py says what was learned.
"""
