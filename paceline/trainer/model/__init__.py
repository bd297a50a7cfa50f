"""Models, and what one rank computes of them, attention over parts of a sequence included."""
