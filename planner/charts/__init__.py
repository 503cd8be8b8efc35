"""Charts, each described once as a Vega-Lite specification with its data inside.

The same description is drawn to a file here, and by the web page and notebooks themselves.
"""
