"""Scores beside published results of the round: peers, strong scaling, the page."""
