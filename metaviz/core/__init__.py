"""What metaviz knows and does, without any front end.

Imports torch and the standard library (safetensors and psutil where named); never IPython, ipywidgets or
pandas; never prints.
"""
