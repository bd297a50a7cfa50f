"""Submissions: systems described, packages laid out and put under the official package checker."""
