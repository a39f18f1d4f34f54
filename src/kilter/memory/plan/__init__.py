"""Memory schedules: what is offloaded, when it is prefetched, and what is recomputed.

`problem` says what must fit, `simulate` judges any schedule, `exact`, `spanning`, `literal` and
`mix` make one, `choose` runs a planner by name and adds the predicted effect.
"""
