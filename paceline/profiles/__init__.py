"""What a profile is, and how the files that profilers leave are read. Knows no torch."""
