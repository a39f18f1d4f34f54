"""Pure mathematics: statistics, curves, power, intervals. No clocks, threads or devices."""
