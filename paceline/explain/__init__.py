"""The causes of a slow run: lost time by cause, each with evidence and a remedy."""
