"""Compare scores with published results of the round: peers, strong scaling, report page."""
