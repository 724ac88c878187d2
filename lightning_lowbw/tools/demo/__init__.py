"""The demo, with a table and a plot: `python -m lightning_lowbw.tools.demo`, or `lowbw-demo`."""
