"""What every node of a job runs, whoever starts it there."""
