"""What was tried from outside to make Paceline fall, kept: one test for each cause."""
