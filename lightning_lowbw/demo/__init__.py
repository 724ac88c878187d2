"""What the package is for, in one table and one picture: `python -m lightning_lowbw.demo`, or `lowbw-demo`.

`cli` runs `training`, an ordinary Lightning script, on the throttled nodes of the lab, with ddp and with dgc; `report`
makes the table and the plot.
"""
