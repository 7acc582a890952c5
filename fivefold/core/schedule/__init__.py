"""Pipeline schedules as values: one object is checked, timed, drawn and executed."""
