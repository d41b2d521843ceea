"""Turns what core knows into text, HTML and tables."""
