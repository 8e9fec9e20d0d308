"""A run's answers to look at: one HTML file with images, matches, tokens and curves."""
