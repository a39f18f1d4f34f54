"""Reads optimizer state that may lie on the host by `dict(state)`."""

from reading_state import train

RUN = ("state",)

if __name__ == "__main__":
    train(dict)
