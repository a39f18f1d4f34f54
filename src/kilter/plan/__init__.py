"""Pure planners and the judgement of the guard: from values to values."""
