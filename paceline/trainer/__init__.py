"""Native trainer: a separate program that is copied into every run folder and never imported."""
