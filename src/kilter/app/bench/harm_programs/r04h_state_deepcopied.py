"""Reads optimizer state that may lie on the host by `copy.deepcopy(state)`."""

import copy

from reading_state import train

RUN = ("state",)

if __name__ == "__main__":
    train(copy.deepcopy)
