"""A run's answers to look at: one HTML file with images, matches, tokens and curves."""

from coordexp.viewer.collect import ViewData, ViewRecord, collect
from coordexp.viewer.render import render

__all__ = ["ViewData", "ViewRecord", "collect", "render"]
