"""Find the fastest layout by ranking all estimates, or by trying the promising ones.

ranking.py ranks without running. tuning.py runs a search and writes the best layout as a recipe:
candidates.py lists the layouts, search.py chooses the next trial and learns from it, and trials.py
runs and recalls trials. result.py holds the result, and report.py its document.
"""
