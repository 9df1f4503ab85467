"""Charts without a dependency: lines and stacked areas, to SVG or, pixel by pixel, to PNG.

    chart = Chart("Loss", x="step", y="nats a token")
    chart.lines({"one rank": (steps, losses), "resumed": (later, others)})
    chart.mark(1000, "killed here")
    save("loss.png", chart)                         # or loss.svg: the suffix decides

Several charts share a picture, one below the other, and, since they are read together, the
horizontal axis and the colours of their names.
"""

from penstock.chart.figure import Chart, save

__all__ = ["Chart", "save"]
