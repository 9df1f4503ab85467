"""What a run will deliver and need, before it starts, or from a checkpoint on.

    forecast = forecast_run(load_run("run.toml"), step_time=0.5)
    forecast.total[0].samples, forecast.labels.trained, forecast.reading.rate
    difference(forecast, forecast_run(load_run("other.toml"))).step

Training order is a function of the position, so all of it is arithmetic: nothing is iterated, and
what is planned is what loaders deliver. `spans` counts positions and ordinals · `makeup` knows what
becomes of labels · `needs` adds up bytes · `caps` compares with max_epochs · `streams` says what is
known of a stream · `report` is what comes out · `differ` compares two runs · `picture` draws.
"""

from penstock.forecast.core import forecast_run
from penstock.forecast.differ import Difference, difference
from penstock.forecast.picture import draw
from penstock.forecast.report import Forecast

__all__ = ["Difference", "Forecast", "difference", "draw", "forecast_run"]
