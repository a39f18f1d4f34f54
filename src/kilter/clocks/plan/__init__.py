"""Pure planning of clocks: which setting to try, how it is judged, what is decided."""
