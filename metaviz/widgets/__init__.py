"""Interactive widgets: one .py, one .js and one .css each."""
