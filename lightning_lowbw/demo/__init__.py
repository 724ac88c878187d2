"""The demo, with a table and a plot: `python -m lightning_lowbw.demo`, or `lowbw-demo`.

`cli` runs `training`, an ordinary Lightning script, on the throttled nodes of the lab, with ddp and with dgc; `report`
makes the table and the plot.
"""
