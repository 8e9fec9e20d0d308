"""Answers for a dataset → detection figures, comparisons, tables and pictures."""
