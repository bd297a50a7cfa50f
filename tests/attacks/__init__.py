"""Attacks from outside: each ends in one clear line, and nothing is lost."""
