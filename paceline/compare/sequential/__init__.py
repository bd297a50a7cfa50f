"""Sequential comparison: pairs tested while they are measured, with one error for all interim
analyses.
"""
