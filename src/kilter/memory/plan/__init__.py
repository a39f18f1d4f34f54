"""Memory schedules: what leaves the device, when it comes back, and what is recomputed.

`problem` says what must fit, `simulate` judges any schedule, `exact`, `spanning`, `literal` and
`mix` make one, `choose` runs a planner by name and adds the predicted effect.
"""
