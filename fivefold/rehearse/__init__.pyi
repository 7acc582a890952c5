from fivefold.rehearse.job import Rehearsed as Rehearsed
from fivefold.rehearse.job import rehearse as rehearse
from fivefold.rehearse.on_gpu import Forecasted as Forecasted
from fivefold.rehearse.on_gpu import forecast_on_gpu as forecast_on_gpu
from fivefold.rehearse.rehearsal import how_many as how_many
