"""The demo, with a table and a plot: `python -m lightning_lowbw.demo`, or `lowbw-demo`."""
