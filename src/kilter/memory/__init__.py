"""Device memory: budgets that a job is made to fit."""
